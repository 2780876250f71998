"""Decoders with random weights in the shapes of real ones, and engines that are told what to draft.

Step times do not depend on what the weights say. What is accepted does, so it is scripted: a
drafter that knows the answer says each next token right with a given probability.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch import Span, build_batch
from engine.build import assemble
from engine.cache.pages import PagePool
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
from engine.draft.drafter import DraftProposal, StepView
from engine.draft.portfolio import DrafterPortfolio
from engine.model.cuda.runner import CudaRunner, runner_bytes
from engine.model.cuda.weights import CudaDecoder
from engine.model.loader import LoadedModel
from engine.model.passes import Runner
from engine.model.runner import ATTENTION
from engine.sequence import Sequence
from engine.status import adaptive
from engine.types import Request, SamplingParams, SpeculationParams, Tokens

PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 4096


SHAPES = {
    "135M": Shape(30, 576, 1536, 9, 3, 49_152),
    "1B": Shape(16, 2048, 8192, 32, 8, 128_256),
    "8B": Shape(32, 4096, 14_336, 32, 8, 128_256),
}
TINY = {"tiny": Shape(1, 32, 64, 4, 2, 64, torch.float32, 256)}


def make_decoder(shape: Shape, device: torch.device) -> CudaDecoder:
    """A decoder with random weights."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_model_len,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with device, torch.random.fork_rng():
            torch.manual_seed(1)
            config._attn_implementation = ATTENTION
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    return CudaDecoder(model, shape.max_model_len, [0] * shape.layers)


def weight_bytes(decoder: CudaDecoder) -> int:
    """What a pass of one row reads of the weights."""
    layers = [layer.qkv for layer in decoder.layers] + [layer.output for layer in decoder.layers]
    layers += [layer.gate_up for layer in decoder.layers] + [layer.down for layer in decoder.layers]
    return sum(matrix.weight.nbytes for matrix in [*layers, decoder.head])


