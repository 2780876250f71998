"""A long prompt beside running streams, in the whole engine with passes of a known price: what
streams and short requests feel of it, and what the bound costs the prompt."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from engine.batch import Batch
from engine.build import BuiltEngine
from engine.core import Engine
from engine.pace import Pace
from engine.types import Tokens
from tests.fakes import Run, ask, load_fake, make_engine
from tests.machine import Machine
from tests.tiny_models import VOCAB

LONG = tuple(i * i % VOCAB for i in range(1500))


class Clock:
    """Virtual seconds: only passes take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Priced:
    """A runner whose passes take what a machine says."""

    def __init__(self, inner: Any, machine: Machine, clock: Clock) -> None:
        self.inner, self.machine, self.clock = inner, machine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Any:
        starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
        rows = [b - a for a, b in itertools.pairwise(starts)]
        pairs = sum(n * context for n, context in zip(rows, contexts, strict=True))
        silent = sum(rows) - batch.num_logits
        took = self.machine.seconds(sum(rows), len(rows), sum(contexts), pairs, silent)
        self.clock.now += took
        return dataclasses.replace(self.inner.forward(batch, features), seconds=lambda: took)


def priced_engine(stretch: float, believed: Machine | None) -> tuple[BuiltEngine, Clock]:
    clock, machine = Clock(), Machine()
    built = make_engine(
        loaded=load_fake(4096),
        page_size=64,
        num_pages=200,
        max_batch_tokens=512,
        wrap=lambda runner: Priced(runner, machine, clock),
    )
    parts = built.engine.parts
    config = dataclasses.replace(parts.scheduler.config, decode_stretch=stretch)
    cost = believed or machine
    parts.scheduler.config, parts.scheduler.cost, parts.scheduler.pace = config, cost, Pace(cost)
    engine = Engine(parts, max_model_len=4096, default_drafters=("none",), max_draft=0, clock=clock)
    return dataclasses.replace(built, engine=engine), clock


@dataclasses.dataclass
class Watch:
    """What was felt while the long prompt was read, in seconds and in steps."""

    plain: float = 0.0
    gaps: list[float] = dataclasses.field(default_factory=list)
    prompt_seconds: float = 0.0
    waits: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def p95(self) -> float:
        return sorted(self.gaps)[int(0.95 * len(self.gaps))]


def watch(stretch: float, streams: int = 2, believed: Machine | None = None) -> tuple[Watch, Run]:
    """Streams, then the long prompt, and while it is read short requests from time to time.

    Args:
        believed: what the scheduler takes passes to cost; None = what they do cost.
    """
    built, clock = priced_engine(stretch, believed)
    how = {"ignore_eos": True}
    run = Run(built, [ask(f"s{i}", range(3, 9 + i), 900, **how) for i in range(streams)])
    for _ in range(4):
        before = clock.now
        run.step()
    seen, begun, steps = Watch(plain=clock.now - before), clock.now, 0
    run.add(ask("long", LONG, 4, **how))
    asked: dict[str, int] = {}
    while not run.answers["long"].choices:
        if steps % 20 == 5 or (not streams and steps == 1):
            asked[f"short{steps}"] = steps
            run.add(ask(f"short{steps}", (7, steps % VOCAB)[: 1 + steps % 2], 1, **how))
        before, steps = clock.now, steps + 1
        for event in run.step():
            if isinstance(event, Tokens) and event.request_id in asked:
                seen.waits[event.request_id] = steps - asked[event.request_id]
        seen.gaps.append(clock.now - before)
    seen.prompt_seconds = clock.now - begun
    last = {name for name, step in asked.items() if steps - step <= 2}  # has not had its turn yet
    assert set(seen.waits) | last == set(asked)
    return seen, run


def test_streams_go_on_and_short_requests_are_answered_while_a_long_prompt_is_read() -> None:
    seen, run = watch(stretch=2.0)
    assert seen.p95 <= 2.5 * seen.plain
    assert max(seen.waits.values()) <= 5
    assert len(seen.waits) >= 3
    run.finish()


def test_the_engine_finds_out_that_prompts_cost_more_than_it_was_told() -> None:
    cheap = dataclasses.replace(Machine(), row=0.05, pair=0.0)
    seen, _ = watch(stretch=2.0, believed=cheap)
    assert seen.p95 <= 2.5 * seen.plain
    assert max(seen.waits.values()) <= 5


def test_the_bound_is_what_holds_streams_up_no_longer() -> None:
    """Without it a stream waits for whole chunks of the prompt."""
    seen, _ = watch(stretch=0)
    assert seen.p95 > 10 * seen.plain


@pytest.mark.parametrize("stretch", [1.5, 2.0, 4.0])
def test_what_the_bound_costs_the_prompt(stretch: float) -> None:
    """A stretch of r leaves a prompt (r - 1) / r of the time; streams have the rest."""
    alone, _ = watch(stretch=0, streams=0)
    beside, _ = watch(stretch=stretch)
    assert beside.p95 <= 1.25 * stretch * beside.plain
    least = alone.prompt_seconds * stretch / (stretch - 1)
    assert beside.prompt_seconds <= 1.5 * least


def test_answers_do_not_depend_on_how_prompts_are_cut() -> None:
    said = [watch(stretch)[1].finish() for stretch in (0, 1.0, 2.0)]
    for name in ("s0", "s1", "long"):
        assert len({run.said(name) for run in said}) == 1


def test_without_streams_a_prompt_is_read_as_fast_as_ever() -> None:
    assert watch(2.0, 0)[0].prompt_seconds == watch(0, 0)[0].prompt_seconds
