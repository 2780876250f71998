"""A machine whose passes have a known price."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Passes whose time grows with everything that a pass can have more of. In milliseconds; by
    default about what a model of 135 million parameters takes on two cores."""

    base: float = 6.0
    row: float = 0.3
    head: float = 0.1
    sequence: float = 0.05
    read: float = 0.0005
    pair: float = 0.0005

    def seconds(
        self, rows: int, sequences: int, context: int, attention: int, silent: int = 0
    ) -> float:
        """See `engine.pace.PassCost`."""
        grown = self.row * rows + self.head * (rows - silent) + self.sequence * sequences
        return 1e-3 * (self.base + grown + self.read * context + self.pair * attention)
