"""How likely the next draft tokens are to be accepted, and to be offered at all.

For every sequence, drafter, bucket and depth there are discounted counts of accepted and
refused draft tokens. Depths after the first refusal were never judged and count neither way
(the data are censored); a draft that is cut by the end of the sequence refuses nothing.

Counts of one sequence are few, so they are shrunk to what is expected of it: the mean of all
sequences at that drafter, bucket and depth, shifted by how much better or worse this sequence
has lately done than that mean, at whatever depth. How much of the resulting difference from
the mean to believe is itself learnt, by regressing outcomes on it: where all sequences are
alike, their estimates differ by chance only, and planning would prefer the lucky ones. When
outcomes contradict an estimate in a row (code gave way to prose), the evidence against the
change is dropped.

A *bucket* is what a drafter knows before it drafts, such as the length of the match it would
continue; drafters that know nothing always use bucket 0.
"""

from __future__ import annotations

import numpy as np

from engine.control.means import NUM_BUCKETS, Floats, Ints, Means, longer
from engine.control.outcomes import Outcomes
from engine.sequence import Sequence

_DISCOUNT = 0.97  # of a sequence's evidence, per judged token
_LEVEL_DISCOUNT = 0.9  # of how the sequence does against the mean, per draft
_OFFER_DISCOUNT = 0.95

_STRENGTH = 6.0  # judged tokens that the expectation is worth
_LEVEL_STRENGTH = 4.0
_OFFER_STRENGTH = 2.0

#: A sequence's first drafts shape the mean most, so that no long request owns it.
_NOVELTY = 8.0

#: Change detection (cumulative sum of surprise at depth 1): what is forgiven each time, and
#: the sum at which the evidence against the change is dropped.
_FORGIVEN = 0.15
_ALARM = 2.5
_KEPT = 0.1
_KEPT_LEVEL = 0.3

#: Steps that are noted before they are worked in, at the latest.
_MOST_NOTED = 64


