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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.control.calibration import ASSUMED, Calibration
from engine.control.estimates import Level, NonNegativeLinear

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_EXACT = 16
_PER_OCTAVE = 8

#: A cell is trusted, and may correct the common terms, after this many samples.
_ESTABLISHED = 8

#: The table is made anew once the cells have moved by this much.
_STALE = 0.01

#: A cell may speak for its unvisited neighbours after this many samples.
_HEARD = 3


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


def cell_of(count: int) -> int:
    """The cell of a count of tokens or sequences, from 1."""
    if count <= _EXACT:
        return max(count, 1) - 1
    octave = (count - 1).bit_length() - 5
    return _EXACT + _PER_OCTAVE * octave + ((count - 1 - (_EXACT << octave)) >> (octave + 1))


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
        self._cells: dict[int, Level] = {}
        # Weights: the whole curve, then the three terms in proportion to counts.
        floor = calibration.curve[0][1]
        terms = (
            max(calibration.sequence_seconds, 1e-6 * floor),
            max(calibration.context_seconds, 1e-9 * floor),
            max(calibration.attention_seconds, 1e-9 * floor),
        )
        self._terms = NonNegativeLinear((1.0, *terms), known=calibration.measured, gain=0.05)
        self._table = self._curve.copy()
        self._stale = 0.0

    @property
    def samples(self) -> int:
        """Passes learned from."""
        return sum(cell.count for cell in self._cells.values())

    def table(self, load: Load, extra: int) -> Floats:
        """Seconds with 0, 1, ..., `extra` query tokens on top of `load`; never falling."""
        if self._stale > _STALE:
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
        return float(self.table(load, 0)[0])

    def update(self, load: Load, seconds: float) -> None:
        """Learns from one measured pass."""
        row = min(load.rows, len(self._curve) - 1)
        index = int(self._cell_of_row[row])
        cell = self._cells.get(index)
        if cell is None:
            # Costs nothing if it is never used again: there are about a hundred cells.
            cell = self._cells[index] = Level(self._ratio_near(index))
        rest = self._linear(load)
        if cell.count >= _ESTABLISHED or self._terms.count < 3:
            curve = float(self._curve[row]) * cell.value
            self._terms.update((curve, load.sequences, load.context, load.attention), seconds)
        scale = self._terms.weights[0] * float(self._curve[row])
        before = cell.value
        cell.add(max((seconds - rest) / scale, 0.05))
        self._stale += abs(cell.value / before - 1.0) + (cell.count == _HEARD)

    def _linear(self, load: Load) -> float:
        _, sequence, context, pair = self._terms.weights
        return sequence * load.sequences + context * load.context + pair * load.attention

    def _ratio_near(self, index: int) -> float:
        heard = [i for i, cell in self._cells.items() if cell.count >= _HEARD]
        return self._cells[min(heard, key=lambda i: abs(i - index))].value if heard else 1.0

    def _rebuild(self) -> None:
        heard = sorted(i for i, cell in self._cells.items() if cell.count >= _HEARD)
        self._stale = 0.0
        if not heard:
            return
        edges = self._curve[[self._last_row_of_cell[i] for i in heard]]
        values = (edges * [self._cells[i].value for i in heard]).tolist()
        weights = [float(min(self._cells[i].count, 32)) for i in heard]
        ratios = np.array(_isotonic(values, weights)) / edges
        filled = np.interp(np.arange(self._cell_of_row[-1] + 1), heard, ratios)
        # Cells are in order now; their seams need not be.
        self._table = np.maximum.accumulate(self._curve * filled[self._cell_of_row])


