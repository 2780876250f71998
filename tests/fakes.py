"""An engine around a tiny or a fake model, and a way to run requests through it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.batch import Batch
from engine.build import BuiltEngine, assemble
from engine.cache.store import CacheShape, KVStore
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.control.adaptive import AdaptivePlanner
from engine.control.planner import ShieldedPlanner
from engine.core import Engine
from engine.draft.drafter import Drafter
from engine.draft.portfolio import DrafterPortfolio
from engine.model.loader import LoadedModel
from engine.model.passes import Pass, check_layers, start_timer
from engine.stats import StepStats
from engine.status import adaptive
from engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    SamplingParams,
    SpeculationParams,
    TokenLogprobs,
    Tokens,
)
from tests.tiny_models import CONTEXT, EOS, VOCAB, load

# -- a model that is none ------------------------------------------------------------------


class FakeRunner:
    """Logits from a hash of the prefix, which is read back through the page tables: a token in
    the wrong page, or one that should have gone, changes everything that follows.

    The last token decides most of a row, so that texts repeat and lookup drafts are kept.
    """

    min_rows = 1
    branches = True
    device = torch.device("cpu")

    def __init__(self, num_pages: int, page_size: int) -> None:
        shape = CacheShape(num_layers=1, num_heads=1, head_size=1, dtype=torch.float32)
        self.store = KVStore(shape, num_pages, page_size, self.device)
        self._tokens = [-1] * (num_pages + 1) * page_size

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`. Features [T, 3] of a row: layer, position, hash of its prefix."""
        check_layers(features, self.store.shape.num_layers)
        end = start_timer(self.device)
        slots, tokens = batch.slots.tolist(), batch.input_ids.tolist()
        for slot, token in zip(slots, tokens, strict=True):
            self._tokens[slot] = token
        starts, tables = batch.query_starts.tolist(), batch.page_tables.tolist()
        where: dict[int, list[int]] = {}  # row -> slots of the prefix that it sees
        for s, begin, stop, read, way in _ways(batch):
            first = int(batch.context_lengths[s]) - (starts[s + 1] - starts[s]) - read
            places = [*range(first), *(first + i for i in way)]
            own = [
                tables[s][p // batch.page_size] * batch.page_size + p % batch.page_size
                for p in places
            ]
            for i in range(begin, stop):
                row = starts[s] + way[i] - read
                assert row not in where
                assert slots[row] == own[first + i]
                assert batch.positions[row] == first + i
                where[row] = own[: first + i + 1]
        assert len(where) == starts[-1]
        asked = [self._prefix(where[row]) for row in batch.logit_rows.tolist()]
        logits = torch.stack(list(map(fake_logits, asked))) if asked else torch.empty(0, VOCAB)
        kept: dict[int, torch.Tensor] = {}
        if features:
            prefixes = [self._prefix(where[row]) for row in range(starts[-1])]
            kept = {i: torch.stack([fake_features(i, p) for p in prefixes]) for i in features}
        return Pass(logits, end(), kept)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeRunner.move`."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._tokens[target] = self._tokens[source]

    def _prefix(self, slots: list[int]) -> list[int]:
        prefix = [self._tokens[slot] for slot in slots]
        assert min(prefix) >= 0, "attends to a slot that was never written"
        return prefix


def _ways(batch: Batch) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Sequence, first and end of a branch's own tokens, tokens that were read before, and all
    query tokens on its way."""
    starts = batch.query_starts.tolist()
    if batch.branches is None or batch.paths is None:
        for s in range(len(starts) - 1):
            count = starts[s + 1] - starts[s]
            yield s, 0, count, 0, list(range(count))
        return
    paths = batch.paths.tolist()
    for s, begin, end, fed, read, path in batch.branches.tolist():
        way = list(range(end)) if path < 0 else [*range(fed), *paths[path : path + end - fed]]
        yield s, begin, end, read, way


class Around:
    """A runner around another, for tests that change what a pass says or does."""

    def __init__(self, runner: Any) -> None:
        self.inner = runner
        self.store, self.device, self.min_rows = runner.store, runner.device, runner.min_rows
        self.branches = runner.branches

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`."""
        passed: Pass = self.inner.forward(batch, features)
        return dataclasses.replace(passed, logits=self.change(batch, passed.logits.clone()))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeRunner.move`."""
        self.inner.move(sources, targets)

    def change(self, _batch: Batch, logits: torch.Tensor, /) -> torch.Tensor:
        """The logits that are handed on; `logits` are its own to change."""
        return logits


def fake_features(layer: int, prefix: Iterable[int]) -> torch.Tensor:
    """The fake model's hidden state [3] after a prefix: layer, position, hash of the prefix."""
    tokens = array("q", prefix)
    return torch.tensor([float(layer), len(tokens) - 1.0, float(zlib.crc32(tokens) % 2**20)])


def fake_logits(prefix: Iterable[int]) -> torch.Tensor:
    """The fake model's logits [V] after a prefix."""
    return _fake_logits(tuple(prefix))


@functools.lru_cache(maxsize=1 << 16)
def _fake_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    return 6 * _noise(prefix[-1:]) + _noise(prefix)


def _noise(tokens: tuple[int, ...]) -> torch.Tensor:
    seed = zlib.crc32(array("q", tokens).tobytes())
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed))