class AcceptanceModel:
    """Acceptance by (sequence, drafter, bucket, depth).

    Memory is bounded by the sequences that are alive at once: `release` frees a slot.
    Outcomes are noted, and worked in by `settle`, many at a time.

    Args:
        depth: longest draft.

    Attributes:
        outcomes: drafts learnt from.
        news: of these, since the last `settle`.
        surprises: of the news, those whose first token fared unlike its estimate.
        settled: how often estimates were renewed, and slots given to others.
    """

    def __init__(self, depth: int) -> None:
        self.depth = max(1, depth)
        self._depths = np.arange(self.depth)
        self.outcomes = self.news = self.surprises = self.settled = 0
        self._noted: list[Outcomes] = []
        self._slots: dict[Sequence, dict[str, int]] = {}
        self._free: list[int] = []
        self._leaving: list[int] = []  # released, but outcomes may still be noted
        # By slot, pairs of sums: (accepted, refused), (outcome minus mean, judged),
        # (offered, asked), (surprise upwards, downwards).
        self._counts = np.zeros((0, NUM_BUCKETS, 2, self.depth))
        self._level = np.zeros((0, 2))
        self._offer = np.zeros((0, 2, self.depth))
        self._surprise = np.zeros((0, 2))
        self._drafts = np.zeros(0)
        self._drafter = np.zeros(0, dtype=np.int64)
        self._means = Means(self.depth)
        # What `estimate` tells, by slot (and bucket), as of the last `settle`.
        self._acceptance = np.zeros((0, NUM_BUCKETS, self.depth))
        self._offers = np.zeros((0, self.depth))
        self._resize(8)

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return sum(map(len, self._slots.values()))

    def slot(self, sequence: Sequence, drafter: str) -> int:
        """The slot of a sequence, opened if need be."""
        own = self._slots.get(sequence)
        if own is None:
            own = self._slots[sequence] = {}
        slot = own.get(drafter)
        if slot is None:
            slot = own[drafter] = self._open(drafter)
        return slot

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._leaving.extend(self._slots.pop(sequence, {}).values())

    def note(self, outcomes: Outcomes) -> None:
        """Takes what became of a step's drafts."""
        self._noted.append(outcomes)
        drafts = sum(map(bool, outcomes.allowed))
        self.outcomes += drafts
        self.news += drafts
        self.surprises += outcomes.surprises
        if len(self._noted) >= _MOST_NOTED:
            self.settle()

    def estimate(self, slots: Ints | int, buckets: Ints | int) -> tuple[Floats, Floats]:
        """Per sequence and depth [R, depth], or [depth]: the probability that a token is accepted
        if all before it are, and the probability that the drafter offers that many tokens; as of
        the last `settle`."""
        return self._acceptance[slots, buckets], self._offers[slots]

    def describe(self) -> dict[str, list[dict[str, float]]]:
        """By drafter: acceptance at each depth, and how many judged tokens it rests on."""
        self.settle()
        table: dict[str, list[dict[str, float]]] = {}
        for index, name in enumerate(self._means.names):
            columns = zip(self._means.pooled[index], self._means.weight(index), strict=True)
            table[name] = [
                {"depth": depth, "acceptance": float(mean), "weight": float(weight)}
                for depth, (mean, weight) in enumerate(columns, 1)
            ]
        return table

    def typical(self, drafter: str) -> tuple[Floats, Floats]:
        """Acceptance and offer by depth of a sequence that nothing is known of yet."""
        self.settle()
        index = self._means.index(drafter)
        return self._means.pooled[index], np.minimum.accumulate(self._means.offer[index])

    # -- slots ---------------------------------------------------------------------------

    def _open(self, drafter: str) -> int:
        if not self._free and 2 * len(self._leaving) >= len(self._drafter):
            self.settle()
        if not self._free:
            self._resize(2 * len(self._drafter))
        slot = self._free.pop()
        for sums in (self._counts, self._level, self._offer, self._surprise, self._drafts):
            sums[slot] = 0.0
        self._drafter[slot] = self._means.index(drafter)
        self._work_out(np.array([slot]))
        return slot

    def _resize(self, size: int) -> None:
        """Makes room for `size` slots; those in use keep their numbers."""
        old = len(self._drafter)
        more = size - old
        self._counts, self._level = longer(self._counts, more), longer(self._level, more)
        self._offer, self._surprise = longer(self._offer, more), longer(self._surprise, more)
        self._drafts = longer(self._drafts, more)
        self._acceptance = longer(self._acceptance, more)
        self._offers = longer(self._offers, more)
        self._drafter = np.concatenate((self._drafter, np.zeros(more, dtype=np.int64)))
        self._free.extend(range(size - 1, old - 1, -1))

    # -- learning ------------------------------------------------------------------------

    def settle(self) -> None:
        """Works in what was noted, all drafts of a sequence, drafter and bucket together."""
        noted, self._noted = self._noted, []
        if noted:
            self._learn(noted)
            self._means.refresh()
        self._free.extend(self._leaving)
        self._leaving.clear()
        self.news = self.surprises = 0
        self.settled += 1
        if noted:
            in_use = [slot for own in self._slots.values() for slot in own.values()]
            self._work_out(np.array(in_use, dtype=np.int64))

    def _work_out(self, slots: Ints) -> None:
        """What `estimate` tells of some slots, for every bucket."""
        drafters, every = self._drafter[slots], slice(None)
        mean = self._means.acceptance[drafters]
        trust = self._means.trust(drafters)[:, None, None]
        self._acceptance[slots] = mean + trust * (self._own(slots, every) - mean)
        offer = self._offer[slots]
        offers = offer[:, 0] + _OFFER_STRENGTH * self._means.offer[drafters]
        offers /= offer[:, 1] + _OFFER_STRENGTH
        self._offers[slots] = np.minimum.accumulate(offers, axis=1)

    def _learn(self, noted: list[Outcomes]) -> None:
        rows = np.array([row for step in noted for row in step.rows()])
        if not len(rows):
            return
        places = (rows[:, 0] * NUM_BUCKETS + rows[:, 1]).astype(np.int64)
        order = places.argsort(kind="stable")
        places, (expected, allowed, drafted, accepted, refused) = places[order], rows[order, 2:].T
        starts = _starts(places)
        tests = np.empty((4, len(rows), self.depth))
        tests[0] = self._depths < accepted[:, None]
        tests[1] = (self._depths == accepted[:, None]) & (refused > 0)[:, None]
        tests[2] = self._depths < drafted[:, None]
        tests[3] = self._depths < allowed[:, None]
        sums = np.add.reduceat(tests, starts, axis=1).transpose(1, 0, 2)
        surprise = ((accepted > 0) - expected) * tests[:2, :, 0].any(axis=0)
        slots, buckets = np.divmod(places[starts], NUM_BUCKETS)
        drafts = np.diff(starts, append=len(rows))
        self._learn_means(slots, buckets, drafts, sums)
        self._learn_own(slots, buckets, sums)
        self._watch(slots, np.add.reduceat(surprise, starts), sums[:, :2, 0].sum(axis=1))

    def _own(self, slots: Ints, buckets: Ints | slice) -> Floats:
        """[R, depth]: acceptance as the sequences' own outcomes have it; [R, buckets, depth] for
        a slice of buckets."""
        counts, level = self._counts[slots, buckets], self._level[slots]
        shift = level[:, :1] / (level[:, 1:] + _LEVEL_STRENGTH)
        mean = self._means.acceptance[self._drafter[slots], buckets]
        shift = shift.reshape(-1, *[1] * (mean.ndim - 1))
        expected = (mean + shift).clip(0.01, 0.99)
        own: Floats = counts[..., 0, :] + _STRENGTH * expected
        own /= counts.sum(axis=-2) + _STRENGTH
        return own

    def _learn_means(self, slots: Ints, buckets: Ints, drafts: Ints, sums: Floats) -> None:
        """Adds to what holds of all sequences, and regresses outcomes at depth 1 on what was
        known of each sequence before.

        Args:
            slots, buckets: places, none twice.
            drafts: that each made.
            sums: [places, 4, depth] accepted, refused, offered and asked.
        """
        drafters, outcome = self._drafter[slots], sums[:, :2]
        mean = self._means.acceptance[drafters, buckets][:, 0]
        difference = self._own(slots, buckets)[:, 0] - mean
        judged = outcome[:, :, 0].sum(axis=1)
        products = (outcome[:, 0, 0] - mean * judged) * difference
        squares = judged * difference**2
        weights = _NOVELTY / (_NOVELTY + self._drafts[slots])
        np.add.at(self._drafts, slots, drafts)
        weighted = sums * weights[:, None, None]
        for drafter in set(drafters.tolist()):
            own = drafters == drafter
            self._means.learn_trust(drafter, float(products[own].sum()), float(squares[own].sum()))
            weight = float(weights[own] @ drafts[own])
            self._means.learn(drafter, weight, buckets[own], weighted[own])

    def _learn_own(self, slots: Ints, buckets: Ints, sums: Floats) -> None:
        outcome, judged = sums[:, :2], sums[:, :2].sum(axis=1)
        residual = outcome[:, 0] - self._means.acceptance[self._drafter[slots], buckets] * judged
        keep = np.power(_DISCOUNT, judged)[:, None]
        self._counts[slots, buckets] = self._counts[slots, buckets] * keep + outcome
        # The rest is by slot, all its buckets together.
        starts = _starts(slots)
        slots, offer = slots[starts], np.add.reduceat(sums[:, 2:], starts)
        # The first depth is judged whenever any is.
        keep = np.power(_LEVEL_DISCOUNT, np.add.reduceat(judged[:, :1], starts))
        level = np.stack((residual.sum(axis=1), judged.sum(axis=1)), axis=1)
        self._level[slots] = self._level[slots] * keep + np.add.reduceat(level, starts)
        keep = np.power(_OFFER_DISCOUNT, offer[:, 1:])
        self._offer[slots] = self._offer[slots] * keep + offer

    def _watch(self, slots: Ints, surprise: Floats, judged: Ints) -> None:
        """Drops old evidence of sequences whose outcomes contradict it in a row.

        Args:
            slots: ascending, some of them several times.
            surprise: accepted less expected, at depth 1, summed over steps.
            judged: how many steps that were.
        """
        starts = _starts(slots)
        slots = slots[starts]
        surprise, judged = np.add.reduceat(surprise, starts), np.add.reduceat(judged, starts)
        drift = np.stack((surprise, -surprise), axis=1) - (_FORGIVEN * judged)[:, None]
        sums = np.maximum(self._surprise[slots] + drift, 0.0)
        alarms = sums > _ALARM
        sums[alarms.any(axis=1)] = 0.0
        self._surprise[slots] = sums
        for side in (0, 1):
            # Surprised upwards, the refusals are forgotten; downwards, what was accepted.
            changed = slots[alarms[:, side]]
            self._counts[changed, :, 1 - side] *= _KEPT
            self._level[changed] *= _KEPT_LEVEL


def _starts(values: Ints) -> Ints:
    """Where each run of equal values begins."""
    return np.flatnonzero(np.diff(values, prepend=-1))
