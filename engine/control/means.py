"""What holds of all sequences of a drafter: the ground that estimates of single ones stand on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Buckets a drafter may tell apart.
NUM_BUCKETS = 12

_DISCOUNT = 0.998  # per draft of full weight

#: Before anything is known: optimistic enough to try, soon overruled.
_ASSUMED_ACCEPTANCE = 0.6
_ASSUMED_OFFER = 0.9
_ASSUMED_WEIGHT = 4.0

#: The regression of outcomes on a sequence's difference from the mean: forgetting each time, and
#: what is assumed, as sums of products and of squares.
_TRUST_DISCOUNT = 0.99
_TRUST = (0.4, 0.5)


class Means:
    """Means over sequences, by drafter, and how far single ones stray from them.

    Args:
        depth: longest draft.

    Attributes:
        acceptance: [drafters, buckets, depth], that a token is accepted if all before it are;
            shrunk to `pooled`.
        pooled: [drafters, depth], the same over all buckets; shrunk to the mean over depths.
        offer: [drafters, depth], that so many tokens are offered if asked for.
    """

    def __init__(self, depth: int) -> None:
        self.names: list[str] = []
        self._outcomes = np.zeros((0, NUM_BUCKETS, 2, depth))  # accepted, refused
        self._offers = np.zeros((0, 2, depth))  # offered, asked
        self._trust = np.zeros((0, 2))  # products, squares
        self.refresh()

    def index(self, drafter: str) -> int:
        """The number of a drafter, new ones included."""
        if drafter not in self.names:
            self.names.append(drafter)
            self._outcomes = longer(self._outcomes, 1)
            self._offers = longer(self._offers, 1)
            self._trust = np.concatenate((self._trust, [_TRUST]))
            self.refresh()
        return self.names.index(drafter)

    def trust(self, drafters: Ints) -> Floats:
        """From 0 to 1: how much of a sequence's difference from the mean to believe. It is the
        slope of outcomes over that difference: 0 where all sequences are alike."""
        products, squares = self._trust[drafters].T
        slope: Floats = (products / squares).clip(0.0, 1.0)
        return slope

    def weight(self, drafter: int) -> Floats:
        """[depth]: judged tokens that the means rest on."""
        total: Floats = self._outcomes[drafter].sum(axis=(0, 1))
        return total

    def learn_trust(self, drafter: int, products: float, squares: float) -> None:
        """Adds to the regression."""
        trust = self._trust[drafter]
        trust += (1 - _TRUST_DISCOUNT) * (np.array(_TRUST) - trust)
        trust += np.array((products, squares))

    def learn(self, drafter: int, drafts: float, buckets: Ints, sums: Floats) -> None:
        """Adds weighted sums; `refresh` makes them count.

        Args:
            drafter: its number.
            drafts: the weight of all drafts.
            buckets: [N].
            sums: [N, 4, depth], accepted, refused, offered and asked.
        """
        keep = _DISCOUNT**drafts
        self._outcomes[drafter] *= keep
        np.add.at(self._outcomes[drafter], buckets, sums[:, :2])
        self._offers[drafter] *= keep
        self._offers[drafter] += sums[:, 2:].sum(axis=0)

    def refresh(self) -> None:
        """Works out the means."""
        pooled = self._outcomes.sum(axis=1)
        total = pooled.sum(axis=2)
        prior = _ASSUMED_WEIGHT * _ASSUMED_ACCEPTANCE
        overall = (total[:, :1] + prior) / (total.sum(axis=1, keepdims=True) + _ASSUMED_WEIGHT)
        # A depth that was never reached is taken to be like the others.
        known = pooled[:, 0] + _ASSUMED_WEIGHT * overall
        self.pooled: Floats = known / (pooled.sum(axis=1) + _ASSUMED_WEIGHT)
        shrunk = self._outcomes[:, :, 0] + _ASSUMED_WEIGHT * self.pooled[:, None]
        self.acceptance: Floats = shrunk / (self._outcomes.sum(axis=2) + _ASSUMED_WEIGHT)
        prior = _ASSUMED_WEIGHT * _ASSUMED_OFFER
        self.offer: Floats = (self._offers[:, 0] + prior) / (self._offers[:, 1] + _ASSUMED_WEIGHT)


def longer(array: Floats, more: int) -> Floats:
    """With `more` zeros at the end of the first dimension."""
    return np.concatenate((array, np.zeros((more, *array.shape[1:]))))
