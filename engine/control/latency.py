"""What a step costs on this machine, kept current while it serves.

A step is the target's pass, draft rounds, and everything else (scheduling, sampling, pages).
The pass is predicted from its query tokens and from what it reads:

    seconds = curve(tokens) * ratio(tokens) + per sequence + per cached token + per pair

`curve` is the calibration. `ratio` is learned in cells of neighbouring token counts, single
ones up to 16 and eight to an octave beyond, so that what is learned on one side of a tile
edge or captured shape is not smeared to the other. Cells that were never visited take their
ratio from the nearest that were. The finished table never falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.control.calibration import ASSUMED, Calibration
from engine.control.cells import CELL_GAIN, ESTABLISHED, STALE, cell_of, isotonic
from engine.control.draft_time import DraftTime
from engine.control.estimates import NonNegativeLinear, Slope
from engine.control.means import Floats

#: A cell may speak for its unvisited neighbours after this many samples.
_HEARD = 3

#: A time further off than three usual errors, or than this in a cell that is little known, is
#: passed over; so many in a row are no accident.
_UNKNOWN = 0.9
_NO_ACCIDENT = 3

#: More than this many times the usual time outside passes is a pause.
_PAUSE = 2.0

#: Passes after which a cell counts half against its neighbours.
_FADING = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass of the target processes.

    Attributes:
        batch: sequences that emit.
        sequences: sequences in the pass.
        rows: query tokens.
        context: cached tokens read, summed over sequences.
        attention: pairs of a query token and a cached token.
    """

    batch: int
    sequences: int
    rows: int
    context: int
    attention: int


@dataclass(slots=True)
class _Cell:
    """What passes of about one size take, over the curve."""

    ratio: float
    count: int = 0
    strays: int = 0  # times in a row that were far off


class PassTime:
    """Seconds of the target's pass.

    Args:
        calibration: where learning starts from.
        most_rows: most query tokens of a pass.
    """

    def __init__(self, calibration: Calibration, most_rows: int) -> None:
        size = most_rows + 1
        self._curve = np.array([calibration.rows_seconds(n) for n in range(size)])
        self._cell_of_row = np.array([cell_of(n) for n in range(size)])
        self._last_row_of_cell = {int(cell): row for row, cell in enumerate(self._cell_of_row)}
        self._cells: dict[int, _Cell] = {}
        self._seen: dict[int, int] = {}  # by cell, the number of passes at its last sample
        self._passes = 0
        # Weights: the whole curve, then the three terms in proportion to counts.
        floor = calibration.curve[0][1]
        terms = (
            max(calibration.sequence_seconds, 1e-6 * floor),
            max(calibration.context_seconds, 1e-9 * floor),
            max(calibration.attention_seconds, 1e-9 * floor),
        )
        self._terms = NonNegativeLinear((1.0, *terms), known=calibration.measured)
        self._table = self._curve.copy()
        self._stale = 0.0

    @property
    def samples(self) -> int:
        """Passes learned from."""
        return self._passes

    def table(self, load: Load, extra: int) -> Floats:
        """Seconds with 0, 1, ..., `extra` query tokens on top of `load`; never falling."""
        if self._stale > STALE:
            self._rebuild()
        last = len(self._table) - 1
        rows = self._table[min(load.rows, last) : load.rows + extra + 1]
        if len(rows) <= extra:  # beyond the most that a pass may have
            rows = np.append(rows, np.full(extra + 1 - len(rows), rows[-1]))
        per_row = self._terms.weights[3] * load.context / max(1, load.sequences)
        scaled: Floats = self._terms.weights[0] * rows + self._linear(load)
        return scaled + per_row * np.arange(extra + 1)

    def seconds(self, load: Load) -> float:
        """Seconds of the pass itself."""
        if self._stale > STALE:
            self._rebuild()
        rows = min(load.rows, len(self._table) - 1)
        return self._terms.weights[0] * float(self._table[rows]) + self._linear(load)

    def update(self, load: Load, seconds: float) -> None:
        """Learns from one measured pass.

        The cell and the common terms follow the same error. If each followed an estimate of its
        own, say a median here and a mean there, they would pull at each other forever: one would
        grow and the other shrink, and cells that nobody visits would go astray.
        """
        row = min(load.rows, len(self._curve) - 1)
        index = int(self._cell_of_row[row])
        cell = self._cells.get(index)
        if cell is None:
            # Costs nothing if it is never used again: there are about a hundred cells.
            cell = self._cells[index] = _Cell(self._ratio_near(index))
        terms, curve = self._terms, float(self._curve[row]) * cell.ratio
        features = (curve, load.sequences, load.context, load.attention)
        self._passes += 1
        self._seen[index] = self._passes
        error, bound = terms.error(features, seconds), 3.0 * terms.usual
        share = terms.weights[0] * curve / terms.predict(features)
        scaled = terms.count >= 3  # before that the common terms take it all
        if scaled:
            if cell.count < ESTABLISHED:
                bound = max(bound, _UNKNOWN)
            cell.strays = cell.strays + 1 if abs(error) > bound else 0
            if 0 < cell.strays < _NO_ACCIDENT:
                return
            error = min(max(error, -bound), bound)
        if cell.count >= ESTABLISHED or not scaled:
            terms.learn(features, error)
        cell.count += 1
        moved = max(CELL_GAIN, 1.0 / (cell.count + 1)) * share * error if scaled else 0.0
        cell.ratio *= math.exp(moved)
        self._stale += abs(moved) + (cell.count == _HEARD)

    def _linear(self, load: Load) -> float:
        _, sequence, context, pair = self._terms.weights
        return sequence * load.sequences + context * load.context + pair * load.attention

    def _ratio_near(self, index: int) -> float:
        heard = [i for i, cell in self._cells.items() if cell.count >= _HEARD]
        return self._cells[min(heard, key=lambda i: abs(i - index))].ratio if heard else 1.0

    def _rebuild(self) -> None:
        heard = sorted(i for i, cell in self._cells.items() if cell.count >= _HEARD)
        self._stale = 0.0
        if not heard:
            return
        edges = self._curve[[self._last_row_of_cell[i] for i in heard]]
        values = (edges * [self._cells[i].ratio for i in heard]).tolist()
        ages = [self._passes - self._seen[i] for i in heard]
        weights = [
            min(self._cells[i].count, 32) * 0.5 ** min(age / _FADING, 20.0)
            for i, age in zip(heard, ages, strict=True)
        ]
        ratios = np.array(isotonic(values, weights)) / edges
        filled = np.interp(np.arange(self._cell_of_row[-1] + 1), heard, ratios)
        # Cells are in order now; their seams need not be.
        self._table = np.maximum.accumulate(self._curve * filled[self._cell_of_row])


