"""Which sequences get how many draft tokens, so that the step yields the most tokens a second.

All draft tokens that could be checked, of all sequences, stand in one queue, the likeliest to
be kept first. Since a token is never likelier than the one before it, every front part of the
queue gives each sequence the beginning of its draft. Each front part is priced with the
measured costs, which rise in steps, and the best one wins. This is exact for independent
outcomes, and nothing depends on the tokens themselves, so every verification rule stays
lossless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.control.latency import CostModel, Load
from engine.control.means import Floats, Ints


@dataclass(frozen=True, slots=True)
class Candidates:
    """Sequences that may draft in this step.

    Attributes:
        acceptance: [R, J] that a token is accepted if all before it are.
        offers: [R, J] that the drafter offers that many tokens; never rising.
        limits: [R] most draft tokens.
        drafters: one name per sequence.
    """

    acceptance: Floats
    offers: Floats
    limits: Ints
    drafters: list[str]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best draft lengths, and why.

    Attributes:
        lengths: [R].
        tokens: expected tokens of the step.
        seconds: expected seconds of the step.
        plain_seconds: of the same step without drafts.
        token_seconds: what a token is worth: seconds of pure decoding, at its best, for one.
        saved_seconds: expected gain over no drafts at all.
        chance: that any draft token is offered at all.
    """

    lengths: Ints
    tokens: float
    seconds: float
    plain_seconds: float
    token_seconds: float
    saved_seconds: float
    chance: float

    @property
    def gain(self) -> float:
        """Expected saving as a share of the step without drafts."""
        return self.saved_seconds / self.plain_seconds


@dataclass(frozen=True, slots=True)
class Margins:
    """What one more draft token of each sequence would bring, in seconds.

    Attributes:
        gain: [R] expected; usually negative.
        price: [R] expected time it takes, whether it is accepted or not.
        promise: [R] if the token, once offered, were surely accepted. Where this is not
            positive, trying teaches nothing of use. Beyond the limit it is -inf.
    """

    gain: list[float]
    price: list[float]
    promise: list[float]


