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
    """

    def __init__(self, depth: int) -> None:
        self.depth = max(1, depth)
        self._depths = np.arange(self.depth)
        self.outcomes = self.news = self.surprises = 0
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

    def estimate(self, slots: Ints, buckets: Ints) -> tuple[Floats, Floats]:
        """Per sequence and depth [R, depth]: the probability that a token is accepted if all
        before it are, and the probability that the drafter offers that many tokens; as of the
        last `settle`."""
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
        if not self._free:
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
        def gather(name: str) -> Ints:
            return np.array([value for step in noted for value in getattr(step, name)])

        allowed, accepted, refused = gather("allowed"), gather("accepted"), gather("refused")
        places, place = np.unique(
            gather("slots") * NUM_BUCKETS + gather("buckets"), return_inverse=True
        )
        sums = np.zeros((5, len(places), self.depth))
        depths, own = self._depths, np.flatnonzero(allowed)
        place, accepted, refused = place[own], accepted[own, None], refused[own, None]
        for number, marks in enumerate(
            (
                depths < accepted,
                (depths == accepted) & refused,
                depths < gather("drafted")[own, None],
                depths < allowed[own, None],
            )
        ):
            np.add.at(sums[number], place, marks)
        judged = ((accepted > 0) | refused)[:, 0]
        surprise = ((accepted[:, 0] > 0) - gather("expected")[own]) * judged
        np.add.at(sums[4, :, 0], place, surprise)
        drafts = np.bincount(place, minlength=len(places))
        slots, buckets = np.divmod(places, NUM_BUCKETS)
        # One bucket of each slot at a time: a slot has sums that all its buckets add to.
        turn = np.arange(len(places)) - np.searchsorted(slots, slots)
        for number in range(int(turn.max()) + 1):
            mine = turn == number
            outcome = sums[:2, mine].transpose(1, 0, 2)
            offer = sums[2:4, mine].transpose(1, 0, 2)
            self._learn_trust(slots[mine], buckets[mine], outcome)
            self._learn_means(places[mine], drafts[mine], (outcome, offer))
            self._learn_own(slots[mine], buckets[mine], outcome, offer)
            self._watch(slots[mine], sums[4, mine, 0], outcome[:, :, 0].sum(axis=1))

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

    def _learn_trust(self, slots: Ints, buckets: Ints, outcome: Floats) -> None:
        """Regresses outcomes at depth 1 on what was known of each sequence before."""
        drafters = self._drafter[slots]
        mean = self._means.acceptance[drafters, buckets][:, 0]
        difference = self._own(slots, buckets)[:, 0] - mean
        accepted, judged = outcome[:, 0, 0], outcome[:, :, 0].sum(axis=1)
        products = (accepted - mean * judged) * difference
        squares = judged * difference**2
        for drafter in set(drafters.tolist()):
            own = drafters == drafter
            self._means.learn_trust(drafter, float(products[own].sum()), float(squares[own].sum()))

    def _learn_own(self, slots: Ints, buckets: Ints, outcome: Floats, offer: Floats) -> None:
        judged = outcome.sum(axis=1)
        residual = outcome[:, 0] - self._means.acceptance[self._drafter[slots], buckets] * judged
        keep = np.power(_DISCOUNT, judged)[:, None]
        self._counts[slots, buckets] = self._counts[slots, buckets] * keep + outcome
        # The first depth is judged whenever any is.
        keep = np.power(_LEVEL_DISCOUNT, judged[:, :1])
        level = np.stack((residual.sum(axis=1), judged.sum(axis=1)), axis=1)
        self._level[slots] = self._level[slots] * keep + level
        keep = np.power(_OFFER_DISCOUNT, offer[:, 1:])
        self._offer[slots] = self._offer[slots] * keep + offer

    def _learn_means(self, places: Ints, drafts: Ints, sums: tuple[Floats, Floats]) -> None:
        """Adds to the means over all sequences.

        Args:
            places: slot * NUM_BUCKETS + bucket; no slot twice.
            drafts: that each made.
            sums: outcomes and offers of each.
        """
        slots, buckets = np.divmod(places, NUM_BUCKETS)
        weights = _NOVELTY / (_NOVELTY + self._drafts[slots])
        self._drafts[slots] += drafts
        outcome, offer = (part * weights[:, None, None] for part in sums)
        means = self._drafter[slots] * NUM_BUCKETS + buckets
        for mean in set(means.tolist()):
            own = means == mean
            weight = float(weights[own] @ drafts[own])
            at = divmod(mean, NUM_BUCKETS)
            self._means.learn(at, weight, outcome[own].sum(axis=0), offer[own].sum(axis=0))

    def _watch(self, slots: Ints, surprise: Floats, judged: Ints) -> None:
        """Drops old evidence of sequences whose outcomes contradict it in a row.

        Args:
            surprise: accepted less expected, at depth 1, summed over steps.
            judged: how many steps that were.
        """
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
