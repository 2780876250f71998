"""Several drafters: the one that brings most for its time drafts, in each sequence and step."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from engine.control.adaptive import AdaptivePlanner
from engine.control.allocate import allocate
from engine.control.calibration import Calibration
from engine.control.candidates import Candidates
from engine.control.guard import Guard
from engine.control.latency import CostModel, Load
from engine.control.options import Mode, PlannerOptions
from engine.control.planner import FixedPlanner
from engine.control.step import OffReason
from engine.draft.drafter import NoAdvice, Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.types import StepStats
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
        self.scored = True  # whether the free one can be scored without asking it
        self.used: list[str] = []  # by step, the first sequence's drafter; "" = none

    def plan(self) -> AdaptivePlanner:
        planner = planner_for(self.machine)
        return AdaptivePlanner(replace(planner.options, advisor=self))

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        return 0 if name == "model" or self._offered(sequence) else None

    def preview(self, name: str, sequence: Sequence, length: int) -> list[int] | None:
        if name == "model" or not self.scored:
            return None
        start = len(sequence.tokens) - PROMPT
        stream = int(sequence.request.request_id.removeprefix("stream-"))
        return [int(not self._right(name, stream, start + n)) for n in range(length)]

    def _offered(self, sequence: Sequence) -> bool:
        stream = int(sequence.request.request_id.removeprefix("stream-"))
        position = len(sequence.tokens) - PROMPT
        return uniform(stream, position, 1) < self.texts["lookup"](stream, position)[1]

    def _right(self, name: str, stream: int, position: int) -> bool:
        right, _ = self.texts[name](stream, position)
        return uniform(stream, position, 2 + BOTH.index(name)) < right

    def _new_sequence(self) -> Sequence:
        sequence = super()._new_sequence()
        sequence.drafters, sequence.drafter = self.names, self.names[0]
        return sequence

    def _judge(self, stream: int, sequence: Sequence, length: int) -> Verdict:
        if not self.used or stream == self._live[0][0]:
            self.used.append(sequence.drafter if length else "")
        position = len(sequence.tokens) - PROMPT
        accepted = 0
        while accepted < length and self._right(sequence.drafter, stream, position + accepted):
            accepted += 1
        return Verdict([0] * (accepted + 1), length, accepted)

    def _stats(
        self, plan: StepPlan, lengths: Seq[int], verdicts: Seq[Verdict], step: int
    ) -> StepStats:
        stats = super()._stats(plan, lengths, verdicts, step)
        groups: dict[str, list[int]] = {}
        for part, length in zip(plan.scheduled, lengths, strict=True):
            if length:
                groups.setdefault(part.sequence.drafter, []).append(length)
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


class Closed(Guard):
    """Lets no draft through."""

    def closed(self, batch: int) -> bool:  # noqa: ARG002
        return True


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
    assert planner.explorer.account.spent < 0.012 * both.seconds


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


def test_a_free_drafter_is_learnt_without_being_asked() -> None:
    """Nobody ever checks a draft of it, and yet its acceptance is known, at each depth."""
    texts = {"lookup": constant(0.7), "model": constant(0.0)}
    world = Several(LAPTOP, texts, 1)
    planner = world.plan()
    planner.guard = Closed()
    world.run(planner, 4000)
    assert set(world.used) == {""}
    told = planner.acceptance.describe()["lookup"]
    assert [row["acceptance"] for row in told[:4]] == pytest.approx([0.7] * 4, abs=0.07)
    assert planner.explorer.account.spent == 0.0


def test_what_is_free_costs_no_exploration() -> None:
    texts = {"lookup": constant(0.0), "model": constant(0.0)}
    checked = []
    for scored in (True, False):
        world = Several(A10, texts, 2, ("lookup",))
        world.scored = scored
        run(world, 3000)
        checked.append(world.used.count("lookup"))
    assert checked[0] < checked[1]


def test_memory_is_bounded_with_several_drafters() -> None:
    world = Several(A10, {"lookup": bursty, "model": constant(0.5)}, 4)
    world.length = 12
    _, planner = run(world, 3000)
    for _, sequence in world._live:
        planner.release(sequence)
    assert planner.acceptance.num_slots == 0
    assert planner.scorer.num_sequences == 0
    assert planner.explorer.num_sequences == 0


# -- single steps ----------------------------------------------------------------------------


def make_lines(dice: random.Random, sequences: int) -> Candidates:
    """Two lines for each sequence: a free drafter and one that costs."""
    count = 2 * sequences
    return Candidates(
        acceptance=np.array([[dice.uniform(0.05, 0.95)] * 3 for _ in range(count)]),
        offers=np.ones((count, 3)),
        limits=np.full(count, 3),
        drafters=["lookup", "model"] * sequences,
        owners=np.repeat(np.arange(sequences), 2),
    )


def rate(rows: Candidates, lengths: tuple[int, ...], costs: CostModel) -> float:
    """Expected tokens a second."""
    batch = len(lengths) // 2
    survival = rows.acceptance.cumprod(axis=1)
    tokens = batch + sum(survival[i, :n].sum() for i, n in enumerate(lengths))
    seconds = costs.overhead(batch) + costs.target.table(decode(batch), 64)[sum(lengths)]
    for offset, name in enumerate(BOTH):
        own = [n for n in lengths[offset::2] if n]
        if own:
            seconds += costs.draft(name).seconds_of(own)
    drafted = float(sum(lengths))
    seconds += costs.extra * drafted
    return float(tokens / seconds)


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Every pair of drafter and length for each of two sequences, by brute force."""
    dice = random.Random(seed)
    costs, rows = CostModel(LINEAR, 512), make_lines(dice, 2)
    for _ in range(40):
        costs.draft("model").update([3, 3], 6e-4)
        costs.draft("model").update([1], 3e-4)
        costs.draft("lookup").update([3], 2e-5)
    best = allocate(rows, decode(2), decode(2), costs)
    per_sequence = [(n, 0) for n in range(4)] + [(0, n) for n in range(1, 4)]
    every = [rate(rows, a + b, costs) for a, b in product(per_sequence, repeat=2)]
    lengths = tuple(best.lengths.tolist())
    assert not (lengths[0] and lengths[1])
    assert not (lengths[2] and lengths[3])
    assert rate(rows, lengths, costs) >= 0.99 * max(every)


