"""The `eagle` drafter: it drafts what its head says of the features, and changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from engine.build import BuiltEngine, assemble
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.draft.drafter import DraftProposal
from engine.draft.heads.config import HeadConfig
from engine.draft.heads.eagle import EagleDrafter
from engine.errors import ModelNotSupported
from engine.model.loader import adopt_model
from engine.sequence import Sequence
from engine.types import Request, SpeculationParams
from tests.draft.plain_eagle import PlainHead, random_head
from tests.draft.test_portfolio import Switching, planned_by
from tests.fakes import Run, ask, run
from tests.tiny_models import CONTEXT, VOCAB, eager, load, make_model

PROMPTS = [tuple((7 * i + j * j) % VOCAB for j in range(3 + 5 * i)) for i in range(8)]


def engine(
    head: PlainHead | None,
    target: Any = None,
    *,
    drafters: tuple[str, ...] = ("eagle",),
    dtype: str = "float32",
    **cache: Any,
) -> BuiltEngine:
    """An engine with a head; without one, plain decoding."""
    config = EngineConfig(
        model=ModelConfig("tiny"),
        cache=CacheConfig(**{"page_size": 4, "num_pages": 400, **cache}),
        scheduler=SchedulerConfig(max_batch_tokens=24, max_sequences=6),
        speculation=SpeculationConfig(
            mode="fixed", drafters=drafters if head else ("none",), max_draft=4
        ),
    )
    heads = {"eagle": head.loaded(dtype)} if head else {}
    return assemble(config, target or load("llama"), heads)


def requests(count: int = 30, **sampling: Any) -> list[Request]:
    return [ask(f"r{i}", p, count, ignore_eos=True, **sampling) for i, p in enumerate(PROMPTS)]


def said(done: Run) -> list[object]:
    return [done.said(request_id) for request_id in done.requests]


# -- what it drafts ------------------------------------------------------------------------------


@dataclasses.dataclass
class Asked:
    """A draft: after which tokens, with which pages left out, and what was said."""

    tokens: list[int]
    gap: tuple[int, int]
    draft: list[int]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Every draft that is made."""
    found: list[Asked] = []
    propose = EagleDrafter.propose

    def remember(self: EagleDrafter, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        proposal = propose(self, sequences, lengths)
        for sequence, draft in zip(sequences, proposal.tokens, strict=True):
            if draft:
                gap = self._known[sequence].gap
                found.append(Asked(list(sequence.tokens), gap, draft))
        return proposal

    monkeypatch.setattr(EagleDrafter, "propose", remember)
    return found


@torch.inference_mode()
def expected(head: PlainHead, one: Asked, page_size: int = 4) -> list[int]:
    """What plain torch drafts, from transformers' hidden states of the whole text."""
    states = eager("llama")(torch.tensor([one.tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0] for layer in (0, 1)] + [_before_norm(one)], -1)
    first, last = (pages * page_size for pages in one.gap)
    rows = [*range(first), *range(last, len(one.tokens) - 1)]
    behind = [one.tokens[row + 1] for row in rows]
    return head.draft(features[rows], behind, len(one.draft))


def _before_norm(one: Asked) -> torch.Tensor:
    """What the last layer puts out: transformers shows it after the final norm only."""
    found: list[torch.Tensor] = []
    hook = (
        eager("llama")
        .model.layers[-1]
        .register_forward_hook(
            lambda _module, _inputs, out: found.append(out if torch.is_tensor(out) else out[0])
        )
    )
    eager("llama")(torch.tensor([one.tokens]))
    hook.remove()
    return found[0][0]


def test_drafts_are_plain_torchs(asked: list[Asked]) -> None:
    """In a batch of texts of all lengths, with prompts in pieces."""
    head = random_head()
    built = engine(head)
    run(built, requests(12), check=True)
    assert {"lookup", "eagle"} <= set(built.engine.parts.drafters.names)
    assert len(asked) > 60
    assert {len(one.draft) for one in asked} >= {1, 4}
    for one in asked:
        assert one.gap[0] == one.gap[1]
        assert one.draft == expected(head, one)


def test_drafts_after_pauses_and_preemptions_are_plain_torchs(asked: list[Asked]) -> None:
    head = random_head()
    built = planned_by(engine(head, num_pages=36, drafters=("eagle", "lookup")), Switching(2, 5))
    done = run(built, requests(24), check=True)
    assert done.preemptions
    assert any(one.gap[0] != one.gap[1] for one in asked) or len(asked) > 20
    for one in asked:
        assert one.draft == expected(head, one)


def test_a_prefix_that_the_head_has_read_is_shared(asked: list[Asked]) -> None:
    """The second time the prompt comes from the cache, keys and values of the head with it."""
    head = random_head()
    built = engine(head)
    for name in ("first", "again"):
        done = run(built, [ask(name, PROMPTS[6], 20, ignore_eos=True)])
    assert done.answers["again"].choices[0].end.stats.cached_prompt_tokens >= 24  # type: ignore[union-attr]
    assert len(asked) > 5
    for one in asked:
        assert one.gap[0] == one.gap[1]
        assert one.draft == expected(head, one)


def test_a_prefix_that_only_the_target_has_read_is_left_out(asked: list[Asked]) -> None:
    """The first request runs without drafts, so its features were never seen; the next reads a
    part of the prompt itself, and its pages are shared with the last."""
    head = random_head()
    built = engine(head)
    off = SpeculationParams(enabled=False)
    prompt = PROMPTS[7]
    plain = run(built, [ask("off", prompt, 20, off, ignore_eos=True)])
    done = run(built, [ask("on", prompt, 20, ignore_eos=True)], check=True)
    assert done.said("on") == plain.said("off")
    hit = done.answers["on"].choices[0].end.stats.cached_prompt_tokens  # type: ignore[union-attr]
    assert hit >= 32
    assert {one.gap for one in asked} == {(0, hit // 4)}
    for one in asked:
        assert one.draft == expected(head, one)
    built.engine.check()


# -- that it changes nothing ---------------------------------------------------------------------


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
}


@pytest.mark.parametrize(
    ("runner", "dtype", "sampling"),
    [
        ("native", torch.float32, "greedy"),
        ("native", torch.float32, "seeded"),
        ("native", torch.bfloat16, "greedy"),
        ("native", torch.bfloat16, "seeded"),
        ("torch", torch.bfloat16, "seeded"),
        ("reference", torch.float32, "greedy"),
    ],
)
def test_answers_do_not_depend_on_the_head(runner: str, dtype: torch.dtype, sampling: str) -> None:
    """With pauses, preemptions and another drafter in turn."""
    target = load("llama", dtype, runner)
    name = str(dtype).removeprefix("torch.")
    asked = requests(28, **SAMPLING[sampling])
    plain = run(engine(None, target), asked)
    built = engine(random_head(), target, drafters=("eagle", "lookup"), dtype=name, num_pages=44)
    done = run(planned_by(built, Switching(1, 7)), asked, check=True)
    assert said(done) == said(plain)
    assert done.preemptions
    assert {"lookup", "eagle"} <= set(built.engine.parts.drafters.names)
    assert sum(sum(s.drafted_by_position) for s in done.stats) > 20


def test_aborted_requests_leave_nothing_behind() -> None:
    built = engine(random_head())
    done = Run(built, requests())
    for _ in range(6):
        done.step(check=True)
    for i in range(0, 8, 2):
        done.abort(f"r{i}")
    done.finish(check=True)
    plain = run(engine(None), requests())
    for i in range(1, 8, 2):
        assert done.said(f"r{i}") == plain.said(f"r{i}")
    drafter = built.engine.parts.drafters._drafters["eagle"]
    assert isinstance(drafter, EagleDrafter)
    assert not drafter._known


# -- a head that is always right -----------------------------------------------------------------

WORDS = 16
CYCLE = torch.tensor([(5 * i + 3) % WORDS for i in range(WORDS)])  # what follows each word


@pytest.fixture(scope="module")
def chain() -> Any:
    """A target that says the next word of a cycle, whatever stood before."""
    model = make_model("llama", vocab_size=VOCAB, num_hidden_layers=1)
    words = torch.zeros(VOCAB, 32)
    words[:WORDS, :WORDS] = 4 * torch.eye(WORDS)
    says = torch.zeros(VOCAB, 32)
    says[CYCLE, :WORDS] = torch.eye(WORDS)
    model.model.embed_tokens.weight.data = words
    model.lm_head.weight.data = says
    model.model.norm.weight.data.fill_(1)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    return adopt_model(model, ModelConfig("tiny"))


def perfect_head() -> PlainHead:
    """Knows the cycle, and goes by the features alone: a round turns the state that stands for a
    word into that of the next. A feature of another token than the last but one makes it wrong."""
    head = random_head(draft_vocab=VOCAB)
    layer = dict(head.config.layer, intermediate_size=WORDS)
    config = HeadConfig(layer, VOCAB, (0, 1, 1))
    weights = {name: torch.zeros_like(w) for name, w in head.weights.items()}
    for name, weight in weights.items():
        if weight.dim() == 1:
            weights[name] = torch.ones_like(weight)
    eye, place = torch.eye(WORDS), "layers.0.mlp."
    weights["fc.weight"][:WORDS, 64 : 64 + WORDS] = eye / 4  # the last layer's, one for a word
    for part in ("gate_proj", "up_proj"):
        weights[f"{place}{part}.weight"] = torch.zeros(WORDS, 32)
        weights[f"{place}{part}.weight"][:, :WORDS] = eye
    high = 32**0.5  # a normed state's only element
    gain = high**2 / (1 + 2.718281828459045 ** (-high))
    weights[f"{place}down_proj.weight"] = torch.zeros(32, WORDS)
    weights[f"{place}down_proj.weight"][:WORDS] = (eye[CYCLE].T - eye) / gain
    weights["lm_head.weight"][CYCLE, :WORDS] = eye
    return PlainHead(config, weights, head.embeddings)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.2, "seed": 5}], ids=["greedy", "seeded"]
)
def test_a_head_that_knows_the_target_is_always_right(chain: Any, sampling: dict[str, Any]) -> None:
    built = engine(perfect_head(), chain)
    prompts = [tuple(int(CYCLE[(i + j) % WORDS]) for j in range(2 + 3 * i)) for i in range(6)]
    done = run(
        built, [ask(f"r{i}", p, 31, ignore_eos=True, **sampling) for i, p in enumerate(prompts)]
    )
    for answer in done.answers.values():
        stats = answer.choices[0].end.stats  # type: ignore[union-attr]
        assert stats.accepted_tokens >= 0.95 * stats.draft_tokens > 20
        if not sampling["temperature"]:
            assert stats.accepted_tokens == stats.draft_tokens


def test_a_head_of_another_model_is_refused() -> None:
    head = random_head()
    narrow = dataclasses.replace(load("llama"), vocab_size=VOCAB - 1)
    with pytest.raises(ModelNotSupported, match=f"vocabulary of {VOCAB} tokens"):
        engine(head, narrow)
    with pytest.raises(ModelNotSupported, match="needs those of its target, 32 wide"):
        engine(head, load("smollm"))
    wide = dataclasses.replace(head.config, taps=(0, 1))
    with pytest.raises(ModelNotSupported, match="reads 96 numbers a token, but 2 layers"):
        engine(PlainHead(wide, head.weights, head.embeddings))


def test_texts_may_be_longer_than_the_head_was_made_for() -> None:
    """Rotary tables follow the target."""
    head = random_head()
    layer = dict(head.config.layer, max_position_embeddings=16)
    short = PlainHead(dataclasses.replace(head.config, layer=layer), head.weights, head.embeddings)
    built = engine(short)
    done = run(built, [ask("r", PROMPTS[3], 60, ignore_eos=True)])
    assert {"lookup", "eagle"} <= set(built.engine.parts.drafters.names)
    assert sum(sum(s.drafted_by_position) for s in done.stats) > 60
    assert CONTEXT > 16
