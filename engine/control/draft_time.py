"""What drafting costs, by drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.control.cells import CELL_GAIN, ESTABLISHED, STALE, cell_of
from engine.control.estimates import Level, NonNegativeLinear
from engine.control.means import Floats


class DraftTime:
    """Seconds one drafter takes to propose.

    seconds = (per call + per sequence + per round + per token + per token read) * ratio(sequences)

    Tokens read are those a drafter catches up with after a pause or in a new sequence.
    """

    def __init__(self) -> None:
        self._terms = NonNegativeLinear((2e-5, 1e-5, 5e-6, 1e-6, 1e-6))
        self._cells: dict[int, Level] = {}
        self._ratios = np.ones(1)
        self._stale = True

    @property
    def weights(self) -> list[float]:
        """Seconds per call, sequence, round, token and token read."""
        return self._terms.weights

    @property
    def read_seconds(self) -> float:
        """For each token it has to catch up with."""
        return self._terms.weights[4]

    def seconds(self, counts: Floats) -> Floats:
        """Elementwise over [3, n]: sequences that draft, rounds, tokens altogether."""
        sequences = counts[0].astype(np.int64)
        ratios = self._ratio_table(int(sequences.max()))[sequences]
        call, *others = self._terms.weights[:4]
        result: Floats = np.array(others) @ counts
        result += call * (sequences > 0)
        result *= ratios
        return result

    def seconds_of(self, lengths: Sequence[int]) -> float:
        """For draft lengths above 0, one per sequence."""
        features = _features(lengths)
        ratio = self._ratio_table(len(lengths))[len(lengths)]
        return float(self._terms.predict(features) * ratio)

    def update(self, lengths: Sequence[int], seconds: float, read: int = 0) -> None:
        """Learns from one call.

        Args:
            lengths: allowed draft lengths, all above 0.
            seconds: that it took.
            read: tokens that were caught up with in it.
        """
        features = (*_features(lengths)[:4], float(read))
        self._terms.update(features, seconds)
        cell = self._cells.setdefault(cell_of(len(lengths)), Level(1.0, CELL_GAIN))
        before = cell.value
        cell.add(max(seconds, 1e-9) / self._terms.predict(features))
        self._stale |= abs(cell.value / before - 1.0) > STALE or cell.count == ESTABLISHED

    def _ratio_table(self, most: int) -> Floats:
        if self._stale or most >= len(self._ratios):
            heard = sorted(i for i, cell in self._cells.items() if cell.count >= ESTABLISHED)
            size = max(most + 1, len(self._ratios))
            self._ratios = np.ones(size)
            if heard:
                cells = [cell_of(n) for n in range(size)]
                self._ratios = np.interp(cells, heard, [self._cells[i].value for i in heard])
            self._stale = False
        return self._ratios


def _features(lengths: Sequence[int]) -> tuple[float, float, float, float, float]:
    return 1.0, float(len(lengths)), float(max(lengths)), float(sum(lengths)), 0.0
