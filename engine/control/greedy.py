"""The common case of `allocate` in a fraction of its time: one drafter, which runs no model.

The queue and its prices are the same. But what a sequence offers is kept as a list as long as
the estimates are, and so is what tokens cost: with a few dozen tokens in question, most of the
time would go into arrays that are made for one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Allocation
from engine.control.candidates import has_cheap_rounds
from engine.control.latency import CostModel, Load
from engine.control.step import PendingStep

#: Tokens less likely than this are nowhere worth their check.
_LEAST_MERIT = 0.01

#: Of so many lines, while estimates are kept, tokens below this share of the merit at which the
#: queue was cut last are passed over; unless there are fewer lines than this share of then.
_MANY, _NEAR, _FEWER = 8, 0.5, 0.75

#: (minus merit, depth from 0, expected tokens, chance to be offered, variance of the number)
_Token = tuple[float, int, float, float, float]

#: The same with the number of its line behind the merit.
_Queued = tuple[float, int, int, float, float, float]

#: (expected tokens, seconds of drafting, level, chance); see `Queue` for the last two
_Front = tuple[float, float, int, float]


@dataclass(frozen=True, slots=True)
class _Bid:
    """What a line offers, its first token first."""

    expected: float  # acceptance at depth 1
    tokens: list[_Token]


@dataclass(frozen=True, slots=True)
class _Tariff:
    """Seconds of a step: plain; and what so many draft tokens add to its pass."""

    plain: float
    added: list[float]


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Seconds that drafting takes; see `DraftTime` and `CostModel.extra`."""

    terms: tuple[float, float, float, float]
    ratios: list[float]
    extra: float


class Greedy:
    """Draft lengths for the lines of a step, from kept lists.

    Args:
        acceptance: estimates.
        costs: of this machine.
    """

    def __init__(self, acceptance: AcceptanceModel, costs: CostModel) -> None:
        self._acceptance = acceptance
        self._costs = costs
        self._bids: dict[tuple[int, int], _Bid] = {}  # by slot and bucket
        self._tariffs: dict[int, _Tariff] = {}  # by batch
        self._drafting: dict[str, _Drafting] = {}
        self._cuts: dict[int, tuple[float, int]] = {}  # by batch: merit, and lines there were
        self._as_of = -1  # see `AcceptanceModel.settled`

    def fits(self, step: PendingStep) -> bool:
        """Whether a step is of the kind that this can do."""
        names = {line.drafter for line in step.lines}
        if len(names) > 1 or any(line.backlog for line in step.lines):
            return False
        [name] = names
        draft = self._costs.draft(name)
        return not draft.runs_model and has_cheap_rounds(draft, self._costs, step.decode)

    def allocate(self, step: PendingStep, slots: list[int]) -> tuple[list[float], Allocation]:
        """Acceptance at depth 1 of the lines of a step that fits; and the same as
        `allocate.allocate` for them.

        Args:
            step: its load, and its lines.
            slots: of the lines in the acceptance model.
        """
        if self._as_of != self._acceptance.settled:
            self._forget()
        lines, batch = step.lines, step.decode.batch
        bids = [self._bid(slot, line.bucket) for slot, line in zip(slots, lines, strict=True)]
        least = self._least_merit(batch, len(lines))
        queue = [
            (merit, row, depth, gain, offer, variance)
            for row, (bid, line) in enumerate(zip(bids, lines, strict=True))
            for merit, depth, gain, offer, variance in bid.tokens[: line.limit]
            if merit <= -least
        ]
        queue.sort()
        fronts = _fronts(queue, batch, self._drafting_of(lines[0].drafter, len(lines)))
        alone = _totals(self._tariff(step.decode, len(queue)), fronts)
        worth = min(s / front[0] for s, front in zip(alone, fronts, strict=True))
        together = alone
        if step.has_prefill:
            together = _totals(self._price(step.whole, len(queue)), fronts)
        scores = [front[0] * worth - s for s, front in zip(together, fronts, strict=True)]
        best = max(range(len(scores)), key=scores.__getitem__)
        if not least and queue and len(lines) >= _MANY and not step.has_prefill:
            self._cuts[batch] = -queue[max(best - 1, 0)][0], len(lines)
        lengths = [0] * len(lines)
        for _, row, *_ in queue[:best]:
            lengths[row] += 1
        allocation = Allocation(
            drafters=(lines[0].drafter,),
            lengths=np.array(lengths),
            tokens=fronts[best][0],
            seconds=together[best],
            plain_seconds=together[0],
            token_seconds=worth,
            saved_seconds=scores[best] - scores[0],
            chance=fronts[best][3],
        )
        return [bid.expected for bid in bids], allocation

    def _forget(self) -> None:
        self._as_of = self._acceptance.settled
        self._bids.clear()
        self._tariffs.clear()
        self._drafting.clear()
        self._cuts.clear()

    def _least_merit(self, batch: int, lines: int) -> float:
        """Below which tokens need not be looked at; 0 where all must be."""
        merit, then = self._cuts.get(batch, (0.0, 0))
        return _NEAR * merit if lines >= _FEWER * then else 0.0

    def _bid(self, slot: int, bucket: int) -> _Bid:
        bid = self._bids.get((slot, bucket))
        if bid is None:
            acceptance, offers = self._acceptance.estimate(slot, bucket)
            bid = self._bids[slot, bucket] = _bid(acceptance.tolist(), offers.tolist())
        return bid

    def _tariff(self, load: Load, tokens: int) -> _Tariff:
        """Kept, although contexts grow a little meanwhile."""
        tariff = self._tariffs.get(load.batch)
        if tariff is None or len(tariff.added) <= tokens:
            most = max(tokens, load.batch * self._acceptance.depth)
            tariff = self._tariffs[load.batch] = self._price(load, most)
        return tariff

    def _price(self, load: Load, tokens: int) -> _Tariff:
        table = self._costs.target.table(load, tokens)
        plain = self._costs.overhead(load.batch) + float(table[0])
        return _Tariff(plain, (table - table[0]).tolist())

    def _drafting_of(self, name: str, sequences: int) -> _Drafting:
        drafting = self._drafting.get(name)
        if drafting is None or len(drafting.ratios) <= sequences:
            terms, ratios = self._costs.draft(name).search_seconds(sequences)
            drafting = _Drafting(terms, ratios, self._costs.extra)
            self._drafting[name] = drafting
        return drafting


