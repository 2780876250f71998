"""What speculation buys, as formulas: the arithmetic behind the planner, the docs and `plan`.

Notation of the field: alpha is the probability that a draft token is accepted, k the draft
length, c the cost of one draft round over the cost of one plain decode step, B the number of
decoding sequences, and v(k) the cost of a verify pass of B (k + 1) tokens over that plain step.

The expected number of tokens of one pass with independent acceptances is Leviathan et al.
(2023), equation 1; the speed-up is their theorem 3.8 where v = 1. A round accepts the drafts
up to the first refusal and always adds one token of the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

#: Relative cost v(k) of a verify pass with k drafts for each sequence; v(0) = 1.
VerifyCost = Callable[[int], float]

#: Longest draft that the searches below try.
LONGEST_DRAFT = 64


def memory_bound(_: int) -> float:
    """v = 1: the pass reads all weights anyway, and a few more tokens ride along."""
    return 1.0


def linear(slope: float) -> VerifyCost:
    """v = 1 + slope k: every draft token costs the same share, as on a small CPU."""
    return lambda draft: 1.0 + slope * draft


def roofline(batch: int, knee: float) -> VerifyCost:
    """v of a machine whose pass costs the same up to `knee` tokens and grows in proportion
    beyond: memory-bound before, compute-bound after.

    Args:
        batch: decoding sequences B.
        knee: tokens per pass at which computing takes as long as reading the weights.
    """
    plain = max(1.0, batch / knee)
    return lambda draft: max(1.0, batch * (draft + 1) / knee) / plain


def expected_tokens(acceptance: float, draft: int) -> float:
    """Tokens of one pass, 1 + alpha + ... + alpha^k: accepted drafts and the target's own.

    Args:
        acceptance: alpha, from 0 to 1, the same at every depth.
        draft: k, 0 or more.
    """
    if acceptance == 1.0:
        return draft + 1.0
    return (1.0 - math.pow(acceptance, draft + 1)) / (1.0 - acceptance)


def expected_tokens_by_depth(acceptances: Sequence[float]) -> float:
    """Tokens of one pass where depth j is accepted, after all before it, with its own odds."""
    accepted: float = sum(accumulate(acceptances, mul))
    return 1.0 + accepted


def speedup(
    acceptance: float, draft: int, draft_cost: float, verify_cost: VerifyCost = memory_bound
) -> float:
    """Tokens per second with k drafts over tokens per second without.

    Args:
        acceptance: alpha, from 0 to 1.
        draft: k; 0 gives exactly 1.
        draft_cost: c, of each of the k sequential draft rounds.
        verify_cost: v(k).
    """
    return expected_tokens(acceptance, draft) / (draft * draft_cost + verify_cost(draft))


def best_draft(
    acceptance: float,
    draft_cost: float,
    verify_cost: VerifyCost = memory_bound,
    longest: int = LONGEST_DRAFT,
) -> tuple[int, float]:
    """The draft length with the highest speed-up, and that speed-up; (0, 1.0) if none pays."""
    gains = [speedup(acceptance, k, draft_cost, verify_cost) for k in range(longest + 1)]
    best = max(range(longest + 1), key=gains.__getitem__)
    return best, gains[best]


def best_draft_continuous(acceptance: float, draft_cost: float) -> float:
    """The real-valued k that maximises the speed-up of a memory-bound target (v = 1).

    Setting the derivative of (1 - alpha^(k+1)) / (1 + c k) to zero gives
    k* = (1 + W(-alpha^(1/c - 1) / e)) / ln alpha - 1/c, with the lower branch of Lambert's W.
    The discrete optimum is its floor or its ceiling.

    Args:
        acceptance: alpha, strictly between 0 and 1.
        draft_cost: c, above 0.

    Returns:
        k*, negative where even the first draft token does not pay.
    """
    if not (0.0 < acceptance < 1.0 and draft_cost > 0.0):
        raise ValueError(
            f"acceptance is {acceptance} and draft_cost {draft_cost}; the closed form needs an "
            "acceptance strictly between 0 and 1 and a draft_cost above 0"
        )
    log_alpha = math.log(acceptance)
    # W is taken at -exp(-u) with u >= 1, which stays exact where the argument underflows.
    exponent = 1.0 - (1.0 / draft_cost - 1.0) * log_alpha
    if exponent < 1.0:  # c > 1: a draft round costs more than the token it may save
        return -1.0
    return (1.0 + _lower_lambert_w(exponent)) / log_alpha - 1.0 / draft_cost


def break_even_batch(
    acceptance: float, draft_cost: float, knee: float, largest: int = 4096
) -> int | None:
    """The largest batch at which speculation still pays on a roofline machine.

    One draft token pays while v(1) < 1 + alpha - c. Past the knee v(1) = 2, so no drafter can
    help there unless it costs less than nothing.

    Args:
        acceptance: alpha.
        draft_cost: c.
        knee: see `roofline`.
        largest: where the search ends.

    Returns:
        0 if speculation pays at no batch size, None if it pays up to `largest`.
    """
    for batch in range(1, largest + 1):
        if best_draft(acceptance, draft_cost, roofline(batch, knee))[1] <= 1.0:
            return batch - 1
    return None


def _lower_lambert_w(exponent: float) -> float:
    """The solution w <= -1 of w e^w = -e^(-exponent), exponent >= 1.

    With w = -x the equation reads x - ln x = exponent, x >= 1, which Newton's method solves
    from the right: the function is convex, so the iterates fall to the root.
    """
    if exponent <= 1.0:
        return -1.0
    x = exponent + math.sqrt(2.0 * (exponent - 1.0))
    for _ in range(64):
        step = (x - math.log(x) - exponent) / (1.0 - 1.0 / x)
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return -x
