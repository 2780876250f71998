"""Whether passes that read prompts take what their price says, next to passes that do not.

The bound on a step that decodes is a ratio of two prices, and a ratio goes wrong where prices do: a
calibration beside busy neighbours may find that attention costs nothing, or several times too much,
and a scale that follows all passes moves both prices alike. So both kinds of passes are watched,
and where one kind is further off than the other, the bound is moved by as much.
"""

from __future__ import annotations

import math
from typing import Protocol

#: Share of what it is off by that a level follows, and the most that one pass counts for: passes
#: have a heavy upper tail. Both are about logarithms.
_GAIN, _MOST = 0.2, 0.7

#: Bounds of what is believed.
_LEAST_CAUTION, _MOST_CAUTION = 0.5, 16.0

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
    """

    def __init__(self, cost: PassCost | None) -> None:
        self._cost = cost
        self._levels: dict[bool, float] = {}  # by whether prompts were read: a logarithm
        self._reading = 0  # such steps since the last plain one

    def observe(self, load: Counts, seconds: float, *, reads: bool) -> None:
        """Learns from a pass that went on with answers.

        Args:
            load: what it processed.
            seconds: that it took.
            reads: whether it read prompts besides.
        """
        unit = self._cost.seconds(*_UNIT) if self._cost else None
        price = self._cost.seconds(*load) if self._cost else None
        if not unit or not price or seconds <= 0.0:
            return
        found = math.log(seconds * unit / price)
        error = found - self._levels.get(reads, found)
        self._levels[reads] = found - error + _GAIN * min(max(error, -_MOST), _MOST)
        self._reading = self._reading + 1 if reads else 0

    @property
    def caution(self) -> float:
        """How many times longer than its price says, next to a plain pass, one that reads takes."""
        if len(self._levels) < 2:
            return 1.0
        caution = math.exp(self._levels[True] - self._levels[False])
        return min(max(caution, _LEAST_CAUTION), _MOST_CAUTION)

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should read no prompt."""
        return self._reading >= _READING_STEPS
