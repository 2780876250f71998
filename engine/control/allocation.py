"""Which sequences get how many draft tokens, so that the step yields the most tokens a second.

All candidates (draft tokens that could be checked, of all sequences) stand in one queue, the
likeliest to survive first. Since a token is never likelier to survive than the one before it,
every front part of the queue gives each sequence the beginning of its draft. Each front part is
priced with the measured costs, which rise in steps, and the best one wins. This is exact for
independent outcomes. Where the rounds of a draft model cost, there are several queues, each up to
some number of rounds. Nothing depends on the tokens themselves, so every verification rule stays
lossless.

Where several drafters may guess for a sequence, there are several such queues: one for each
drafter alone, and one with the drafter for each sequence that gains most by itself.
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
        limit: most draft tokens.
        acceptance: of the first draft token.
        bucket: that the acceptance is of.
        backlog: tokens the drafter has to catch up with first, beyond those of any step.
        by_depth: acceptance at each depth if all tokens before it are accepted, as multiples of
            `acceptance`; the same for all lines of a drafter.
    """

    index: int
    drafter: str
    limit: int
    acceptance: float
    bucket: int = 0
    backlog: int = 0
    by_depth: Floats = field(default_factory=lambda: FLAT)

    def tokens(self, length: int) -> float:
        """Expected of a draft of this length."""
        return float(_survival(self.acceptance * self.by_depth[:length]).sum())


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best draft lengths, and why.

    Attributes:
        lengths: by line; above 0 in at most one line of each sequence.
        tokens: expected of the step.
        seconds: expected of the step.
        plain_seconds: of the same step without drafts.
        token_seconds: what a token is worth: seconds of pure decoding, at its best, for one.
        saved_seconds: expected gain over no drafts at all.
        promise: the same if every draft token were accepted. Where it is not positive, trying
            teaches nothing of use.
    """

    lengths: list[int]
    tokens: float
    seconds: float
    plain_seconds: float
    token_seconds: float
    saved_seconds: float
    promise: float

    @property
    def gain(self) -> float:
        """Expected saving as a share of the step without drafts."""
        return self.saved_seconds / self.plain_seconds


@dataclass(slots=True)
class _Queue:
    """Some candidates in order, with expected tokens and seconds of every front part: [1 + N]."""

    lines: Ints  # [N]
    tokens: Floats
    alone: Floats  # seconds of the emitting sequences alone
    whole: Floats  # with the prefill that shares the pass

    @property
    def token_seconds(self) -> float:
        """Of a token at its cheapest."""
        each = self.alone / self.tokens
        return float(each[each.argmin()])  # a fraction of what `min` takes

    def best(self, token_seconds: float) -> tuple[float, int]:
        """The best front part: what it yields beyond its price, in seconds, and its size."""
        score = self.tokens * token_seconds - self.whole
        at = int(score.argmax())
        return float(score[at]), at

    def promise(self, token_seconds: float) -> float:
        """The best score if every draft token were accepted."""
        score = (self.tokens[0] + COUNTS[: len(self.whole)]) * token_seconds - self.whole
        return float(score[score.argmax()])


def _survival(acceptance: Floats) -> Floats:
    """Odds of tokens at depths 1, 2, ... (the last axis) from those of each by itself; they never
    rise."""
    return np.minimum(acceptance, 1.0).cumprod(axis=-1)


def allocate(
    lines: Sequence[Line], decode: Load, whole: Load, costs: CostModel, depth: int
) -> Allocation:
    """Chooses draft lengths, and the drafter of each sequence.

    Args:
        lines: at least one, those of a sequence together.
        decode: the step's emitting sequences alone.
        whole: with the prefill that shares the pass. Its cost is paid either way, so a token
            is worth what it takes in pure decoding, and only what drafts add is weighed.
        costs: of this machine.
        depth: longest draft.
    """
    pricing = _Pricing(lines, decode, whole, costs, depth)
    names = sorted({line.drafter for line in lines})
    queues = [queue for name in names for queue in pricing.queues(pricing.lines_of(name))]
    worth = min([queue.token_seconds for queue in queues])
    if len(names) > 1:
        more = list(pricing.queues(pricing.best_lines(worth)))
        worth = min(worth, *(queue.token_seconds for queue in more))
        queues += more
    found = [queue.best(worth) for queue in queues]
    (score, at), best = max(zip(found, queues, strict=True), key=lambda pair: pair[0][0])
    plain_seconds = float(best.whole[0])
    plain = decode.batch * worth - plain_seconds
    return Allocation(
        lengths=np.bincount(best.lines[:at], minlength=len(lines)).tolist(),
        tokens=float(best.tokens[at]),
        seconds=float(best.whole[at]),
        plain_seconds=plain_seconds,
        token_seconds=worth,
        saved_seconds=score - plain if at else 0.0,
        promise=max([queue.promise(worth) for queue in queues]) - plain,
    )


class _Pricing:
    """Makes queues of candidates and prices them."""

    def __init__(
        self, lines: Sequence[Line], decode: Load, whole: Load, costs: CostModel, depth: int
    ) -> None:
        self._lines, self._decode, self._costs = lines, decode, costs
        self._depth = depth
        depths = COUNTS[1 : depth + 1]
        by_depth = lines[0].by_depth
        if len({line.drafter for line in lines}) > 1:
            by_depth = np.array([line.by_depth for line in lines])
        first = np.array([line.acceptance for line in lines])
        self._survival = _survival(first[:, None] * by_depth[..., :depth])
        self._room = len(lines) * depth
        limits = [line.limit for line in lines]
        if min(limits) < depth:
            self._survival[depths > np.array(limits)[:, None]] = -1.0  # never taken
            self._room = int(np.count_nonzero(self._survival >= 0.0))
        self._read = np.zeros(0)  # seconds of catching up, for each of the steps that gain by it
        if any(line.backlog for line in lines):
            seconds = [line.backlog * costs.draft(line.drafter).read_seconds for line in lines]
            self._read = np.array(seconds) / _CATCH_UP_STEPS
        aside = costs.extra * COUNTS[: self._room + 1] + costs.overhead(decode.batch)
        self._alone = costs.target.table(decode, self._room) + aside
        same = decode == whole
        self._whole = self._alone if same else costs.target.table(whole, self._room) + aside

    def lines_of(self, name: str) -> Ints:
        """The lines of one drafter."""
        return np.array([n for n, line in enumerate(self._lines) if line.drafter == name])

    def queues(self, lines: Ints) -> Iterator[_Queue]:
        """The queues of some lines, no two of them of one sequence."""
        every = len(lines) == len(self._survival)
        survival = self._survival if every else self._survival[lines]
        # Ties keep the order of depth, so that fronts remain beginnings of drafts.
        order = (-survival).ravel().argsort(kind="stable")
        if self._room < self._survival.size:
            order = order[: np.count_nonzero(survival >= 0.0)]
        place = order // self._depth
        depth = order - place * self._depth
        lines, value = lines[place], survival.ravel()[order]
        names = [line.drafter for line in self._lines]
        distinct = set(names) if every else {names[n] for n in lines}
        groups = {name: self._costs.draft(name).has_rounds for name in distinct}
        if not any(groups.values()):
            yield self._price(list(groups), lines, depth, value)
            return
        in_rounds = np.array([groups.get(name, False) for name in names])[lines]
        for rounds in _MOST_ROUNDS:
            keep = ~in_rounds | (depth < rounds)
            yield self._price(list(groups), lines[keep], depth[keep], value[keep])
            if keep.all():
                return

    def _price(self, names: list[str], lines: Ints, depth: Ints, value: Floats) -> _Queue:
        """Prices every front part of a queue of so many lines' candidates."""
        size = len(lines) + 1
        tokens = np.empty(size)
        tokens[0] = self._decode.batch
        tokens[1:] = value
        tokens = tokens.cumsum()
        alone, first = self._alone[:size].copy(), depth == 0
        for name in names:
            if len(names) == 1:
                sequences, count, deepest = first.cumsum(), COUNTS[1:size], depth
            else:
                own = np.array([line.drafter == name for line in self._lines])[lines]
                sequences, count = (first & own).cumsum(), own.cumsum()
                deepest = np.where(own, depth, -1)
            drafting = self._costs.draft(name).seconds(
                sequences, np.maximum.accumulate(deepest) + 1, count
            )
            alone[1:] += drafting
        if len(self._read):
            alone[1:] += (self._read[lines] * first).cumsum()
        whole = alone
        if self._whole is not self._alone:
            whole = alone + (self._whole[:size] - self._alone[:size])
        return _Queue(lines, tokens, alone, whole)

    def best_lines(self, worth: float) -> Ints:
        """One line of each sequence: the drafter that gains most if all of its lines share its
        calls and rounds.

        Args:
            worth: seconds of a token.
        """
        depths, batch = COUNTS[1 : self._depth + 1], self._decode.batch
        net = np.maximum(self._survival, 0.0).cumsum(axis=1) * worth
        net -= depths * (self._alone[min(batch, len(self._alone) - 1)] - self._alone[0]) / batch
        for name in {line.drafter for line in self._lines}:
            own = self.lines_of(name)
            sharing = np.full(self._depth, float(len(own)))
            drafting = self._costs.draft(name).seconds(sharing, depths, sharing * depths)
            net[own] -= drafting / len(own)
        if len(self._read):
            net -= self._read[:, None]
        net[self._survival < 0.0] = -np.inf
        best, owners = net.max(axis=1), np.array([line.index for line in self._lines])
        order = np.lexsort((-best, owners))
        chosen: Ints = np.sort(order[np.diff(owners[order], prepend=-1) > 0])
        return chosen