class Passes:
    """Passes of any shape over pages that are filled.

    Args:
        decoder: the weights.
        numerics: "exact" or "fast".
        tokens: of all sequences of a pass, at most.
    """

    def __init__(self, decoder: CudaDecoder, numerics: str, tokens: int) -> None:
        self._pool = PagePool(tokens // PAGE_SIZE + 512, PAGE_SIZE)
        self.runner: Runner = CudaRunner(decoder, numerics, self._pool.num_pages, PAGE_SIZE)

    def seconds(self, case: tuple[int, int, int], repeats: int) -> tuple[float, float]:
        """Median seconds of a pass on its device, and of handing it over on the host.

        Args:
            case: sequences, rows of each, cached tokens of each. The last row of each sequence
                gets logits; all of them, if they are few.
        """
        sequences, rows, context = case
        pool, runner = self._pool, self.runner
        tables = [pool.new_table("") for _ in range(sequences)]
        for table in tables:
            assert pool.reserve(table, context + rows)
        wanted = rows if rows <= 16 else 1
        spans = [Span([5] * rows, context, table, wanted) for table in tables]
        times, hosts = [], []
        for i in range(repeats + 2):
            batch = build_batch(spans, PAGE_SIZE, pool.num_pages, runner.device, runner.min_rows)
            began = time.perf_counter()
            passed = runner.forward(batch)
            host = time.perf_counter() - began
            seconds = passed.seconds()
            if i >= 2:  # the first ones compile and record
                times.append(seconds)
                hosts.append(host)
        for table in tables:
            pool.free(table)
        return sorted(times)[repeats // 2], sorted(hosts)[repeats // 2]


class ScriptedDrafter:
    """Drafts the known answers; each token is right with a given probability.

    Args:
        answers: by request.
        acceptance: that probability.
        vocab: ids to be wrong with.
    """

    name = "scripted"

    def __init__(self, answers: dict[str, list[int]], acceptance: float, vocab: int) -> None:
        self._answers, self._acceptance, self._vocab = answers, acceptance, vocab
        self._dice = random.Random(0)

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            answer = self._answers[sequence.request.request_id]
            known = answer[sequence.num_generated :][:length]
            drafts.append([self._said(token) for token in known])
        return DraftProposal(drafts)

    def _said(self, token: int) -> int:
        right = self._dice.random() < self._acceptance
        return token if right else (token + 1) % self._vocab

    def observe(self, view: StepView) -> None:
        """Learns nothing."""

    def release(self, sequence: Sequence) -> None:
        """Keeps nothing."""


def loaded_of(decoder: CudaDecoder, numerics: str) -> LoadedModel:
    """The decoder as a loaded model, none of whose tokens ends a text."""
    return LoadedModel(
        partial(CudaRunner, decoder, numerics),
        "cuda",
        decoder.shape,
        decoder.device,
        decoder.vocab,
        decoder.max_model_len,
        frozenset(),
        reserve=partial(runner_bytes, decoder, numerics),
    )


@dataclass(frozen=True)
class Gain:
    """How many tokens a second, plain and with scripted drafts, and whether they are the same."""

    streams: int
    plain: float
    speculative: float
    equal: bool


def gain(loaded: LoadedModel, streams: int, tokens: int, acceptance: float) -> Gain:
    """Answers the same requests without drafts, and with those of a `ScriptedDrafter`."""
    prompts = [[(7 * i + j) % loaded.vocab_size for j in range(8)] for i in range(streams)]
    plain, seconds = _answer(loaded, prompts, tokens, None)
    known = {name: list(said) for name, said in plain.items()}
    drafter = ScriptedDrafter(known, acceptance, loaded.vocab_size)
    drafted, faster = _answer(loaded, prompts, tokens, drafter)
    total = streams * tokens
    return Gain(streams, total / seconds, total / faster, plain == drafted)


def _answer(
    loaded: LoadedModel, prompts: Seq[Seq[int]], tokens: int, drafter: ScriptedDrafter | None
) -> tuple[dict[str, list[int]], float]:
    """What every request says, and seconds of the second half of the steps: the first ones
    compile, record graphs, and teach the planner."""
    engine = _engine(loaded, len(prompts), tokens, drafter)
    said: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        name, arrival = f"r{i}", time.monotonic()
        engine.add(Request(name, tuple(prompt), sampling, SpeculationParams(), arrival=arrival))
        said[name] = []
    marks: list[tuple[int, float]] = []
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, Tokens):
                said[event.request_id] += event.token_ids
        marks.append((sum(map(len, said.values())), time.perf_counter()))
    half = next(mark for mark in marks if mark[0] >= marks[-1][0] // 2)
    share = (marks[-1][0] - half[0]) / marks[-1][0]
    return said, (marks[-1][1] - half[1]) / max(share, 1e-9)


def _engine(
    loaded: LoadedModel, streams: int, tokens: int, drafter: ScriptedDrafter | None
) -> Engine:
    pages = streams * (-(-(tokens + 32) // PAGE_SIZE) + 1)
    config = EngineConfig(
        model=ModelConfig("random"),
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=pages, prefix_reuse=False),
        scheduler=SchedulerConfig(max_sequences=streams, max_batch_tokens=max(512, 8 * streams)),
        speculation=SpeculationConfig(mode="auto", drafters=("none",), max_draft=8),
        threads=1,
    )
    built = assemble(config, loaded)
    if drafter is None:
        return built.engine
    parts = built.engine.parts
    portfolio = DrafterPortfolio({drafter.name: drafter}, loaded.vocab_size)
    planned = adaptive(parts.planner)
    assert planned is not None
    again = AdaptivePlanner(planned.depth, planned.costs, planned.mode, portfolio)
    planner = ShieldedPlanner(again)
    return Engine(
        replace(parts, drafters=portfolio, planner=planner),
        max_model_len=loaded.max_model_len,
        default_drafters=(drafter.name,),
        max_draft=8,
    )
