"""Several drafters: the one that brings most for its time drafts, in each sequence and step."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product

import pytest

from engine.calibration import Calibration
from engine.control.adaptive import AdaptivePlanner
from engine.control.allocation import Line, allocate
from engine.control.costs import CostModel
from engine.control.planner import Assignment, FixedPlanner, Mode
from engine.draft.drafter import NoAdvice, Verdict
from engine.load import Load
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.stats import OffReason, StepStats
from tests.control.simulator import (
    A10,
    H200,
    LAPTOP,
    PROMPT,
    Log,
    Machine,
    Text,
    World,
    bursty,
    constant,
    planner_for,
)
from tests.control.simulator import _uniform as uniform
from tests.control.test_adaptive import Told, decodes, make_sequence, step

LINEAR = Calibration(((1, 0.010), (513, 0.010 + 512 * 0.001)), 0.0, 0.0, 0.0)
BOTH = ("lookup", "model")


class Several(World, NoAdvice):
    """A world with a drafter that is free, and knows when it has nothing, and one that is not.

    Args:
        texts: what each drafter gets right; offers of the free one are seen beforehand.
        round_seconds: of the dear one, per call and per draft token.
    """

    def __init__(
        self,
        machine: Machine,
        texts: dict[str, Text],
        batch: int = 1,
        names: tuple[str, ...] = BOTH,
        round_seconds: float = 1e-3,
    ) -> None:
        super().__init__(machine, bursty, batch)
        self.texts, self.names, self.round_seconds = texts, names, round_seconds
        self.used: list[str] = []  # by step, the first sequence's drafter; "" = none

    def plan(self) -> AdaptivePlanner:
        return planner_for(self.machine, advisor=self)

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        return 0 if name == "model" or self._offered(sequence) else None

    def _offered(self, sequence: Sequence) -> bool:
        stream = int(sequence.request.request_id.removeprefix("stream-"))
        position = len(sequence.tokens) - PROMPT
        return uniform(stream, position, 1) < self.texts["lookup"](stream, position)[1]

    def _right(self, name: str, stream: int, position: int) -> bool:
        right, _ = self.texts[name](stream, position)
        return uniform(stream, position, 2 + BOTH.index(name)) < right

    def _new_sequence(self) -> Sequence:
        sequence = super()._new_sequence()
        sequence.drafters = self.names
        return sequence

    def _judge(self, stream: int, sequence: Sequence, length: int, drafter: str) -> Verdict:
        if not self.used or stream == self._live[0][0]:
            self.used.append(drafter if length else "")
        position = len(sequence.tokens) - PROMPT
        accepted = 0
        while accepted < length and self._right(drafter, stream, position + accepted):
            accepted += 1
        return Verdict([0] * (accepted + 1), length, accepted)

    def _stats(
        self, plan: StepPlan, assignment: Assignment, verdicts: Seq[Verdict], log: Log
    ) -> StepStats:
        stats = super()._stats(plan, assignment, verdicts, log)
        groups: dict[str, list[int]] = {}
        for name, length in zip(assignment.drafters, assignment.lengths, strict=True):
            if length:
                groups.setdefault(name, []).append(length)
        seconds = {
            name: 2e-5 + (self.round_seconds * (1 + max(own)) if name == "model" else 1e-5)
            for name, own in groups.items()
        }
        total = sum(seconds.values())
        return replace(
            stats,
            seconds=stats.seconds - stats.draft_seconds + total,
            draft_seconds=total,
            drafter_seconds=seconds,
        )


def run(world: Several, tokens: int) -> tuple[Log, AdaptivePlanner]:
    planner = world.plan()
    return world.run(planner, tokens), planner


# -- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("machine", [A10, LAPTOP, H200], ids=["a10", "laptop", "h200"])
def test_two_drafters_are_at_least_as_good_as_the_better_one(machine: Machine, batch: int) -> None:
    """Copied stretches for one, the rest for the other."""
    texts = {"lookup": bursty, "model": constant(0.75)}
    alone = [run(Several(machine, texts, batch, (name,)), 3000 * batch)[0] for name in BOTH]
    both, planner = run(Several(machine, texts, batch), 3000 * batch)
    assert both.seconds < 1.01 * min(log.seconds for log in alone)
    assert planner.prober.spent < 0.012 * both.seconds


def test_two_drafters_beat_each_alone_where_they_know_different_things() -> None:
    texts = {"lookup": bursty, "model": constant(0.75)}
    alone = [run(Several(A10, texts, 1, (name,)), 4000)[0] for name in BOTH]
    world = Several(A10, texts)
    both, _ = run(world, 4000)
    assert both.seconds < 0.95 * min(log.seconds for log in alone)
    assert min(map(world.used.count, BOTH)) > 0.1 * len(world.used)


@pytest.mark.parametrize("names", [BOTH, BOTH[::-1]])
def test_the_order_of_the_names_does_not_matter(names: tuple[str, ...]) -> None:
    texts = {"lookup": constant(0.3), "model": constant(0.9)}
    world = Several(A10, texts, 1, names)
    run(world, 2000)
    assert world.used[200:].count("model") > 0.8 * len(world.used[200:])


def test_a_drafter_too_dear_for_its_acceptance_is_left_alone() -> None:
    texts = {"lookup": constant(0.6), "model": constant(0.8)}
    world = Several(LAPTOP, texts, 1, BOTH, round_seconds=8e-3)
    log, _ = run(world, 3000)
    alone, _ = run(Several(LAPTOP, texts, 1, ("lookup",)), 3000)
    assert world.used[100:].count("model") < 0.05 * len(world.used)
    assert log.seconds < 1.03 * alone.seconds


def test_a_dear_drafter_that_has_become_good_is_found() -> None:
    """It is wrong in the first 60 requests and right in later ones: only trying tells."""

    def improving(stream: int, position: int) -> tuple[float, float]:  # noqa: ARG001
        return (0.0 if stream < 60 else 0.95, 1.0)

    world = Several(A10, {"lookup": constant(0.0), "model": improving})
    world.length = 50
    run(world, 5500)
    last = world.used[-100:]
    assert last.count("model") > 70


def test_memory_is_bounded_with_several_drafters() -> None:
    world = Several(A10, {"lookup": bursty, "model": constant(0.5)}, 4)
    world.length = 12
    _, planner = run(world, 3000)
    for _, sequence in world._live:
        planner.release(sequence)
    assert planner.acceptance.num_sequences == 0
    assert planner.prober.num_sequences == 0


# -- single steps ----------------------------------------------------------------------------


def make_lines(dice: random.Random, sequences: int) -> list[Line]:
    """Two lines for each sequence: a free drafter and one that costs."""
    return [Line(n, name, 3, dice.uniform(0.05, 0.95)) for n in range(sequences) for name in BOTH]


def make_costs() -> CostModel:
    """A draft model of a twentieth of the target, and a search that is nearly free."""
    rounds = Calibration(((1, 5e-4), (64, 9e-4)), 0.0, 0.0, 0.0)
    return CostModel(LINEAR, 512, {"model": rounds})


def rate(lines: list[Line], lengths: list[int], costs: CostModel) -> float:
    """Expected tokens a second."""
    batch = 1 + lines[-1].index
    tokens = batch + sum(
        line.acceptance**n
        for line, length in zip(lines, lengths, strict=True)
        for n in range(1, length + 1)
    )
    seconds = costs.overhead(batch) + costs.target.table(decode(batch), 64)[sum(lengths)]
    for name in BOTH:
        own = [n for line, n in zip(lines, lengths, strict=True) if n and line.drafter == name]
        if own:
            seconds += costs.draft(name).seconds_of(own)
    return float(tokens / (seconds + costs.extra * sum(lengths)))


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 0, 0)


@pytest.mark.parametrize("seed", range(24))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Every pair of drafter and length for each of two sequences, by brute force."""
    costs, lines = make_costs(), make_lines(random.Random(seed), 2)
    lengths = allocate(lines, decode(2), decode(2), costs, 3).lengths
    assert not (lengths[0] and lengths[1])
    assert not (lengths[2] and lengths[3])
    per_sequence = [(n, 0) for n in range(4)] + [(0, n) for n in range(1, 4)]
    every = [rate(lines, [*a, *b], costs) for a, b in product(per_sequence, repeat=2)]
    assert rate(lines, lengths, costs) >= 0.99 * max(every)


