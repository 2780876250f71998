"""Whether passes that read prompts take what their price says, next to passes that do not.

The bound on a step that decodes is a ratio of two prices, and a ratio goes wrong where prices do: a
calibration beside busy neighbours may find that attention costs nothing, or several times too much,
and a scale that follows all passes moves both prices alike. So both kinds of passes are watched,
and what reading adds to a plain pass is taken for what it did add to the last ones.
"""

from __future__ import annotations

import math
from typing import Protocol

#: Share of what it is off by (a logarithm) that the level of plain passes follows, and the most
#: that one pass counts for: passes have a heavy upper tail.
_GAIN, _MOST = 0.2, 0.7

#: What a pass that reads counts after the next one, and how many times more than is expected of it
#: it counts for at most.
_KEEP, _MOST_TIMES = 0.8, 3.0

#: Bounds of what is believed, and a price of reading below which none can be told.
_LEAST_FACTOR, _MOST_FACTOR, _LITTLE = 0.25, 32.0, 1e-3

#: After so many steps that read prompts one does not: what a plain step takes is seen anew, or a
#: machine that slows down would look like prompts that do.
_READING_STEPS = 16

#: Rows, sequences, context, attention, and rows without logits.
Counts = tuple[int, int, int, int, int]

#: Prices are counted in this pass's, for then a scale of all prices does not matter.
_UNIT: Counts = (1, 1, 1, 1, 0)


class PassCost(Protocol):
    """What a pass of the target takes on this machine."""

    def seconds(
        self, rows: int, sequences: int, context: int, attention: int, silent: int = 0
    ) -> float | None:
        """Seconds of one pass; None while nothing is known.

        Args:
            rows: query tokens.
            sequences: sequences in the pass.
            context: cached tokens read, its own included, summed over sequences.
            attention: pairs of a query token and a cached token.
            silent: query tokens that are given no logits.
        """


class Pace:
    """What passes took, against their price.

    Args:
        cost: of passes; None = unknown.

    Attributes:
        factor: how many times what its price says reading prompts adds to a pass.
    """

    def __init__(self, cost: PassCost | None) -> None:
        self._cost = cost
        self._level: float | None = None  # of plain passes: logarithm of time over price
        self._added = self._priced = 0.0  # by reading, in plain passes
        self._reading = 0  # steps that read since the last plain one
        self.factor = 1.0

    def observe(self, plain: Counts, whole: Counts, seconds: float) -> None:
        """Learns from a pass that went on with answers.

        Args:
            plain: what it processed for them.
            whole: what it processed altogether; the same if it read no prompt.
            seconds: that it took.
        """
        if self._cost is None or seconds <= 0.0:
            return
        unit, price, own = (self._cost.seconds(*load) for load in (_UNIT, whole, plain))
        if not unit or not price or not own:
            return
        if whole == plain:
            found = math.log(seconds * unit / price)
            error = 0.0 if self._level is None else found - self._level
            self._level = found - error + _GAIN * min(max(error, -_MOST), _MOST)
            self._reading = 0
            return
        self._reading += 1
        if self._level is not None:
            added = seconds * unit / (math.exp(self._level) * own) - 1
            self._learn(max(added, 0.0), max(price / own - 1, 0.0) + _LITTLE)

    def _learn(self, added: float, priced: float) -> None:
        most = _MOST_TIMES * self.factor if self._priced else _MOST_FACTOR
        self._added = _KEEP * self._added + min(added, most * priced)
        self._priced = _KEEP * self._priced + priced
        self.factor = min(max(self._added / self._priced, _LEAST_FACTOR), _MOST_FACTOR)

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should read no prompt."""
        return self._reading >= _READING_STEPS