def load_fake(max_model_len: int = CONTEXT) -> LoadedModel:
    """`FakeRunner` as a loaded model."""
    return LoadedModel(
        make_runner=FakeRunner,
        runner_name="fake",
        shape=CacheShape(num_layers=1, num_heads=1, head_size=1, dtype=torch.float32),
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
    )


# -- an engine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """How an engine is built; `loaded` is None for the fake model. `draft` is what the "model"
    drafter runs, `head` what "eagle" does. `drafters` are several built-in ones, or several that
    are injected."""

    loaded: LoadedModel | None = None
    draft: LoadedModel | None = None
    head: LoadedModel | None = None
    drafter: str | Drafter = "none"
    drafters: tuple[str | Drafter, ...] = ()
    store: int = 0  # bytes of past answers for "lookup"
    mode: str = "fixed"
    max_draft: int = 4
    max_nodes: int = 0
    page_size: int = 4
    num_pages: int = 256
    prefix_reuse: bool = True
    max_sequences: int = 16
    max_batch_tokens: int = 64
    eos: frozenset[int] | None = None
    max_model_len: int | None = None
    wrap: Callable[[Any], Any] = field(default=lambda runner: runner)


def make_engine(setup: Setup = Setup(), **changes: Any) -> BuiltEngine:
    """An engine with an injected drafter and, with `wrap`, an injected runner.

    Args:
        changes: to the fields of `setup`.
    """
    setup = dataclasses.replace(setup, **changes)
    loaded = setup.loaded or load_fake()
    loaded = dataclasses.replace(
        loaded,
        max_model_len=setup.max_model_len or loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids if setup.eos is None else setup.eos,
    )
    wanted = setup.drafters or (setup.drafter,)
    built_in = tuple(d for d in wanted if isinstance(d, str)) or ("none",)
    names = tuple(d if isinstance(d, str) else d.name for d in wanted)
    owned = {"model": setup.draft, "eagle": setup.head}
    models = {name: model for name, model in owned.items() if model is not None}
    built = assemble(make_config(setup, *built_in), loaded, models)
    parts = built.engine.parts
    drafters = {d.name: d for d in wanted if not isinstance(d, str)}
    if drafters:
        portfolio = DrafterPortfolio(drafters, loaded.vocab_size)
        planned = adaptive(parts.planner)
        assert planned is not None
        again = AdaptivePlanner(planned.depth, planned.costs, planned.mode, portfolio)
        planner = ShieldedPlanner(again)
        parts = dataclasses.replace(parts, drafters=portfolio, planner=planner)
    parts = dataclasses.replace(parts, target=setup.wrap(parts.target))
    engine = Engine(
        parts,
        max_model_len=loaded.max_model_len,
        default_drafters=names,
        max_draft=setup.max_draft,
        max_nodes=setup.max_nodes,
    )
    rules = dataclasses.replace(built.rules, drafters=tuple(drafters) or built.rules.drafters)
    return dataclasses.replace(built, engine=engine, rules=rules)


def make_config(setup: Setup = Setup(), *drafters: str) -> EngineConfig:
    """The configuration of `setup`."""
    return EngineConfig(
        model=ModelConfig("tiny"),
        cache=CacheConfig(
            page_size=setup.page_size,
            num_pages=setup.num_pages,
            prefix_reuse=setup.prefix_reuse,
        ),
        scheduler=SchedulerConfig(
            max_batch_tokens=setup.max_batch_tokens, max_sequences=setup.max_sequences
        ),
        speculation=SpeculationConfig(
            mode=setup.mode,
            drafters=drafters or ("none",),
            lookup_store_bytes=setup.store,
            max_draft=setup.max_draft,
            max_nodes=setup.max_nodes,
        ),
        threads=1,
    )


def tiny(family: str = "llama", dtype: torch.dtype = torch.float32, runner: str = "auto") -> Setup:
    """The set-up of a tiny random model."""
    return Setup(load(family, dtype, runner))


def ask(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 16,
    speculation: SpeculationParams | None = None,
    **sampling: Any,
) -> Request:
    """A request; greedy unless `sampling` says otherwise."""
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
    return Request(request_id, tuple(prompt), params, speculation or SpeculationParams())


# -- running requests ----------------------------------------------------------------------


@dataclass
class Choice:
    """What one choice has said so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """Everything that must not depend on speculation or company."""
        reason = self.end.reason if self.end else None
        stop = self.end.stop_token_id if self.end else None
        return tuple(self.tokens), tuple(self.logprobs), reason, stop


