"""How likely the next draft token is to be accepted: by sequence, drafter and bucket.

Each has decayed counts of draft tokens that were judged and kept, shrunk to the pool: the same
counts over all sequences of a drafter. Tokens after the first refusal were never judged and count
neither way (the data are censored); a draft that is cut by the end of the sequence refuses nothing.
A *bucket* is what a drafter knows before it drafts, such as the length of the match it would
continue, else 0. Acceptance is that of a draft's first token; how it falls with depth is a factor
for each depth of a drafter, by which the tokens that were judged there are weighed. docs/theory.md
has the reasons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from engine.control.costs import Floats
from engine.draft.drafter import Verdict
from engine.sequence import Sequence

#: What evidence still counts after one more judged token: of a sequence, and of the pool.
_KEEP = 0.93
_POOL_KEEP = 0.995

#: Judged tokens that the pool is worth for a sequence, and all buckets for one of them.
_PRIOR = 4.0

#: Of a draft that was refused at once so many times in a row and more, the estimate falls by this
#: factor each time, whatever it rests on: the text has changed.
_PATIENCE = 12
_LOST_PATIENCE = 0.9

#: The regression of outcomes on a sequence's difference from the pool: forgetting each time, and
#: what is assumed, as sums of products and of squares.
_TRUST_GAIN = 0.01
_TRUST = (0.4, 0.5)

#: What evidence on a depth counts after one more token was judged there, and how many of them are
#: needed to believe it half: until then it is taken to be like the depth before.
_DEPTH_KEEP = 0.998
_DEPTH_PRIOR = 40.0

#: Before anything is known: optimistic enough to try, soon overruled.
_ASSUMED = (2.4, 4.0)


@dataclass(slots=True)
class _Counts:
    """Draft tokens, decayed; those judged are weighed by depth."""

    kept: float = 0.0
    judged: float = 0.0

    def add(self, kept: int, judged: float, keep: float) -> None:
        """Takes in a draft; what is known counts `keep` for each judged token."""
        decay = keep**judged
        self.kept = self.kept * decay + kept
        self.judged = self.judged * decay + judged


@dataclass(slots=True)
class Pool:
    """All sequences of one drafter: altogether, by bucket and by depth.

    Attributes:
        trust: from 0 to 1, how much of a sequence's difference from the pool to believe. It is the
            slope of outcomes over that difference; where all sequences are alike, their estimates
            differ by chance alone, and planning would prefer the lucky ones.
    """

    total: _Counts = field(default_factory=lambda: _Counts(*_ASSUMED))
    trust: float = _TRUST[0] / _TRUST[1]
    products: float = _TRUST[0]
    squares: float = _TRUST[1]
    buckets: dict[int, _Counts] = field(default_factory=dict)
    estimates: dict[int, float] = field(default_factory=dict)
    depths: list[_Counts] = field(default_factory=list)  # from the second token on

    def factors(self) -> list[float]:
        """Acceptance by depth, as multiples of that of the first token."""
        factors = [1.0]
        for counts in self.depths:
            factors.append(_next_factor(counts, factors[-1]))
        return factors

    def learn_depths(self, kept: int, judged: int, acceptance: float) -> float:
        """Takes in a draft that was expected to have this acceptance at every depth.

        Returns:
            its judged tokens, each weighed by the factor of its depth.
        """
        self.depths += [_Counts() for _ in range(len(self.depths) + 1, judged)]
        factor = weight = 1.0
        for depth, counts in enumerate(self.depths[: judged - 1], 1):
            factor = _next_factor(counts, factor)
            weight += factor
            counts.add(depth < kept, acceptance, _DEPTH_KEEP)
        return weight

    def regress(self, difference: float, kept: int, judged: float, expected: float) -> None:
        """Takes in an outcome that a sequence's difference should have foretold."""
        self.products += _TRUST_GAIN * (_TRUST[0] - self.products)
        self.squares += _TRUST_GAIN * (_TRUST[1] - self.squares)
        self.products += difference * (kept - expected * judged)
        self.squares += difference * difference * judged
        self.trust = min(max(self.products / self.squares, 0.0), 1.0)

    @property
    def overall(self) -> float:
        """Acceptance over all buckets."""
        return min(self.total.kept / self.total.judged, 1.0)

    def learn(self, bucket: int, kept: int, judged: float) -> None:
        """Takes in a draft."""
        self.total.add(kept, judged, _POOL_KEEP)
        own = self.buckets.setdefault(bucket, _Counts())
        own.add(kept, judged, _POOL_KEEP)
        self.estimates[bucket] = _shrunk(own, self.overall, _PRIOR)


