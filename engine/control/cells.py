"""Cells of neighbouring counts, in which step-wise costs are learnt without smearing."""

from __future__ import annotations

_EXACT = 16
_PER_OCTAVE = 8

#: A cell is trusted, and may correct the common terms, after this many samples.
ESTABLISHED = 8

#: Weight of a new sample in a cell: less than in the common terms, which take the first share
#: of every change, since most changes (another process, a clock that drops) concern all sizes.
CELL_GAIN = 0.02

#: Tables are made anew once their cells have moved by this much.
STALE = 0.01


def cell_of(count: int) -> int:
    """The cell of a count of tokens or sequences, from 1."""
    if count <= _EXACT:
        return max(count, 1) - 1
    octave = (count - 1).bit_length() - 5
    return _EXACT + _PER_OCTAVE * octave + ((count - 1 - (_EXACT << octave)) >> (octave + 1))


def isotonic(values: list[float], weights: list[float]) -> list[float]:
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