def test_what_won_before_is_priced_again_alone() -> None:
    costs, rows = CostModel(LINEAR, 512), make_lines(random.Random(3), 4)
    best = allocate(rows, decode(4), decode(4), costs)
    again = allocate(rows, decode(4), decode(4), costs, best)
    assert again.lengths.tolist() == best.lengths.tolist()
    assert again.drafters == best.drafters


def test_catching_up_is_weighed() -> None:
    """A draft model that has much to read waits for longer texts to pay."""
    costs = CostModel(LINEAR, 512)
    for read in (0, 100) * 60:
        costs.draft("model").update([3], 1e-4 + 1e-4 * read, read)
    rows = make_lines(random.Random(0), 1)
    rows = replace(rows, acceptance=np.array([[0.3] * 3, [0.8] * 3]), backlog=np.zeros(2))
    assert allocate(rows, decode(1), decode(1), costs).lengths[1] > 0
    rows = replace(rows, backlog=np.array([0.0, 400.0]))
    assert allocate(rows, decode(1), decode(1), costs).lengths[1] == 0


def test_a_pinned_request_keeps_its_drafter_beside_free_ones() -> None:
    planner = planner_for(A10)
    pinned = make_sequence("model")
    free = make_sequence("lookup")
    free.drafters = BOTH
    for _ in range(100):
        step(planner, decodes(pinned, free))
        assert pinned.drafter == "model"
        assert free.drafter in BOTH


@pytest.mark.parametrize("fixed", [True, False])
def test_fixed_takes_the_first_that_has_something(fixed: bool) -> None:
    offers: dict[str, int | None] = {"lookup": 0, "model": 0}
    advisor = Told({name: lambda _, name=name: offers[name] for name in BOTH})  # type: ignore[misc]
    options = PlannerOptions(8, mode=Mode.FIXED, advisor=advisor, clock=lambda: 0.0)
    planner = FixedPlanner(advisor) if fixed else AdaptivePlanner(options)
    sequence = make_sequence("lookup")
    sequence.drafters = BOTH
    for lookup, model, taken in ((0, 0, "lookup"), (None, 0, "model"), (0, None, "lookup")):
        offers.update(lookup=lookup, model=model)
        for _ in range(30):
            if planner.choose(decodes(sequence)) == [8]:
                assert sequence.drafter == taken
    if isinstance(planner, AdaptivePlanner):
        offers.update(lookup=None, model=None)
        assert planner.choose(decodes(sequence)) == [0]
        assert list(planner._pending.reasons.values()) == [OffReason.NO_PROPOSAL]  # type: ignore[union-attr]