@dataclass(slots=True)
class _Own:
    """One drafter's drafts for one sequence: by bucket, and refused at once in a row."""

    buckets: dict[int, _Counts] = field(default_factory=dict)
    refusals: int = 0


def _shrunk(counts: _Counts, expected: float, weight: float) -> float:
    """Acceptance by some counts and by what is expected, which is worth `weight` tokens."""
    return (counts.kept + weight * expected) / (counts.judged + weight)


def _next_factor(counts: _Counts, before: float) -> float:
    """A depth's factor, from that of the depth before. It falls by what chance hardly explains:
    factors can only fall, so what noise takes at each depth would add up to drafts that stay short.
    """
    chance = 0.35 / math.sqrt(counts.judged + _DEPTH_PRIOR)
    return min(before, _shrunk(counts, before, _DEPTH_PRIOR) + chance)


class AcceptanceModel:
    """Acceptance of the first draft token, and by depth.

    Memory is bounded by the sequences that are alive at once: `release` forgets.
    """

    def __init__(self) -> None:
        self.pools: defaultdict[str, Pool] = defaultdict(Pool)
        self._own: dict[tuple[Sequence, str], _Own] = {}

    @property
    def num_sequences(self) -> int:
        """Pairs of a sequence and a drafter that it remembers."""
        return len(self._own)

    def estimate(self, sequence: Sequence, drafter: str, bucket: int) -> float:
        """The probability that the first draft token is accepted."""
        pool = self.pools[drafter]
        expected = pool.estimates.get(bucket)
        if expected is None:
            expected = pool.overall
        own = self._own.get((sequence, drafter))
        if own is None:
            return expected
        counts = own.buckets.get(bucket)
        if counts is not None:
            expected += pool.trust * (_shrunk(counts, expected, _PRIOR) - expected)
        if own.refusals > _PATIENCE:
            expected *= _LOST_PATIENCE ** (own.refusals - _PATIENCE)
        return expected if expected < 1.0 else 1.0

    def by_depth(self, drafter: str, depth: int) -> Floats:
        """Acceptance at depths 1 to `depth`, each if all tokens before it are accepted, as
        multiples of that of the first token; never rising."""
        factors = self.pools[drafter].factors()[:depth]
        return np.array(factors + factors[-1:] * (depth - len(factors)))

    def learn(self, sequence: Sequence, drafter: str, bucket: int, verdict: Verdict) -> None:
        """Takes in what became of a draft."""
        kept = verdict.accepted
        # What follows the accepted tokens was refused, unless the sequence ended with them.
        refused = kept < verdict.drafted and len(verdict.emitted) > kept
        if not kept + refused:
            return
        pool = self.pools[drafter]
        own = self._own.setdefault((sequence, drafter), _Own())
        own.refusals = 0 if kept else own.refusals + 1
        judged = pool.learn_depths(kept, kept + refused, self.estimate(sequence, drafter, bucket))
        counts = own.buckets.setdefault(bucket, _Counts())
        expected = pool.estimates.get(bucket, pool.overall)
        pool.regress(_shrunk(counts, expected, _PRIOR) - expected, kept, judged, expected)
        pool.learn(bucket, kept, judged)
        counts.add(kept, judged, _KEEP)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        for drafter in sequence.drafters:
            self._own.pop((sequence, drafter), None)
