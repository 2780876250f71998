"""One queue of candidates, cut where tokens per second are most: against brute force."""

from __future__ import annotations

import random
from itertools import product

import pytest

from engine.calibration import Calibration
from engine.control.allocation import Line, allocate
from engine.control.costs import CostModel
from engine.load import Load

#: Passes whose cost is straight, rises in steps of four rows, and is flat up to eight.
CURVES = {
    "linear": ((1, 0.010), (513, 0.010 + 512 * 0.001)),
    "steps": tuple((rows, 0.010 + 0.004 * ((rows - 1) // 4)) for rows in range(1, 65)),
    "flat": ((1, 0.010), (8, 0.010), (64, 0.080)),
}


def costs_of(curve: str, round_seconds: float = 0.0) -> CostModel:
    calibration = Calibration(CURVES[curve], 1e-4, 1e-7, 1e-8)
    if not round_seconds:
        return CostModel(calibration, 512)
    rounds = Calibration(((1, round_seconds), (64, 1.5 * round_seconds)), 0.0, 0.0, 0.0)
    return CostModel(calibration, 512, {"drafter": rounds})


def rate(odds: list[float], lengths: tuple[int, ...], costs: CostModel) -> float:
    """Expected tokens a second."""
    batch = len(odds)
    tokens = batch + sum(p**n for p, k in zip(odds, lengths, strict=True) for n in range(1, k + 1))
    load = decode(batch)
    seconds = costs.overhead(batch) + float(costs.target.table(load, 64)[sum(lengths)])
    drafting = [length for length in lengths if length]
    if drafting:
        seconds += costs.draft("drafter").seconds_of(drafting)
    return tokens / (seconds + costs.extra * sum(lengths))


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 100 * batch, 100 * batch)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("curve", CURVES)
def test_no_other_lengths_yield_more_tokens_a_second(curve: str, seed: int) -> None:
    dice = random.Random(seed)
    odds, limits = [dice.uniform(0.05, 0.95) for _ in range(3)], [dice.randint(1, 4) for _ in "abc"]
    costs = costs_of(curve)
    lines = [Line(i, "drafter", limits[i], odds[i]) for i in range(3)]
    best = allocate(lines, decode(3), decode(3), costs, 4)
    every = product(*(range(limit + 1) for limit in limits))
    most = max(rate(odds, lengths, costs) for lengths in every)
    assert all(0 <= n <= limit for n, limit in zip(best.lengths, limits, strict=True))
    assert rate(odds, tuple(best.lengths), costs) == pytest.approx(most, rel=1e-6)
    assert best.tokens / best.seconds == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_rounds_of_a_model_are_shared_by_many(seed: int) -> None:
    """A queue by likelihood alone would spend round after round on the likeliest sequence."""
    dice = random.Random(seed)
    odds = [dice.uniform(0.05, 0.95) for _ in range(4)]
    costs = costs_of("flat", round_seconds=8e-4)
    lines = [Line(i, "drafter", 4, odds[i]) for i in range(4)]
    lengths = tuple(allocate(lines, decode(4), decode(4), costs, 4).lengths)
    most = max(rate(odds, each, costs) for each in product(range(5), repeat=4))
    assert rate(odds, lengths, costs) >= 0.99 * most


def test_nobody_drafts_where_nothing_is_accepted() -> None:
    best = allocate(
        [Line(i, "drafter", 4, 0.0) for i in range(3)], decode(3), decode(3), costs_of("linear"), 4
    )
    assert best.lengths == [0, 0, 0]
    assert best.saved_seconds == 0.0
    assert best.seconds == best.plain_seconds
    assert best.could_pay  # if all were accepted it would pay


def test_prefill_in_the_pass_is_paid_either_way() -> None:
    """What a draft token adds to a pass is the same on a straight curve; so is the choice."""
    lines = [Line(i, "drafter", 4, p) for i, p in enumerate((0.9, 0.5, 0.2))]
    costs, whole = costs_of("linear"), Load(3, 4, 103, 500, 5000)
    alone = allocate(lines, decode(3), decode(3), costs, 4)
    beside = allocate(lines, decode(3), whole, costs, 4)
    assert beside.lengths == alone.lengths
    assert beside.token_seconds == alone.token_seconds
    assert beside.plain_seconds > alone.plain_seconds


def test_ties_are_beginnings_of_drafts() -> None:
    """Where every token is certain, all candidates are alike: still nobody skips a depth."""
    lines = [Line(i, "drafter", 3, 1.0) for i in range(4)]
    assert allocate(lines, decode(4), decode(4), costs_of("flat"), 3).lengths != [0, 0, 0, 0]
