"""What drafting costs, by drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.control.calibration import Calibration
from engine.control.cells import CELL_GAIN, ESTABLISHED, STALE, cell_of
from engine.control.estimates import Level, NonNegativeLinear
from engine.control.means import Floats

#: Seconds per call, sequence, round, token and token read of a drafter that is only a search.
_SEARCH = (2e-5, 1e-5, 5e-6, 1e-6, 1e-6)

#: The same of one that runs a model, its passes aside: a batch is put together and tokens are
#: drawn in each round.
_AROUND_PASSES = (5e-5, 5e-6, 1e-4, 1e-5)

#: Query tokens over which the price of reading a token is taken from a calibration.
_MANY_ROWS = 128


class DraftTime:
    """Seconds one drafter takes to propose.

    seconds = (passes + per call + per sequence + per round + per token + per token read)
              * ratio(sequences)

    A drafter that runs a model makes a pass in each round, over one token of each sequence that
    still drafts; a round of average size stands for all of them. Tokens read are those it catches
    up with after a pause or in a new sequence.

    Args:
        calibration: what a pass of the drafter's model costs; None if it has none.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._curve: tuple[Floats, Floats] | None = None
        if calibration is None:
            self._terms = NonNegativeLinear((*_SEARCH, 0.0))
        else:
            rows = np.arange(1.0, calibration.curve[-1][0] + 1.0)
            self._curve = rows, np.array([calibration.rows_seconds(n) for n in rows])
            self._terms = NonNegativeLinear(
                (*_AROUND_PASSES, _read_seconds(calibration), 1.0), known=True
            )
        self._cells: dict[int, Level] = {}
        self._ratios = np.ones(1)
        self._stale = True

    @property
    def terms(self) -> list[float]:
        """Seconds per call, sequence, round, token and token read, its model's passes aside."""
        return self._terms.weights[:5]

    @property
    def runs_model(self) -> bool:
        """Whether there are passes in it."""
        return self._curve is not None

    @property
    def read_seconds(self) -> float:
        """For each token it has to catch up with."""
        return self._terms.weights[4]

    @property
    def round_seconds(self) -> float:
        """Of one more round, over one sequence."""
        weights = self._terms.weights
        passes = float(self._curve[1][0]) if self._curve is not None else 0.0
        return weights[2] + weights[5] * passes

    def seconds(self, counts: Floats) -> Floats:
        """Elementwise over [3, ...]: sequences that draft, rounds, tokens altogether."""
        sequences = counts[0].astype(np.int64)
        ratios = self._ratio_table(int(sequences.max()))[sequences]
        call, sequence, per_round, token = self._terms.weights[:4]
        result: Floats = sequence * counts[0]
        result += per_round * counts[1]
        result += token * counts[2]
        result += call * (sequences > 0)
        if self._curve is not None:
            result += self._terms.weights[5] * self._passes(counts[1], counts[2])
        result *= ratios
        return result

    def search_seconds(self, most: int) -> tuple[tuple[float, float, float, float], list[float]]:
        """Seconds per call, sequence, round and token, and the factors to all of them by number
        of sequences up to `most`; of a drafter that runs no model."""
        call, sequence, per_round, token = self._terms.weights[:4]
        return (call, sequence, per_round, token), self._ratio_table(most).tolist()

    def seconds_of(self, lengths: Sequence[int]) -> float:
        """For draft lengths above 0, one per sequence."""
        ratio = self._ratio_table(len(lengths))[len(lengths)]
        return float(self._terms.predict(self._features(lengths)) * ratio)

    def update(self, lengths: Sequence[int], seconds: float, read: int = 0) -> None:
        """Learns from one call.

        Args:
            lengths: allowed draft lengths, all above 0.
            seconds: that it took.
            read: tokens that were caught up with in it.
        """
        features = self._features(lengths, read)
        self._terms.update(features, seconds)
        cell = self._cells.setdefault(cell_of(len(lengths)), Level(1.0, CELL_GAIN))
        before = cell.value
        cell.add(max(seconds, 1e-9) / self._terms.predict(features))
        self._stale |= abs(cell.value / before - 1.0) > STALE or cell.count == ESTABLISHED

    def _features(self, lengths: Sequence[int], read: int = 0) -> tuple[float, ...]:
        rounds, tokens = float(max(lengths)), float(sum(lengths))
        passes = 0.0
        if self._curve is not None:
            passes = float(self._passes(np.array([rounds]), np.array([tokens]))[0])
        return 1.0, float(len(lengths)), rounds, tokens, float(read), passes

    def _passes(self, rounds: Floats, tokens: Floats) -> Floats:
        """Calibrated seconds of that many rounds."""
        assert self._curve is not None
        result: Floats = rounds * np.interp(tokens / np.maximum(rounds, 1.0), *self._curve)
        return result

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


def _read_seconds(calibration: Calibration) -> float:
    """Of one token among many that are read in one pass."""
    grown = calibration.rows_seconds(_MANY_ROWS) - calibration.rows_seconds(1)
    return max(grown / (_MANY_ROWS - 1), 1e-6)
