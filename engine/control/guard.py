"""The second line of defence: does speculation keep what the planner's models promise?

The models may be wrong in ways they cannot see. So for every range of batch sizes the guard
watches what speculative steps really took against the plain steps they replaced, and closes
the range when they are slower beyond doubt. After a pause that doubles each time it lets a few
steps through and looks again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_FIRST_PAUSE = 64  # steps
_LONGEST_PAUSE = 16_384
_KEEP = 0.98  # forgetting per speculative step: about fifty count
_FEWEST = 8
_TOLERATED = 0.01  # loss as a share of a plain step that does not matter
_DOUBT = 2.5  # standard errors
_TRUSTED = 256  # good speculative steps after which the past is forgiven


@dataclass(slots=True)
class _Range:
    """The record of one range of batch sizes; losses in units of a plain step."""

    weight: float = 0.0
    loss: float = 0.0
    squares: float = 0.0
    steps: int = 0
    trips: int = 0
    paused: int = 0  # steps left

    def add(self, loss: float) -> None:
        self.weight = self.weight * _KEEP + 1.0
        self.loss = self.loss * _KEEP + loss
        self.squares = self.squares * _KEEP + loss * loss
        self.steps += 1

    @property
    def losing(self) -> bool:
        """Whether the mean loss is above what is tolerated, beyond doubt."""
        if self.steps < _FEWEST:
            return False
        mean = self.loss / self.weight
        variance = max(self.squares / self.weight - mean * mean, 0.0)
        return mean > _TOLERATED and mean > _DOUBT * math.sqrt(variance / self.weight)

    def close(self) -> None:
        self.paused = min(_FIRST_PAUSE << min(self.trips, 16), _LONGEST_PAUSE)
        self.trips += 1
        self.weight = self.loss = self.squares = 0.0
        self.steps = 0


@dataclass(slots=True)
class Guard:
    """Closes ranges of batch sizes (octaves) where speculation loses."""

    _ranges: dict[int, _Range] = field(default_factory=dict)

    def closed(self, batch: int) -> bool:
        """Whether steps of this batch size must not speculate."""
        return self._range(batch).paused > 0

    def observe(self, batch: int, loss: float | None) -> None:
        """Takes one step in.

        Args:
            batch: sequences that emitted.
            loss: seconds lost against plain steps that emit as many tokens, over the seconds
                of one plain step; None if no draft was checked.
        """
        record = self._range(batch)
        if loss is None:
            record.paused = max(0, record.paused - 1)
            return
        record.add(loss)
        if record.losing:
            record.close()
        elif record.steps >= _TRUSTED:
            record.trips = 0

    def describe(self) -> list[dict[str, int]]:
        """Ranges that have ever been closed."""
        return [
            {"batch_from": 1 << octave, "trips": r.trips, "paused_steps": r.paused}
            for octave, r in sorted(self._ranges.items())
            if r.trips
        ]

    def _range(self, batch: int) -> _Range:
        return self._ranges.setdefault(max(batch, 1).bit_length() - 1, _Range())
