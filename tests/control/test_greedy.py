"""The quick allocation against the general one, and what it keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.cache.pages import PageTable
from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Allocation, allocate
from engine.control.calibration import Calibration
from engine.control.candidates import Candidates
from engine.control.greedy import Greedy
from engine.control.latency import CostModel, Load
from engine.control.outcomes import Outcomes
from engine.control.step import Line, PendingStep
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.types import Request

LINEAR = Calibration(((1, 0.010), (513, 0.010 + 512 * 5e-4)), 1e-4, 1e-7, 1e-8)
STEPS = Calibration(((1, 0.01), (4, 0.01), (5, 0.02), (8, 0.02), (9, 0.03), (512, 0.3)), 0, 0, 0)
FIELDS = ("tokens", "seconds", "plain_seconds", "token_seconds", "saved_seconds", "chance")


class Case:
    """Random estimates of some sequences, and a step with them."""

    def __init__(self, seed: int, count: int, offers: bool, prefill: int) -> None:
        self.rng = random.Random(seed)
        self.model = AcceptanceModel(8)
        self.costs = CostModel(self.rng.choice([LINEAR, STEPS]), 1024)
        self.lines = [
            Line(i, sequence(i), "lookup", self.rng.randrange(12), self.rng.choice([8, 8, 3, 1]))
            for i in range(count)
        ]
        self.slots = [self.model.slot(line.sequence, "lookup") for line in self.lines]
        arrays = np.random.default_rng(seed)
        self.model._acceptance = arrays.uniform(0.1, 0.95, self.model._acceptance.shape)
        random_offers = np.sort(arrays.uniform(size=self.model._offers.shape))[:, ::-1]
        self.model._offers = random_offers if offers else np.ones_like(random_offers)
        batch = count + self.rng.randrange(3)
        self.decode = Load(batch, batch, batch, 200 * batch, 200 * batch)
        self.whole = self.decode
        if prefill:
            tokens, pairs = batch + prefill, 200 * batch + prefill**2
            self.whole = Load(batch, batch + 1, tokens, 200 * batch + prefill, pairs)
        self.greedy = Greedy(self.model, self.costs)

    def step(self, lines: list[Line]) -> PendingStep:
        rows = list(range(len(lines)))
        plan, lengths = StepPlan((), 0, 0, 0), [0] * len(lines)
        return PendingStep(plan, self.decode, self.whole, {}, rows, lines, rows, lengths)

    def quick(self, lines: list[Line] | None = None) -> Allocation:
        lines = lines or self.lines
        step = self.step(lines)
        assert self.greedy.fits(step)
        slots = [self.model.slot(line.sequence, "lookup") for line in lines]
        expected, allocation = self.greedy.allocate(step, slots)
        buckets = np.array([line.bucket for line in lines])
        assert expected == self.model.estimate(np.array(slots), buckets)[0][:, 0].tolist()
        return allocation

    def general(self, lines: list[Line] | None = None) -> Allocation:
        lines = lines or self.lines
        slots = np.array([self.model.slot(line.sequence, "lookup") for line in lines])
        acceptance, offers = self.model.estimate(slots, np.array([line.bucket for line in lines]))
        limits = np.array([line.limit for line in lines])
        rows = Candidates(acceptance, offers, limits, ["lookup"] * len(lines))
        return allocate(rows, self.decode, self.whole, self.costs)


def sequence(number: int) -> Sequence:
    return Sequence(Request(f"r{number}", (1,)), 0, number, 0, PageTable(""), "lookup", 8, 100)


@pytest.mark.parametrize("prefill", [0, 100])
@pytest.mark.parametrize("offers", [False, True], ids=["always offered", "seldom offered"])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 64])
def test_it_says_what_the_general_one_says(count: int, offers: bool, prefill: int) -> None:
    for seed in range(10):
        case = Case(seed, count, offers, prefill)
        quick, general = case.quick(), case.general()
        assert quick.lengths.tolist() == general.lengths.tolist()
        for field in FIELDS:
            assert getattr(quick, field) == pytest.approx(getattr(general, field), rel=1e-6)


@pytest.mark.parametrize("offers", [False, True], ids=["always offered", "seldom offered"])
@pytest.mark.parametrize("count", [2, 5, 16, 64])
def test_what_it_passes_over_while_estimates_are_kept_is_next_to_nothing(
    count: int, offers: bool
) -> None:
    """In other buckets, and with some sequences missing."""
    quick = general = 0.0
    for seed in range(10):
        case = Case(seed, count, offers, 0)
        case.quick()
        for _ in range(6):
            some = case.rng.sample(case.lines, case.rng.randint((count + 1) // 2, count))
            lines = [
                Line(row, line.sequence, "lookup", case.rng.randrange(12), line.limit)
                for row, line in enumerate(some)
            ]
            quick += case.quick(lines).saved_seconds
            general += case.general(lines).saved_seconds
    assert 0.99 * general <= quick <= general * (1 + 1e-6)


def test_a_slot_that_goes_to_another_sequence_takes_its_estimates_along() -> None:
    """A request that ends frees its slot; whoever gets it must not inherit what was expected."""
    case = Case(1, 8, offers=False, prefill=0)
    case.quick()
    [gone, slot] = case.lines[3].sequence, case.slots[3]
    for _ in range(40):
        case.model.note(Outcomes([slot], [0], [0.5], [8], [8], [0], [True]))
    case.model.settle()
    assert case.quick([Line(0, gone, "lookup", 0, 8)]).lengths.tolist() == [0]
    case.model.release(gone)
    case.model.settle()
    case.model._means.acceptance[:] = 0.9
    new = Line(0, sequence(99), "lookup", 0, 8)
    assert case.model.slot(new.sequence, "lookup") == slot
    quick = case.quick([new])
    assert quick.lengths.tolist() == case.general([new]).lengths.tolist()
    assert quick.lengths[0] > 0


def test_what_is_not_its_business() -> None:
    case = Case(2, 4, offers=False, prefill=0)
    first, *others = case.lines
    assert case.greedy.fits(case.step(case.lines))
    other = Line(0, first.sequence, "model", 0, 8)
    assert not case.greedy.fits(case.step([other, *case.lines]))  # two drafters
    behind = Line(0, first.sequence, "lookup", 0, 8, backlog=9)
    assert not case.greedy.fits(case.step([behind, *others]))  # one must be caught up with
    costs = CostModel(LINEAR, 1024, {"lookup": Calibration(((1, 1e-5), (64, 1e-5)), 0, 0, 0)})
    assert not Greedy(case.model, costs).fits(case.step(case.lines))  # it runs a model
    case.costs.draft("lookup").update([1], 1.0)
    for _ in range(20):
        case.costs.draft("lookup").update([8], 1.0)
    assert not case.greedy.fits(case.step(case.lines))  # its rounds cost
