"""Draft tokens that could be checked, and the queue in which they stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


class Queue:
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
        else:
            drafters = np.array(self._rows.drafters)
            for name in names:
                result += costs.draft(name).seconds(self._counts((drafters == name)[self._row]))
        if self._rows.backlog is not None:
            seconds = [costs.draft(name).read_seconds for name in self._rows.drafters]
            reading = self._rows.backlog * seconds
            result[1:] += (reading[self._row] * (self._depth == 0)).cumsum()
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
