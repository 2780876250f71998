"""Draft tokens that could be checked, and the queue in which they stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.control.draft_time import DraftTime
from engine.control.latency import CostModel, Load
from engine.control.means import Floats, Ints


@dataclass(frozen=True, slots=True)
class Candidates:
    """Drafts that could be made in this step; a line for each sequence and drafter of it.

    Attributes:
        acceptance: [R, J] that a token is accepted if all before it are.
        offers: [R, J] that the drafter offers that many tokens; never rising.
        limits: [R] most draft tokens.
        drafters: one name per line.
        owners: [R] ascending numbers of the sequences; None = each line is one of its own.
        backlog: [R] tokens to catch up with, as the share that this step should bear; None = 0.
    """

    acceptance: Floats
    offers: Floats
    limits: Ints
    drafters: list[str]
    owners: Ints | None = None
    backlog: Floats | None = None

    def take(self, lines: Ints) -> Candidates:
        """Some of the lines."""
        return Candidates(
            acceptance=self.acceptance[lines],
            offers=self.offers[lines],
            limits=self.limits[lines],
            drafters=[self.drafters[i] for i in lines],
            owners=None if self.owners is None else self.owners[lines],
            backlog=None if self.backlog is None else self.backlog[lines],
        )

    @property
    def sequences(self) -> Ints:
        """The owners, however they were given."""
        return np.arange(len(self.limits)) if self.owners is None else self.owners

    def of(self, drafter: str) -> Ints:
        """The lines of one drafter."""
        return np.array([i for i, name in enumerate(self.drafters) if name == drafter], dtype=int)


#: Longest drafts that are compared where rounds cost.
_CAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)

#: Rounds below this share of the pass are not worth counting: that a token is likely decides.
_CHEAP_ROUND = 0.01


def has_cheap_rounds(draft: DraftTime, costs: CostModel, load: Load) -> bool:
    """Whether rounds of a drafter need not be counted beside a pass over `load`."""
    return draft.round_seconds <= _CHEAP_ROUND * costs.target.seconds(load)


class Queue:
    """All draft tokens, best first, and what every front part of them costs.

    Where a drafter's rounds cost, the likeliest tokens may still be the wrong ones: a round pays
    for many sequences at once, or hardly. So there are several queues, each with the tokens of
    such drafters up to one length only.

    Attributes:
        gains: [C, F] expected tokens of every front part of each queue, from the empty one on.
        levels, chances: [C, F] how many draft tokens there will be, as a distribution on two
            points: `levels` with probability `chances`, else none. A lookup offers a whole draft
            or nothing, and costs rise in steps, so the mean alone would mislead. With mean m and
            variance v of the number, the point m + v/m keeps both; it is exact for a single
            sequence, and close to the mean for many.

    Args:
        rows: whose tokens they are.
        costs: say whose rounds cost.
        load: of the pass without drafts.
    """

    def __init__(self, rows: Candidates, costs: CostModel, load: Load) -> None:
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
        self._taken = self._take(costs, load, depth)
        sums = np.zeros((3, 1 if self._taken is None else len(self._taken), total + 1))
        ordered = parts.reshape(3, 1, -1)[:, :, order]
        if self._taken is not None:
            ordered = ordered * self._taken
        ordered.cumsum(axis=2, out=sums[:, :, 1:])
        self.gains, mean, variance = sums
        self._counts = self._count(self._taken)
        upper = mean + np.maximum(variance, 0.0) / np.maximum(mean, 1e-12)
        levels = np.minimum(np.ceil(upper - 1e-9), self._counts[2])
        self.levels: Ints = levels.astype(np.int64)
        self.chances: Floats = mean / np.maximum(levels, 1.0)

    def lengths(self, queue: int, first: int) -> Ints:
        """Draft lengths if the first so many tokens of a queue are taken."""
        taken = self._row[:first]
        if self._taken is not None:
            taken = taken[self._taken[queue, :first]]
        return np.bincount(taken, minlength=len(self._rows.limits))

    def pass_seconds(self, costs: CostModel, load: Load) -> Floats:
        """[C, F] seconds of the target's pass."""
        table = costs.target.table(load, int(self.levels.max()))
        seconds: Floats = table[0] + self.chances * (table[self.levels] - table[0])
        return seconds

    def draft_seconds(self, costs: CostModel) -> Floats:
        """[C, F] seconds of drafting and of longer sampling."""
        names = set(self._rows.drafters)
        result: Floats = costs.extra * self.levels * self.chances
        if len(names) == 1:
            result += costs.draft(*names).seconds(self._counts)
        else:
            drafters = np.array(self._rows.drafters)
            for name in names:
                own = (drafters == name)[None, self._row]
                taken = own if self._taken is None else self._taken & own
                result += costs.draft(name).seconds(self._count(taken))
        if self._rows.backlog is not None:
            seconds = [costs.draft(name).read_seconds for name in self._rows.drafters]
            reading = self._rows.backlog * seconds
            result[:, 1:] += (reading[self._row] * (self._depth == 0)).cumsum()
        return result

    def _take(self, costs: CostModel, load: Load, depth: int) -> NDArray[np.bool_] | None:
        """[C, tokens in order] which tokens each queue holds, all in the last one; None if there
        is but one queue."""
        names = set(self._rows.drafters)
        dear = {n for n in names if not has_cheap_rounds(costs.draft(n), costs, load)}
        if not dear:
            return None
        caps = np.array([cap for cap in _CAPS if cap < depth] + [depth])
        taken: NDArray[np.bool_] = self._depth < caps[:, None]
        if dear != names:
            free = np.array([name not in dear for name in self._rows.drafters])
            taken |= free[self._row]
        return taken

    def _count(self, taken: NDArray[np.bool_] | None) -> Floats:
        """[3, C, F]: sequences that draft, rounds and tokens of every front part; of the tokens
        taken, or of all."""
        first, depth = (self._depth == 0)[None], self._depth[None] + 1
        if taken is None:
            taken = np.ones_like(first)
        counts = np.zeros((3, len(taken), len(self._row) + 1))
        (taken & first).cumsum(axis=1, out=counts[0, :, 1:])
        np.maximum.accumulate(taken * depth, axis=1, out=counts[1, :, 1:])
        taken.cumsum(axis=1, out=counts[2, :, 1:])
        return counts