class DraftTime:
    """Seconds one drafter takes to propose.

    seconds = (per call + per sequence + per round + per token) * ratio(sequences)
    """

    def __init__(self) -> None:
        self._terms = NonNegativeLinear((2e-5, 1e-5, 5e-6, 1e-6))
        self._cells: dict[int, Level] = {}
        self._ratios = np.ones(1)
        self._stale = True

    @property
    def weights(self) -> list[float]:
        """Seconds per call, sequence, round and token."""
        return self._terms.weights

    def seconds(self, counts: Floats) -> Floats:
        """Elementwise over [3, n]: sequences that draft, rounds, tokens altogether."""
        ratios = self._ratio_table(int(counts[0].max()))[counts[0].astype(np.int64)]
        call, *others = self._terms.weights
        result: Floats = (np.array(others) @ counts + call * (counts[0] > 0)) * ratios
        return result

    def seconds_of(self, lengths: Sequence[int]) -> float:
        """For draft lengths above 0, one per sequence."""
        features = _features(lengths)
        ratio = self._ratio_table(len(lengths))[len(lengths)]
        return float(self._terms.predict(features) * ratio)

    def update(self, lengths: Sequence[int], seconds: float) -> None:
        """Learns from one call with these allowed draft lengths, all above 0."""
        features = _features(lengths)
        self._terms.update(features, seconds)
        cell = self._cells.setdefault(cell_of(len(lengths)), Level(1.0))
        before = cell.value
        cell.add(max(seconds, 1e-9) / self._terms.predict(features))
        self._stale |= abs(cell.value / before - 1.0) > _STALE or cell.count == _ESTABLISHED

    def _ratio_table(self, most: int) -> Floats:
        if self._stale or most >= len(self._ratios):
            heard = sorted(i for i, cell in self._cells.items() if cell.count >= _ESTABLISHED)
            size = max(most + 1, len(self._ratios))
            self._ratios = np.ones(size)
            if heard:
                cells = [cell_of(n) for n in range(size)]
                self._ratios = np.interp(cells, heard, [self._cells[i].value for i in heard])
            self._stale = False
        return self._ratios


def _features(lengths: Sequence[int]) -> tuple[float, float, float, float]:
    return 1.0, float(len(lengths)), float(max(lengths)), float(sum(lengths))


class CostModel:
    """All of a step's times."""

    def __init__(self, calibration: Calibration | None = None, most_rows: int = 4096) -> None:
        self.target = PassTime(calibration or ASSUMED, most_rows)
        self.drafts: dict[str, DraftTime] = {}
        self._overhead = NonNegativeLinear((2e-4, 5e-5))  # plain: per step, per sequence
        self._extra = NonNegativeLinear((1e-5, 1e-5))  # speculative: per draft token, per depth

    def draft(self, drafter: str) -> DraftTime:
        """The times of one drafter."""
        if drafter not in self.drafts:
            self.drafts[drafter] = DraftTime()
        return self.drafts[drafter]

    def overhead(self, batch: int) -> float:
        """Seconds of a plain step outside the pass."""
        return self._overhead.predict((1.0, float(batch)))

    def extra(self, tokens: Floats | Ints, depth: Floats) -> Floats:
        """Seconds outside pass and drafting that draft tokens add: longer sampling."""
        per_token, per_depth = self._extra.weights
        result: Floats = per_token * tokens + per_depth * depth
        return result

    def plain_seconds(self, load: Load) -> float:
        """A step without speculation."""
        return self.target.seconds(load) + self.overhead(load.batch)

    def observe_target(self, load: Load, seconds: float) -> None:
        """Learns from a pass, drafts included in `load`."""
        self.target.update(load, seconds)

    def observe_overhead(self, batch: int, tokens: int, depth: int, seconds: float) -> None:
        """Learns from the time of a step outside pass, drafting and planning."""
        if tokens == 0:
            self._overhead.update((1.0, float(batch)), seconds)
        elif self._overhead.count >= 3:
            surplus = seconds - self.overhead(batch)
            self._extra.update((float(tokens), float(depth)), surplus)

    def observe_drafts(self, lengths: Mapping[str, Sequence[int]], seconds: float) -> None:
        """Learns from a draft phase; of several drafters each is held to its predicted share.

        Args:
            lengths: by drafter, of the sequences that were to draft; all above 0.
            seconds: that the phase took.
        """
        if len(lengths) > 1:
            predicted = {name: self.draft(name).seconds_of(own) for name, own in lengths.items()}
            total = sum(predicted.values())
            for name, own in lengths.items():
                self.draft(name).update(own, seconds * predicted[name] / total)
            return
        for name, own in lengths.items():
            self.draft(name).update(own, seconds)

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
                name: [1e3 * w for w in draft.weights] for name, draft in self.drafts.items()
            },
            "passes_measured": self.target.samples,
        }


def _isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The closest non-decreasing sequence in weighted squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_weight, last_length = blocks.pop()
            mean = (mean * total + last_mean * last_weight) / (total + last_weight)
            total += last_weight
            length += last_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]