def allocate(rows: Candidates, decode: Load, whole: Load, costs: CostModel) -> Allocation:
    """Chooses draft lengths.

    Args:
        rows: who may draft.
        decode: the step's emitting sequences alone.
        whole: with the prefill that shares the pass. Its cost is paid either way, so a token
            is worth what it takes in pure decoding, and only what drafts add is weighed.
        costs: of this machine.
    """
    priced = [_price(_Queue(part), decode, whole, costs) for part in _portfolios(rows)]
    token_seconds = min(float((p.alone / p.tokens).min()) for p in priced)
    scores = [p.tokens * token_seconds - p.together for p in priced]
    score, chosen = max(zip(scores, priced, strict=True), key=lambda pair: float(pair[0].max()))
    best = int(score.argmax())
    return Allocation(
        lengths=chosen.queue.lengths(best),
        tokens=float(chosen.tokens[best]),
        seconds=float(chosen.together[best]),
        plain_seconds=float(chosen.together[0]),
        token_seconds=token_seconds,
        saved_seconds=float(score[best] - score[0]),
        chance=float(chosen.queue.chances[best]),
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """A queue with expected tokens and seconds of every front part of it."""

    queue: _Queue
    tokens: Floats
    alone: Floats  # seconds without the prefill
    together: Floats


def _price(queue: _Queue, decode: Load, whole: Load, costs: CostModel) -> _Priced:
    aside = costs.overhead(decode.batch) + queue.draft_seconds(costs)
    alone = aside + queue.pass_seconds(costs, decode)
    together = alone if whole == decode else aside + queue.pass_seconds(costs, whole)
    return _Priced(queue, decode.batch + queue.gains, alone, together)


def _portfolios(rows: Candidates) -> list[Candidates]:
    """With all drafters, and with each of them alone: where one is so dear that it does not
    pay, it must not stand in the others' way."""
    names = set(rows.drafters)
    if len(names) == 1:
        return [rows]
    drafters = np.array(rows.drafters)
    alone = [replace(rows, limits=rows.limits * (drafters == name)) for name in sorted(names)]
    return [rows, *alone]


def margins(
    rows: Candidates, lengths: Ints, load: Load, costs: CostModel, token_seconds: float
) -> Margins:
    """Prices one more draft token for every sequence.

    Args:
        lengths: [R] that are planned, at most the limits.
        load: of the pass without drafts.
        token_seconds: see `Allocation`.
    """
    survival = np.cumprod(rows.acceptance, axis=1)
    every, index = np.arange(len(lengths)), np.minimum(lengths, rows.limits - 1)
    kept, offer = survival[every, index], rows.offers[every, index]
    before = np.where(lengths > 0, survival[every, np.maximum(index - 1, 0)], 1.0)
    price = offer * _next_pass_seconds(costs, load, int(lengths.sum()))
    price += _next_draft_seconds(costs, rows, lengths)
    promise = offer * before * token_seconds - price
    return Margins(
        gain=(offer * kept * token_seconds - price).tolist(),
        price=price.tolist(),
        promise=np.where(lengths < rows.limits, promise, -np.inf).tolist(),
    )


class _Queue:
    """All draft tokens, best first, and what every front part of them costs.

    Attributes:
        gains: expected tokens of every front part, from the empty one on.
        levels, chances: how many draft tokens there will be, as a distribution on two points:
            `levels` with probability `chances`, else none. A lookup offers a whole draft or
            nothing, and costs rise in steps, so the mean alone would mislead. With mean m and
            variance v of the number, the point m + v/m keeps both; it is exact for a single
            sequence, and close to the mean for many.
    """

    def __init__(self, rows: Candidates) -> None:
        self._rows = rows
        count, depth = rows.acceptance.shape
        offers = rows.offers
        parts = np.empty((3, count, depth))
        survival = rows.acceptance.cumprod(axis=1)
        np.multiply(survival, offers, out=parts[0])
        parts[1] = offers
        # What the token at depth j adds to the variance of its sequence's number of tokens.
        parts[2] = offers * (2 * np.arange(depth) + 1 + offers - 2 * offers.cumsum(axis=1))
        # A draft that is rarely offered must not stand in front of one that is: its call is
        # paid for each time.
        merit = np.minimum.accumulate(survival * np.sqrt(offers), axis=1)
        total = int(rows.limits.sum())
        if total < merit.size:
            merit[np.arange(depth) >= rows.limits[:, None]] = -1.0
        order = (-merit).ravel().argsort(kind="stable")[:total]
        self._row, self._depth = np.divmod(order, depth)
        sums = np.zeros((3, total + 1))
        parts.reshape(3, -1)[:, order].cumsum(axis=1, out=sums[:, 1:])
        self.gains, mean, variance = sums
        upper = mean + np.maximum(variance, 0.0) / np.maximum(mean, 1e-12)
        levels = np.minimum(np.ceil(upper - 1e-9), np.arange(total + 1))
        self.levels: Ints = levels.astype(np.int64)
        self.chances: Floats = mean / np.maximum(levels, 1.0)

    def lengths(self, first: int) -> Ints:
        """Draft lengths if the first so many tokens of the queue are taken."""
        return np.bincount(self._row[:first], minlength=len(self._rows.limits))

    def pass_seconds(self, costs: CostModel, load: Load) -> Floats:
        """Seconds of the target's pass, for every front part."""
        table = costs.target.table(load, int(self.levels.max()))
        seconds: Floats = table[0] + self.chances * (table[self.levels] - table[0])
        return seconds

    def draft_seconds(self, costs: CostModel) -> Floats:
        """Seconds of drafting and of longer sampling, for every front part."""
        names = set(self._rows.drafters)
        counts = self._counts(None)
        result = costs.extra(self.levels * self.chances, counts[1] * self.chances)
        if len(names) == 1:
            result += costs.draft(*names).seconds(counts)
            return result
        drafters = np.array(self._rows.drafters)
        for name in names:
            result += costs.draft(name).seconds(self._counts((drafters == name)[self._row]))
        return result

    def _counts(self, own: NDArray[np.bool_] | None) -> Floats:
        """[3, front parts]: sequences that draft, rounds, tokens; of `own` tokens or all."""
        counts = np.zeros((3, len(self.levels)))
        depth = self._depth + 1
        taken = np.ones_like(depth) if own is None else own.astype(np.int64)
        (taken * (depth == 1)).cumsum(out=counts[0, 1:])
        np.maximum.accumulate(taken * depth, out=counts[1, 1:])
        taken.cumsum(out=counts[2, 1:])
        return counts


def _next_pass_seconds(costs: CostModel, load: Load, level: int) -> float:
    """What one more query token adds to the pass. Just before a step in the costs that is
    the step, and elsewhere at least the average of the next few tokens."""
    table = costs.target.table(load, level + 4)[level:]
    return float(max(table[1] - table[0], (table[4] - table[0]) / 4))


def _next_draft_seconds(costs: CostModel, rows: Candidates, lengths: Ints) -> Floats:
    """[R] what one more draft token of each sequence adds to drafting."""
    result = np.zeros(len(lengths))
    for name in set(rows.drafters):
        own = np.array([drafter == name for drafter in rows.drafters])
        drafting, mine = lengths[own & (lengths > 0)], lengths[own]
        sequences, rounds = len(drafting), int(drafting.max(initial=0))
        counts = np.empty((3, len(mine) + 1))
        counts[:, -1] = sequences, rounds, drafting.sum()
        counts[0, :-1] = sequences + (mine == 0)
        counts[1, :-1] = np.maximum(mine + 1, rounds)
        counts[2, :-1] = counts[2, -1] + 1
        seconds = costs.draft(name).seconds(counts)
        result[own] = np.maximum(seconds[:-1] - seconds[-1], 0.0)
    return result
