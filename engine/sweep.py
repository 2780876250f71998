"""Which passes to time at start, so that few seconds tell what every pass costs.

The timing itself is a function that is given: see `engine.calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median_low

from engine.calibration import Calibration

#: measure(rows, sequences, context, logits) -> seconds of one pass of the target over `rows` query
#: tokens, spread over `sequences` sequences with `context` cached tokens each; the last `logits`
#: query tokens of each sequence are given logits.
Measure = Callable[[int, int, int, int], float]

_ALL = 1 << 30

_REPEATS, _REPEATS_OVERTIME = 3, 2
_SHORT_CONTEXT = 16

#: Query tokens that must be reached for a calibration to tell anything of prompts.
_ENOUGH_ROWS = 32

#: A segment of the curve that grows by more than this share is searched for a step.
_SUSPICIOUS_GROWTH = 0.15

#: Smallest tile whose step is looked for behind a power of two.
_TILE = 16


def calibrate(
    measure: Measure, *, most_rows: int, most_sequences: int, long_context: int, seconds: float
) -> Calibration:
    """Measures the target's pass, doubling the tokens, and looks for steps in between.

    Args:
        measure: each shape is measured three times and the median taken, so that a first call
            does not count.
        most_rows: most query tokens of a pass.
        most_sequences: most sequences of a pass.
        long_context: cached tokens per sequence for the context terms; as many as fit.
        seconds: once measuring took this long, what is left is extrapolated, but for what nothing
            can be said without. The shapes come in order of importance.
    """
    session = _Session(measure, seconds)
    points = {1: session.time(1)}
    prompt, rows, enough = dict(points), 1, min(_ENOUGH_ROWS, most_rows)

    def reach(rows: int) -> None:
        points[rows], prompt[rows] = session.time(rows), session.time(rows, logits=1)

    while rows < enough and not session.over:
        reach(rows := min(rows * 2, enough))
    whole = rows == enough
    if not whole:
        reach(enough)
    terms = _measure_terms(session, most_sequences, long_context)
    while rows < most_rows and not session.over:
        reach(rows := min(rows * 2, most_rows))
    for low, high in pairwise(sorted(points)):
        _find_step(session, points, low, high)
    return Calibration(_ascending(points), *terms, whole=whole, prompt=_ascending(prompt))


class _Session:
    """Medians of repeated measurements, and whether time is up."""

    def __init__(self, measure: Measure, seconds: float) -> None:
        self._measure = measure
        self._left = seconds

    @property
    def over(self) -> bool:
        return self._left <= 0

    def time(
        self, rows: int, sequences: int = 1, context: int = _SHORT_CONTEXT, logits: int = _ALL
    ) -> float:
        repeats = _REPEATS_OVERTIME if self.over else _REPEATS
        times = [self._measure(rows, sequences, context, logits) for _ in range(repeats)]
        self._left -= sum(times)
        return median_low(times)


def _measure_terms(
    session: _Session, most_sequences: int, long_context: int
) -> tuple[float, float, float]:
    """Seconds per sequence, per cached token, and per pair of query and cached token."""
    batch = min(8, most_sequences)
    extra = long_context - _SHORT_CONTEXT
    if extra < 1:
        return 0.0, 0.0, 0.0
    one = many = session.time(batch)
    if batch > 1:
        many = session.time(batch, batch)
    per_sequence = max(0.0, (many - one) / max(1, batch - 1))
    # One sequence reads its context once, however many query tokens look at it.
    one_long = max(0.0, session.time(batch, 1, long_context) - one)
    many_long = max(0.0, session.time(batch, batch, long_context) - many) if batch > 1 else one_long
    if batch == 1:
        return per_sequence, one_long / extra, 0.0
    per_token = max(0.0, (many_long - one_long) / ((batch - 1) * extra))
    per_pair = max(0.0, one_long / extra - per_token) / batch
    return per_sequence, per_token, per_pair


def _find_step(session: _Session, points: dict[int, float], low: int, high: int) -> None:
    """Halves a segment until what is left is straight or a step between neighbours: tile
    sizes and captured shapes cost in steps, and a straight line would smear them."""
    growth = points[high] - points[low]
    if high - low < 2 or growth < _SUSPICIOUS_GROWTH * points[low] or session.over:
        return
    # Tiles end at powers of two, and several of them in a row look straight from afar.
    if high - low >= _TILE and low + 1 not in points:
        points[low + 1] = session.time(low + 1)
        if points[low + 1] - points[low] > 0.3 * growth:
            _find_step(session, points, low + 1, high)
            return
    middle = (low + high) // 2
    points[middle] = session.time(middle)
    straight = points[low] + growth * (middle - low) / (high - low)
    if abs(points[middle] - straight) < 0.2 * growth:
        return
    _find_step(session, points, low, middle)
    _find_step(session, points, middle, high)


def _ascending(points: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Sorted, with the times made non-decreasing: more tokens cannot cost less, so a dip is
    noise and the later, lower time is believed."""
    curve: list[tuple[int, float]] = []
    floor = math.inf
    for rows in sorted(points, reverse=True):
        floor = min(floor, points[rows])
        curve.append((rows, floor))
    return tuple(reversed(curve))