def test_catching_up_is_weighed() -> None:
    """A draft model that has much to read waits for longer texts to pay."""
    drafted = []
    for backlog in (0, 100_000):
        lines = [Line(0, "lookup", 3, 0.1), Line(0, "model", 3, 0.8, backlog=backlog)]
        drafted.append(allocate(lines, decode(1), decode(1), make_costs(), 3).lengths[1])
    assert drafted[0] > 0
    assert drafted[1] == 0


def test_a_pinned_request_keeps_its_drafter_beside_free_ones() -> None:
    planner = planner_for(A10)
    pinned, free = make_sequence("model"), make_sequence("lookup")
    free.drafters = BOTH
    for _ in range(100):
        plan = decodes(pinned, free)
        drafters = planner.choose(plan).drafters
        assert drafters[0] == "model"
        assert drafters[1] in BOTH
        step(planner, plan)


@pytest.mark.parametrize("fixed", [True, False])
def test_fixed_takes_the_first_that_has_something(fixed: bool) -> None:
    offers: dict[str, int | None] = {"lookup": 0, "model": 0}
    advisor = Told({name: lambda _, name=name: offers[name] for name in BOTH})  # type: ignore[misc]
    adaptive = AdaptivePlanner(8, CostModel(), Mode.FIXED, advisor)
    planner = FixedPlanner(advisor) if fixed else adaptive
    sequence = make_sequence("lookup")
    sequence.drafters = BOTH
    for lookup, model, taken in ((0, 0, "lookup"), (None, 0, "model"), (0, None, "lookup")):
        offers.update(lookup=lookup, model=model)
        for _ in range(30):
            chosen = planner.choose(decodes(sequence))
            if chosen.lengths == [8]:
                assert chosen.drafters == [taken]
    if isinstance(planner, AdaptivePlanner):
        offers.update(lookup=None, model=None)
        assert planner.choose(decodes(sequence)).lengths == [0]
        assert list(planner._pending.why_not.values()) == [OffReason.NO_PROPOSAL]  # type: ignore[union-attr]
