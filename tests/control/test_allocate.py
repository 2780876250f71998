"""The allocation against brute force over every ragged choice of draft lengths."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from engine.control.allocate import Allocation, allocate, margins
from engine.control.candidates import Candidates
from engine.control.latency import CostModel, Load

from engine.control.calibration import Calibration

LINEAR = Calibration(((1, 0.010), (513, 0.010 + 512 * 0.001)), 0.0, 0.0, 0.0)
FLAT = Calibration(((1, 0.010), (512, 0.0101)), 0.0, 0.0, 0.0)
STEPS = Calibration(((1, 0.01), (4, 0.01), (5, 0.02), (8, 0.02), (9, 0.03), (512, 0.03)), 0, 0, 0)


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 0, 0)


def candidates(
    acceptance: list[list[float]], offers: float = 1.0, limit: int = 3, drafter: str = "lookup"
) -> Candidates:
    array = np.array(acceptance)
    return Candidates(
        array, np.full_like(array, offers), np.full(len(array), limit), [drafter] * len(array)
    )


def worth(rows: Candidates, lengths: tuple[int, ...], costs: CostModel) -> float:
    """Expected tokens a second of a step, by the definition."""
    batch = len(lengths)
    survival = np.cumprod(rows.acceptance, axis=1)
    tokens = batch + sum(survival[r, :k].sum() for r, k in enumerate(lengths))
    total = sum(lengths)
    seconds = float(costs.target.table(decode(batch), total)[total]) + costs.overhead(batch)
    if total:
        drafting = [k for k in lengths if k]
        seconds += costs.draft(rows.drafters[0]).seconds_of(drafting)
        seconds += costs.extra * total
    return float(tokens / seconds)


@pytest.mark.parametrize("curve", [LINEAR, STEPS])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_ragged_choices(curve: Calibration, seed: int) -> None:
    rng = random.Random(seed)
    rows = candidates([[rng.uniform(0.05, 0.95) for _ in range(3)] for _ in range(4)])
    costs = CostModel(curve, 512)
    best = allocate(rows, decode(4), decode(4), costs)
    every = [worth(rows, lengths, costs) for lengths in product(range(4), repeat=4)]
    chosen = worth(rows, tuple(best.lengths.tolist()), costs)
    # Draft rounds and calls are priced along one queue, so a hair may be left.
    assert chosen >= max(every) * (1 - 1e-3)
    assert best.tokens / best.seconds == pytest.approx(chosen)


#: A round of the draft model takes as much as two to five query tokens.
ROUNDS = {"model": Calibration(((1, 2e-3), (64, 8e-3)), 0.0, 0.0, 0.0)}


@pytest.mark.parametrize("curve", [FLAT, LINEAR, STEPS])
@pytest.mark.parametrize("seed", range(12))
def test_rounds_that_cost_are_worth_it_together(curve: Calibration, seed: int) -> None:
    """The likeliest tokens, all of one sequence, may each cost a round that many could share."""
    rng = random.Random(seed)
    rows = candidates([[rng.uniform(0.05, 0.95)] * 3 for _ in range(5)], drafter="model")
    costs = CostModel(curve, 512, ROUNDS)
    best = allocate(rows, decode(5), decode(5), costs)
    every = [worth(rows, lengths, costs) for lengths in product(range(4), repeat=5)]
    # What a round takes depends on how many are in it, which the queues do not look at.
    assert worth(rows, tuple(best.lengths.tolist()), costs) >= max(every) * (1 - 5e-3)


def plan_for(
    acceptance: float, curve: Calibration, batch: int = 1, offers: float = 1.0
) -> Allocation:
    rows = candidates([[acceptance] * 8] * batch, offers, limit=8)
    return allocate(rows, decode(batch), decode(batch), CostModel(curve, 512))


def test_nothing_is_an_answer() -> None:
    assert plan_for(0.02, LINEAR).lengths.tolist() == [0]
    assert plan_for(0.02, LINEAR).saved_seconds == 0.0
    assert plan_for(0.9, Calibration(((1, 0.01), (512, 5.12)), 0, 0, 0)).lengths.tolist() == [0]


def test_drafts_stop_at_the_edge_of_a_tile() -> None:
    assert plan_for(0.6, STEPS).lengths.tolist() == [3]  # four query tokens cost as one
    assert plan_for(0.6, STEPS, batch=4).lengths.sum() in (0, 4)


def test_lengths_are_ragged_and_follow_each_sequence() -> None:
    rows = candidates([[0.95] * 8, [0.05] * 8, [0.5] * 8], limit=8)
    long, none, short = allocate(rows, decode(3), decode(3), CostModel(LINEAR, 512)).lengths
    assert long > short > none == 0


def test_limits_hold_for_each_sequence() -> None:
    rows = Candidates(np.full((3, 8), 0.95), np.ones((3, 8)), np.array([1, 8, 3]), ["lookup"] * 3)
    lengths = allocate(rows, decode(3), decode(3), CostModel(LINEAR, 512)).lengths
    assert (lengths <= rows.limits).all()
    assert lengths[0] == 1


def test_a_draft_that_is_seldom_offered_costs_only_its_call() -> None:
    """When one comes it is at least as long: a token is worth more where plain steps are the
    rule."""
    often, seldom = plan_for(0.8, STEPS), plan_for(0.8, STEPS, offers=0.05)
    assert seldom.lengths[0] >= often.lengths[0] > 0
    assert seldom.chance == pytest.approx(0.05)
    assert 0 < seldom.saved_seconds < 0.1 * often.plain_seconds


def test_prefill_in_the_pass_does_not_make_drafts_look_cheap() -> None:
    """The prefill is paid either way; only what drafts add is weighed."""
    rows = candidates([[0.15] * 8] * 4, limit=8)
    costs = CostModel(LINEAR, 512)
    alone = allocate(rows, decode(4), decode(4), costs)
    busy = allocate(rows, decode(4), Load(4, 5, 204, 200, 40_000), costs)
    assert alone.lengths.sum() == busy.lengths.sum() == 0
    rows = candidates([[0.8] * 8] * 4, limit=8)
    alone = allocate(rows, decode(4), decode(4), costs)
    busy = allocate(rows, decode(4), Load(4, 5, 204, 200, 40_000), costs)
    assert busy.lengths.tolist() == alone.lengths.tolist()
    assert busy.saved_seconds == pytest.approx(alone.saved_seconds, rel=0.05)
    assert busy.plain_seconds > 10 * alone.plain_seconds


def test_prefill_at_a_knee_ends_speculation() -> None:
    knee = Calibration(((1, 0.01), (64, 0.01), (512, 0.5)), 0.0, 0.0, 0.0)
    rows = candidates([[0.5] * 8] * 4, limit=8)
    costs = CostModel(knee, 512)
    assert allocate(rows, decode(4), decode(4), costs).lengths.sum() > 0
    assert allocate(rows, decode(4), Load(4, 5, 204, 0, 0), costs).lengths.sum() == 0


def test_drafters_are_priced_apart() -> None:
    costs = CostModel(LINEAR, 512)
    for _ in range(30):
        costs.draft("model").update([4], 0.05)
        costs.draft("lookup").update([4], 1e-5)
    rows = Candidates(np.full((2, 4), 0.7), np.ones((2, 4)), np.array([4, 4]), ["model", "lookup"])
    lengths = allocate(rows, decode(2), decode(2), costs).lengths
    assert lengths[0] == 0 < lengths[1]


def test_margins_price_the_next_token() -> None:
    rows = candidates([[0.9] * 8, [0.01] * 8], limit=8)
    costs = CostModel(LINEAR, 512)
    best = allocate(rows, decode(2), decode(2), costs)
    next_token = margins(rows, best.lengths, decode(2), costs, best.token_seconds)
    # A probe loses, but could have won.
    assert next_token.brings[1] < next_token.price[1]
    assert next_token.promise[1] > 0
    assert next_token.price[1] == pytest.approx(0.001, rel=0.1)
    at_limit = margins(rows, rows.limits, decode(2), costs, best.token_seconds)
    assert at_limit.promise == [-np.inf, -np.inf]
    steep = CostModel(Calibration(((1, 0.01), (512, 5.12)), 0, 0, 0), 512)
    hopeless = margins(rows, np.array([0, 0]), decode(2), steep, 0.008)
    assert max(hopeless.promise) < 0  # not even a sure hit would pay


def test_a_probe_promises_what_all_could_gain_together() -> None:
    """One right token does not pay for a round of a draft model; eight do."""
    costs = CostModel(FLAT, 512, ROUNDS)
    for batch, promising in ((1, True), (8, True), (64, True)):
        rows = candidates([[0.01] * 8] * batch, limit=8, drafter="model")
        found = margins(rows, np.zeros(batch, dtype=int), decode(batch), costs, 0.010 / batch)
        assert (found.price[0] > 0.010 / batch) == (batch > 1)
        assert (min(found.promise) > 0) == promising
        assert found.joint[0] < 0.3 * found.price[0]
    dear = CostModel(FLAT, 512, {"model": Calibration(((1, 0.02), (64, 0.04)), 0.0, 0.0, 0.0)})
    rows = candidates([[0.01] * 8] * 8, limit=8, drafter="model")
    hopeless = margins(rows, np.zeros(8, dtype=int), decode(8), dear, 0.010 / 8)
    assert max(hopeless.promise) < 0  # as dear as the target: not even if all were right