@dataclass
class Answer:
    """What came of one request."""

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    failed: Failed | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """Everything that must not depend on speculation or company."""
        return *(self.choices[i].said for i in sorted(self.choices)), self.prompt_logprobs

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the only choice."""
        assert list(self.choices) == [0]
        return tuple(self.choices[0].tokens)


class Run:
    """Steps an engine and holds its events to the protocol."""

    def __init__(self, built: BuiltEngine, requests: Iterable[Request] = ()) -> None:
        self.built = built
        self.engine = built.engine
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.stats: list[StepStats] = []
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Validates and queues a request."""
        self.built.rules.validate(request)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answer()
        self.engine.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Aborts a request, or one of its choices."""
        self.engine.abort(request_id, choice, FinishReason.ABORT)

    def step(self, *, check: bool = False) -> list[Event]:
        """One step."""
        output = self.engine.step()
        for event in output.events:
            self._take(event)
        if output.stats is not None:
            self.stats.append(output.stats)
        if check:
            self.engine.check()
        return output.events

    def finish(self, *, check: bool = False, most: int = 20_000) -> Run:
        """Steps until nothing is left, then looks for leaks."""
        while self.engine.has_work:
            self.step(check=check)
            most -= 1
            assert most, "the engine does not come to an end"
        self.engine.check()
        assert self.engine.parts.pool.num_used == 0
        for request_id, request in self.requests.items():
            answer = self.answers[request_id]
            ended = {i for i, choice in answer.choices.items() if choice.end}
            assert answer.failed or ended == set(range(request.sampling.n))
        return self

    def said(self, request_id: str) -> tuple[object, ...]:
        """Everything about an answer that must not depend on speculation or company."""
        answer = self.answers[request_id]
        assert answer.failed is None, answer.failed
        return answer.said

    @property
    def preemptions(self) -> int:
        """Preemptions of all steps."""
        return sum(s.preemptions for s in self.stats)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all steps."""
        return sum(sum(s.accepted_by_position) for s in self.stats)

    def _take(self, event: Event) -> None:
        answer, request = self.answers[event.request_id], self.requests[event.request_id]
        assert answer.failed is None, f"an event after Failed: {event}"
        match event:
            case Tokens():
                choice = answer.choices[event.choice]
                assert choice.end is None, f"an event after Finished: {event}"
                assert event.token_ids, "an empty event"
                choice.tokens += event.token_ids
                wanted = request.sampling.logprobs is not None
                assert (event.logprobs is not None) == wanted
                choice.logprobs += event.logprobs or ()
                assert not wanted or len(choice.logprobs) == len(choice.tokens)
            case Finished():
                choice = answer.choices[event.choice]
                assert choice.end is None, "finished twice"
                choice.end = event
                assert event.stats.generated_tokens == len(choice.tokens)
            case PromptLogprobs():
                assert answer.prompt_logprobs is None, "prompt log probabilities twice"
                answer.prompt_logprobs = event.entries
                assert len(event.entries) == len(request.prompt)
            case Failed():
                answer.failed = event


def run(built: BuiltEngine, requests: Iterable[Request], *, check: bool = False) -> Run:
    """Runs requests that all arrive at once to their end."""
    return Run(built, requests).finish(check=check)