class CostModel:
    """All of a step's times.

    Args:
        calibration: of the target; None = its scale is unknown.
        most_rows: most query tokens of a pass.
        draft_calibrations: of the models that drafters run, by drafter.
    """

    def __init__(
        self,
        calibration: Calibration | None = None,
        most_rows: int = 4096,
        draft_calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self.target = PassTime(calibration or ASSUMED, most_rows)
        self._draft_calibrations = draft_calibrations or {}
        self.drafts: dict[str, DraftTime] = {}
        # Of plain steps, by step and sequence. Half of it lies between steps, and varies much.
        self._overhead = NonNegativeLinear((2e-4, 5e-5), gain=0.05)
        self._extra = Slope(1e-5, 50.0)  # by draft token

    def draft(self, drafter: str) -> DraftTime:
        """The times of one drafter."""
        if drafter not in self.drafts:
            self.drafts[drafter] = DraftTime(self._draft_calibrations.get(drafter))
        return self.drafts[drafter]

    def overhead(self, batch: int) -> float:
        """Seconds of a plain step outside the pass."""
        return self._overhead.predict((1.0, float(batch)))

    @property
    def extra(self) -> float:
        """Seconds outside pass and drafting that a draft token adds: longer sampling, more to
        hand over."""
        return self._extra.value

    def plain_seconds(self, load: Load) -> float:
        """A step without speculation."""
        return self.target.seconds(load) + self.overhead(load.batch)

    def observe_target(self, load: Load, seconds: float) -> None:
        """Learns from a pass, drafts included in `load`."""
        self.target.update(load, seconds)

    def observe_overhead(self, batch: int, tokens: int, seconds: float) -> None:
        """Learns from the time of a step outside pass, drafting and planning."""
        if tokens == 0:
            self._overhead.update((1.0, float(batch)), seconds)
        elif self._overhead.count >= 3:
            usual = self.overhead(batch)
            self._extra.add(min(max(seconds - usual, -usual), _PAUSE * usual), float(tokens))

    def describe(self) -> dict[str, object]:
        """Milliseconds by number of query tokens and of the other terms, for people."""
        _, sequence, context, pair = self.target._terms.weights
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < len(self.target._curve)]
        table = self.target.table(Load(0, 0, 0, 0, 0), counts[-1])
        return {
            "pass_ms_by_tokens": {n: 1e3 * float(table[n]) for n in counts},
            "pass_ms_per_sequence": 1e3 * sequence,
            "pass_ms_per_1000_cached_tokens": 1e6 * context,
            "pass_ms_per_1000000_pairs": 1e9 * pair,
            "overhead_ms_by_batch": {n: 1e3 * self.overhead(n) for n in counts[:7]},
            "draft_ms_terms": {
                name: [1e3 * w for w in draft.terms] for name, draft in self.drafts.items()
            },
            "passes_measured": self.target.samples,
        }
