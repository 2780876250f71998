"""The formulas against tables worked out by exact enumeration, scipy, and simulation."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from scipy.special import lambertw

from server.cli import formulas as analytic

COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)

#: Best draft length and speed-up of a memory-bound target, by acceptance and draft cost.
BEST = {
    0.3: ((3, 1.34), (2, 1.26), (1, 1.18), (1, 1.08), (0, 1.00)),
    0.5: ((4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.07)),
    0.6: ((6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.14)),
    0.7: ((8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.22)),
    0.8: ((11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (2, 1.36)),
    0.9: ((19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (4, 1.58)),
}


@pytest.mark.parametrize("acceptance", BEST)
def test_best_draft_of_a_memory_bound_target(acceptance: float) -> None:
    for cost, (draft, gain) in zip(COSTS, BEST[acceptance], strict=True):
        best, best_gain = analytic.best_draft(acceptance, cost)
        assert (best, round(best_gain, 2)) == (draft, gain)


@pytest.mark.parametrize("acceptance", BEST)
def test_the_closed_form_brackets_the_discrete_optimum(acceptance: float) -> None:
    for cost in COSTS:
        continuous = analytic.best_draft_continuous(acceptance, cost)
        best, _ = analytic.best_draft(acceptance, cost)
        assert best in (max(0, math.floor(continuous)), max(0, math.ceil(continuous)))


def test_lambert_w_agrees_with_scipy() -> None:
    assert analytic._lower_lambert_w(1.0) == -1.0  # the branch point, where scipy is undefined
    for exponent in (1.0001, 1.5, 3.0, 20.0, 300.0):
        expected = lambertw(-math.exp(-exponent), k=-1).real
        assert analytic._lower_lambert_w(exponent) == pytest.approx(expected, rel=1e-6)


def test_the_closed_form_survives_tiny_draft_costs() -> None:
    assert analytic.best_draft_continuous(0.5, 1e-4) > 5  # alpha^(1/c - 1) is 0 in float64
    assert analytic.best_draft_continuous(0.5, 2.0) < 0


@pytest.mark.parametrize(("acceptance", "cost"), [(0.0, 0.1), (1.0, 0.1), (0.5, 0.0)])
def test_the_closed_form_names_what_it_cannot_do(acceptance: float, cost: float) -> None:
    with pytest.raises(ValueError, match=f"acceptance is {acceptance}"):
        analytic.best_draft_continuous(acceptance, cost)


def test_a_compute_knee_ends_speculation_as_the_batch_grows() -> None:
    table = {8: (6, 2.35), 16: (3, 2.20), 32: (1, 1.62), 48: (1, 1.10), 64: (0, 1.0), 256: (0, 1.0)}
    for batch, (draft, gain) in table.items():
        best, best_gain = analytic.best_draft(0.7, 0.05, analytic.roofline(batch, 64))
        assert (best, round(best_gain, 2)) == (draft, gain)


def test_a_verify_cost_that_grows_with_every_token() -> None:
    for slope, (draft, gain) in {0.1: (4, 1.87), 0.2: (3, 1.53), 0.4: (1, 1.20)}.items():
        best, best_gain = analytic.best_draft(0.7, 0.02, analytic.linear(slope))
        assert (best, round(best_gain, 2)) == (draft, gain)


def test_break_even_batch() -> None:
    # Between knee / 2 and the knee, v(1) = 2 B / knee, so B < knee (1 + alpha - c) / 2.
    assert analytic.break_even_batch(0.7, 0.05, 64) == 52
    assert analytic.break_even_batch(0.8, 0.05, 206) == math.floor(206 * 1.75 / 2)
    assert analytic.break_even_batch(0.3, 0.4, 64) == 0
    assert analytic.break_even_batch(0.8, 0.05, 1e9, largest=8) is None


def test_limits() -> None:
    assert analytic.expected_tokens(1.0, 5) == 6
    assert analytic.expected_tokens(0.0, 5) == 1
    assert analytic.speedup(0.0, 4, 0.1) == pytest.approx(1 / 1.4)  # a slowdown
    assert analytic.speedup(1.0, 4, 0.1, analytic.linear(0.2)) == pytest.approx(5 / (0.4 + 1.8))
    assert analytic.speedup(0.9, 0, 0.3, analytic.roofline(8, 4)) == 1.0


def test_expected_tokens_is_the_mean_of_a_round() -> None:
    odds = (0.9, 0.5, 0.7)
    enumerated = 0.0
    for outcome in product((True, False), repeat=3):
        weight = math.prod(p if hit else 1 - p for p, hit in zip(odds, outcome, strict=True))
        accepted = outcome.index(False) if False in outcome else 3
        enumerated += weight * (accepted + 1)
    assert analytic.expected_tokens_by_depth(odds) == pytest.approx(enumerated)
    assert analytic.expected_tokens_by_depth([0.6] * 4) == pytest.approx(
        analytic.expected_tokens(0.6, 4)
    )


def test_speedup_is_what_a_simulated_decode_measures() -> None:
    rng = random.Random(5)
    acceptance, draft, cost, verify = 0.7, 4, 0.05, analytic.linear(0.1)
    tokens, seconds = 0, 0.0
    for _ in range(20_000):
        accepted = 0
        while accepted < draft and rng.random() < acceptance:
            accepted += 1
        tokens += accepted + 1
        seconds += draft * cost + verify(draft)
    # The mean of 20,000 rounds has a relative deviation of about 0.4 %; five of them.
    assert tokens / seconds == pytest.approx(
        analytic.speedup(acceptance, draft, cost, verify), rel=0.02
    )
