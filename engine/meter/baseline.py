"""What plain decode steps cost, from plain decode steps alone.

The cost model supplies the shape over batch, context and prefill. How far reality is
off that shape is measured at each batch size on steps without drafts, natural ones and a small
random share, and forgotten exponentially.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean, median_low

from engine.control.costs import CostModel
from engine.load import Load, cell_of
from engine.meter.gain import Basis

#: Plain steps of one batch size after which its baseline counts as measured.
ENOUGH = 8

#: Plain steps of any size before which nothing is said at all.
_FEWEST = 4

#: Seconds of decoding after which a baseline that was not measured again is stale.
_STALE_SECONDS = 120.0

#: Of so many samples at first the median counts, with that of other batch sizes: any one may be
#: a pause, or a first call.
_FIRST = 5

_GAIN = 0.05
_OUTLIER = 4.0  # a sample beyond this multiple of the baseline counts as this multiple

_MODEL_ERROR = 0.1  # of a baseline that was never measured at its batch size


@dataclass(slots=True)
class _Cell:
    """Plain steps of one batch size: mean of observed over modelled seconds."""

    ratio: float = 1.0
    scatter: float = 0.0  # mean square of the samples' deviation
    count: int = 0
    last: float = 0.0  # on the clock of decoding seconds
    first: list[float] = field(default_factory=list)

    def add(self, ratio: float) -> None:
        """Takes one sample in."""
        if self.count >= _FIRST:
            ratio = min(max(ratio, self.ratio / _OUTLIER), self.ratio * _OUTLIER)
            deviation = ratio - self.ratio
            self.ratio += max(_GAIN, 1.0 / (self.count + 1)) * deviation
            self.scatter += max(_GAIN, 1.0 / self.count) * (deviation**2 - self.scatter)
        else:
            self.first.append(ratio)
            self.ratio = median_low(self.first)
            most = self.ratio * _OUTLIER
            self.scatter = mean((min(r, most) - self.ratio) ** 2 for r in self.first)
        self.count += 1


class Baseline:
    """Seconds of plain decode steps.

    Args:
        costs: supplies the shape; it may learn on.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._cells: dict[int, _Cell] = {}
        self._elapsed = 0.0
        self.samples = 0

    @property
    def known(self) -> bool:
        """Whether there were enough plain steps to say anything."""
        return self.samples >= _FEWEST

    def observe(self, load: Load, seconds: float) -> None:
        """Learns from a plain step without prefill."""
        cell = self._cells.get(cell_of(load.batch))
        if cell is None:
            typical = self._typical_ratio()
            known = [typical] if self._cells else []
            cell = self._cells[cell_of(load.batch)] = _Cell(typical, first=known)
        cell.add(seconds / self._costs.plain_seconds(load))
        cell.last = self._elapsed
        self.samples += 1

    def pass_time(self, seconds: float) -> None:
        """Lets a step pass, in which baselines grow stale."""
        self._elapsed += seconds

    def seconds(self, load: Load) -> float:
        """Of a plain step."""
        cell = self._cells.get(cell_of(load.batch))
        ratio = cell.ratio if cell else self._typical_ratio()
        return ratio * self._costs.plain_seconds(load)

    def basis(self, batch: int) -> Basis:
        """What `seconds` rests on at this batch size."""
        cell = self._cells.get(cell_of(batch))
        if not self.known:
            return Basis.UNKNOWN
        fresh = cell is not None and self._elapsed - cell.last <= _STALE_SECONDS
        enough = cell is not None and cell.count >= ENOUGH
        return Basis.MEASURED if fresh and enough else Basis.MODELLED

    def relative_error(self, batch: int) -> float:
        """Standard error of the baseline at this batch size, as a share of it."""
        cell = self._cells.get(cell_of(batch))
        if cell is None or cell.count < 2 or cell.ratio <= 0:
            return _MODEL_ERROR
        remembered = min(cell.count, 2.0 / _GAIN)
        return math.sqrt(cell.scatter / remembered) / cell.ratio

    def scatter(self, batch: int) -> float:
        """Standard deviation of single plain steps at this batch size, as a share."""
        cell = self._cells.get(cell_of(batch))
        if cell is None or cell.count < 2 or cell.ratio <= 0:
            return _MODEL_ERROR
        return math.sqrt(cell.scatter) / cell.ratio

    def _typical_ratio(self) -> float:
        if not self._cells:
            return 1.0
        return max(self._cells.values(), key=lambda cell: cell.last).ratio