def _bid(acceptance: list[float], offers: list[float]) -> _Bid:
    """Tokens of a line, as `Queue` values them."""
    tokens: list[_Token] = []
    survival = merit = 1.0
    offered = 0.0
    for depth, (accepted, offer) in enumerate(zip(acceptance, offers, strict=True)):
        survival *= accepted
        offered += offer
        merit = min(merit, survival * sqrt(offer))
        if merit < _LEAST_MERIT:
            break
        variance = offer * (2 * depth + 1 + offer - 2 * offered)
        tokens.append((-merit, depth, survival * offer, offer, variance))
    return _Bid(acceptance[0], tokens)


def _fronts(queue: list[_Queued], batch: int, drafting: _Drafting) -> list[_Front]:
    """What every front part of a queue brings, from the empty one on."""
    call, per_sequence, per_round, per_token = drafting.terms
    fronts = [(float(batch), 0.0, 0, 0.0)]
    gains = mean = spread = 0.0
    sequences = rounds = 0
    for count, (_, _, depth, gain, offer, variance) in enumerate(queue, 1):
        gains += gain
        mean += offer
        spread += variance
        sequences += depth == 0
        rounds = max(rounds, depth + 1)
        level = min(ceil(mean + max(spread, 0.0) / mean - 1e-9), count)
        chance = mean / level
        ratio = drafting.ratios[sequences]
        seconds = call + per_sequence * sequences + per_round * rounds + per_token * count
        seconds = seconds * ratio + drafting.extra * mean
        fronts.append((batch + gains, seconds, level, chance))
    return fronts


def _totals(tariff: _Tariff, fronts: list[_Front]) -> list[float]:
    """Seconds of the whole step, for every front part of the queue."""
    plain, added = tariff.plain, tariff.added
    return [plain + drafting + chance * added[level] for _, drafting, level, chance in fronts]
