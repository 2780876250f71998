"""The second line of defence: does speculation keep what the planner's models promise?

The models may be wrong in ways they cannot see. So for every range of batch sizes the guard
watches what speculative steps really took against the plain steps they replaced, and closes
the range when they are slower beyond doubt. After a pause that doubles each time it lets a few
steps through and looks again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

_FIRST_PAUSE = 64  # steps
_LONGEST_PAUSE = 16_384
_KEEP = 0.98  # forgetting per speculative step: about fifty count
_FEWEST = 8
_TOLERATED = 0.01  # loss as a share of a plain step that does not matter
_DOUBT = 2.5  # standard errors
_TRUSTED = 256  # good speculative steps after which the past is forgiven


@dataclass(slots=True)
class Record:
    """What is known of a range of batch sizes; losses in units of a plain step.

    Attributes:
        trips: how often it was closed; forgiven after many good steps.
        paused: steps left until it is open again.
    """

    trips: int = 0
    paused: int = 0
    steps: int = 0
    weight: float = 0.0
    loss: float = 0.0
    squares: float = 0.0

    def add(self, loss: float) -> None:
        self.steps += 1
        self.weight = self.weight * _KEEP + 1.0
        self.loss = self.loss * _KEEP + loss
        self.squares = self.squares * _KEEP + loss * loss

    @property
    def losing(self) -> bool:
        """Whether the mean loss is above what is tolerated, beyond doubt."""
        if self.steps < _FEWEST:
            return False
        mean = self.loss / self.weight
        variance = max(self.squares / self.weight - mean * mean, 0.0)
        return mean > _TOLERATED and mean > _DOUBT * math.sqrt(variance / self.weight)


class Guard:
    """Closes ranges of batch sizes where speculation loses.

    Attributes:
        records: by octave of batch sizes.
    """

    def __init__(self) -> None:
        self.records: defaultdict[int, Record] = defaultdict(Record)

    def closed(self, batch: int) -> bool:
        """Whether steps of this batch size must not speculate."""
        return self.records[batch.bit_length()].paused > 0

    def observe(self, batch: int, loss: float | None) -> None:
        """Takes one step in.

        Args:
            batch: sequences that emitted.
            loss: seconds lost against plain steps that emit as many tokens, over the seconds
                of one plain step; None if no draft was checked.
        """
        octave = batch.bit_length()
        record = self.records[octave]
        if loss is None:
            record.paused = max(0, record.paused - 1)
            return
        record.add(loss)
        if record.losing:
            pause = min(_FIRST_PAUSE << min(record.trips, 16), _LONGEST_PAUSE)
            self.records[octave] = Record(record.trips + 1, pause)
        elif record.steps >= _TRUSTED:
            record.trips = 0
