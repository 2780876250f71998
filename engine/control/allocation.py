"""Which sequences get how many draft tokens, so that the step yields the most tokens a second.

All candidates (draft tokens that could be checked, of all sequences) stand in one queue, the
likeliest to survive first. A token is never likelier to survive than the one before it, so every
front part of the queue is the beginning of each draft; it is priced with the measured costs, and
the best one wins, which is exact for independent outcomes. Where the rounds of a draft model cost
there is a queue for each number of them; where there are several drafters, one for each alone and
one of the best for each sequence. Nothing depends on the tokens, so all verification is lossless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.control.costs import COUNTS, CostModel, Floats
from engine.load import Load

Ints = NDArray[np.int64]

#: Draft lengths up to which a queue of a drafter with rounds may reach.
_MOST_ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Acceptance that is the same at every depth, as far as a draft can be long.
FLAT: Floats = np.ones(64)

#: A draft model that catches up with a text does so for the steps to come as well.
_CATCH_UP_STEPS = 32


@dataclass(slots=True)
class Line:
    """A sequence and one of its drafters that has something to offer. Never changed; made so often
    that the price of freezing it would show.

    Attributes:
        index: of the sequence, in the order of the step.
        drafter: name.
        limit: most draft tokens, at least 1.
        acceptance: of the first draft token.
        bucket: that the acceptance is of.
        backlog: tokens the drafter has to catch up with first, beyond those of any step.
        by_depth: acceptance at each depth if all tokens before it are accepted, as multiples of
            `acceptance`, at most 1; the same for all lines of a drafter.
    """

    index: int
    drafter: str
    limit: int
    acceptance: float
    bucket: int = 0
    backlog: int = 0
    by_depth: Floats = field(default_factory=lambda: FLAT)


@dataclass(slots=True)
class Allocation:
    """The best draft lengths, and why.

    Attributes:
        lengths: by line; above 0 in at most one line of each sequence.
        tokens: expected of the step.
        seconds: expected of the step.
        plain_seconds: of the same step without drafts.
        token_seconds: what a token is worth: seconds of pure decoding, at its best, for one.
        saved_seconds: expected gain over no drafts at all.
        could_pay: whether there were a gain if every draft token were accepted. Where there is
            none, trying teaches nothing of use.
    """

    lengths: list[int]
    tokens: float
    seconds: float
    plain_seconds: float
    token_seconds: float
    saved_seconds: float = 0.0
    could_pay: bool = True


@dataclass(slots=True)
class _Queue:
    """Some candidates in order; of every front part, the empty one first, what it yields and takes:
    [1 + N]."""

    lines: Ints  # [N]
    more: Floats  # tokens that are expected of drafts
    alone: Floats  # seconds of the emitting sequences alone
    whole: Floats  # with the prefill that shares the pass

    def token_seconds(self, batch: int) -> float:
        """Of a token at its cheapest."""
        each = self.alone / (self.more + batch)
        return float(each[each.argmin()])  # a fraction of what `min` takes


def allocate(
    lines: Sequence[Line], decode: Load, whole: Load, costs: CostModel, depth: int
) -> Allocation:
    """Chooses draft lengths, and the drafter of each sequence.

    Args:
        lines: at least one.
        decode: the step's emitting sequences alone.
        whole: with the prefill that shares the pass. Its cost is paid either way, so a token
            is worth what it takes in pure decoding, and only what drafts add is weighed.
        costs: of this machine.
        depth: longest draft.
    """
    pricing = _Pricing(lines, decode, whole, costs, depth)
    names = list(pricing.groups)
    queues = [queue for name in names for queue in pricing.queues([name], pricing.groups[name])]
    worth = min([queue.token_seconds(decode.batch) for queue in queues])
    if len(names) > 1:
        queues += pricing.queues(names, pricing.best_lines(worth))
        worth = min([queue.token_seconds(decode.batch) for queue in queues])
    plain = float(queues[0].whole[0])
    best = Allocation([0] * len(lines), decode.batch, plain, plain, worth)
    for queue in queues:
        score = queue.more * worth - queue.whole
        at = int(score.argmax())
        if at and score[at] + plain > best.saved_seconds:
            best.saved_seconds = float(score[at]) + plain
            best.tokens, best.seconds = decode.batch + float(queue.more[at]), float(queue.whole[at])
            best.lengths = np.bincount(queue.lines[:at], minlength=len(lines)).tolist()
    best.could_pay = best.saved_seconds > 0.0 or any(
        (COUNTS[: len(queue.whole)] * worth - queue.whole).max() > -plain for queue in queues
    )
    return best


class _Pricing:
    """Makes queues of candidates and prices them.

    Attributes:
        groups: by drafter, its lines.
    """

    def __init__(
        self, lines: Sequence[Line], decode: Load, whole: Load, costs: CostModel, depth: int
    ) -> None:
        self._lines, self._batch, self._costs, self._depth = lines, decode.batch, costs, depth
        self.groups: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            self.groups.setdefault(line.drafter, []).append(number)
        self._survival = self._survive()
        self._each = self._price_each()
        # Ties keep the order of depth, so that fronts remain beginnings of drafts.
        order = (-self._survival).ravel().argsort(kind="stable")
        room = len(order) if self._all else int(np.count_nonzero(self._survival >= 0.0))
        self._order = order[:room]
        self._place, self._at = np.divmod(self._order, depth)
        overhead = costs.overhead(decode.batch)
        self._alone = costs.target.table(decode, room) + overhead
        self._whole = self._alone
        if whole != decode:
            self._whole = costs.target.table(whole, room) + overhead

    def _survive(self) -> Floats:
        """Odds of every candidate, [lines, depths], below 0 where it must not be taken."""
        by_depth = self._lines[0].by_depth[: self._depth]
        if len(self.groups) > 1:
            by_depth = np.array([line.by_depth[: self._depth] for line in self._lines])
        first = np.array([line.acceptance for line in self._lines])
        survival: Floats = (first[:, None] * by_depth).cumprod(axis=1)
        limits = [line.limit for line in self._lines]
        self._all = min(limits) >= self._depth
        if not self._all:
            survival[COUNTS[1 : self._depth + 1] > np.array(limits)[:, None]] = -1.0
        return survival

    def _price_each(self) -> Floats:
        """Seconds that a candidate adds by itself outside of the pass: [lines, depths]."""
        each = np.empty_like(self._survival)
        each.fill(self._costs.extra)
        for name, own in self.groups.items():
            sequence, token, read = self._costs.draft(name).each_seconds
            rows = own if len(self.groups) > 1 else slice(None)
            each[rows] += token
            each[rows, 0] += sequence
            for number in own:
                if backlog := self._lines[number].backlog:
                    each[number, 0] += backlog * read / _CATCH_UP_STEPS
        return each

    def queues(self, names: Sequence[str], lines: Sequence[int]) -> Iterator[_Queue]:
        """The queues of some drafters' lines, no two of them of one sequence."""
        keep: Ints | slice = slice(None)
        if len(lines) < len(self._lines):
            chosen = np.zeros(len(self._lines), dtype=bool)
            chosen[lines] = True
            keep = chosen[self._place].nonzero()[0]
        order, place, at = self._order[keep], self._place[keep], self._at[keep]
        in_rounds = [name for name in names if self._costs.draft(name).has_rounds]
        if not in_rounds:
            yield self._price(names, order, place, at)
            return
        rounds = at
        if len(in_rounds) < len(names):
            rounds = np.where(self._of(in_rounds)[place], at, 0)
        for most in _MOST_ROUNDS:
            within = rounds < most
            yield self._price(names, order[within], place[within], at[within])
            if within.all():
                return

    def _of(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Which lines are those of some drafters."""
        return np.array([line.drafter in names for line in self._lines])

    def _price(self, names: Sequence[str], order: Ints, place: Ints, at: Ints) -> _Queue:
        """Prices every front part of a queue."""
        size = len(order) + 1
        more, alone = np.zeros(size), self._alone[:size].copy()
        self._survival.ravel()[order].cumsum(out=more[1:])
        alone[1:] += self._each.ravel()[order].cumsum()
        for name in names:
            deepest, count = at, COUNTS[1:size]
            if len(names) > 1:
                own = self._of([name])[place]
                deepest, count = np.where(own, at, -1), own.cumsum()
            rounds = np.maximum.accumulate(deepest) + 1
            alone[1:] += self._costs.draft(name).shared_seconds(rounds, count)
        whole = alone
        if self._whole is not self._alone:
            whole = alone + (self._whole[:size] - self._alone[:size])
        return _Queue(place, more, alone, whole)

    def best_lines(self, worth: float) -> list[int]:
        """One line of each sequence: the drafter that gains most if all of its lines share its
        calls and rounds.

        Args:
            worth: seconds of a token.
        """
        depths = COUNTS[1 : self._depth + 1]
        net = np.maximum(self._survival, 0.0).cumsum(axis=1) * worth - self._each.cumsum(axis=1)
        row = self._alone[min(self._batch, len(self._alone) - 1)] - self._alone[0]
        net -= depths * row / self._batch
        for name, own in self.groups.items():
            shared = self._costs.draft(name).shared_seconds(depths, len(own) * depths)
            net[own] -= shared / len(own)
        net[self._survival < 0.0] = -np.inf
        best: dict[int, tuple[float, int]] = {}
        for number, (line, gain) in enumerate(zip(self._lines, net.max(axis=1), strict=True)):
            best[line.index] = max(best.get(line.index, (-np.inf, 0)), (gain, number))
        return [number for _, number in best.values()]
