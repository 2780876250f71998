"""One step's part in the measured speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Basis(Enum):
    """What the baseline of a speed-up rests on."""

    UNKNOWN = "unknown"  # no plain steps seen yet: no number is given
    MODELLED = "modelled"  # plain steps of other batch sizes, or of long ago
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a step won; the sums of the first two times are monotonic counters.

    Attributes:
        equal_seconds: that plain decoding would have taken for the step's tokens.
        seconds: that the step took, everything counted.
        basis: of `equal_seconds`; all times are 0 where it is UNKNOWN.
        plain_seconds: of one plain step of the same sequences.
    """

    equal_seconds: float = 0.0
    seconds: float = 0.0
    basis: Basis = Basis.UNKNOWN
    plain_seconds: float = 0.0

    @property
    def loss(self) -> float:
        """Seconds lost against plain decoding, in plain steps."""
        return (self.seconds - self.equal_seconds) / self.plain_seconds
