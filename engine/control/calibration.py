"""A short measurement of this machine at start: what a pass of the target costs.

The measuring itself is a function that the engine gives; this module decides what to measure
and keeps the result as plain numbers that can be cached between starts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

#: measure(rows, sequences, context) -> seconds of one pass of the target over `rows` query
#: tokens, spread over `sequences` sequences with `context` cached tokens each.
Measure = Callable[[int, int, int], float]

_VERSION = 1
_REPEATS = 3
_SHORT_CONTEXT = 16

#: A segment of the curve that grows by more than this share is searched for a step.
_SUSPICIOUS_GROWTH = 0.15

#: A curve that ends before, since the machine was too busy to get further, says nothing of prompts.
_ENOUGH_ROWS = 32

#: Smallest tile whose step is looked for behind a power of two.
_TILE = 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of a pass: curve(query tokens) + three terms in proportion to counts.

    Attributes:
        curve: (query tokens, seconds), ascending in both; linear in between.
        sequence_seconds: for each sequence in the pass.
        context_seconds: for each cached token that is read.
        attention_seconds: for each pair of a query token and a cached token.
        measured: False if this is an assumption whose scale is unknown.
    """

    curve: tuple[tuple[int, float], ...]
    sequence_seconds: float
    context_seconds: float
    attention_seconds: float
    measured: bool = True

    def __post_init__(self) -> None:
        rows = [n for n, _ in self.curve]
        times = [t for _, t in self.curve]
        terms = (self.sequence_seconds, self.context_seconds, self.attention_seconds)
        if not rows or rows != sorted(set(rows)) or rows[0] < 1 or times != sorted(times):
            raise ValueError(f"curve is {self.curve}; it must ascend in tokens and in seconds")
        if times[0] <= 0 or not all(math.isfinite(t) and t >= 0 for t in (*times, *terms)):
            raise ValueError("a calibration holds finite times that are not negative")

    def rows_seconds(self, rows: float) -> float:
        """The curve at any number of query tokens; beyond its end it goes on as it ended."""
        points = ((0, self.curve[0][1]), *self.curve)
        for (low, before), (high, after) in zip(points, self.curve, strict=False):
            if rows <= high:
                return before + (after - before) * (rows - low) / (high - low)
        last_rows, last = self.curve[-1]
        return last + self._final_slope() * (rows - last_rows)

    def seconds(self, rows: int, sequences: int, context: int, attention: int) -> float | None:
        """See `engine.budget.PassCost`."""
        if not self.measured or self.curve[-1][0] < _ENOUGH_ROWS:
            return None
        linear = self.sequence_seconds * sequences + self.context_seconds * context
        return self.rows_seconds(rows) + linear + self.attention_seconds * attention

    def to_json(self) -> str:
        """For the cache."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is damaged or of another version; calibrate again.
        """
        try:
            data = json.loads(text)
            if data.pop("version") != _VERSION:
                raise ValueError("the calibration was written by another version")
            curve = tuple((int(n), float(t)) for n, t in data.pop("curve"))
            measured = bool(data.pop("measured"))
            return cls(curve, **{k: float(v) for k, v in data.items()}, measured=measured)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration ({type(error).__name__})") from error

    def _final_slope(self) -> float:
        if len(self.curve) < 2:
            return 0.0
        # Over the last octave, so that a plateau at the very end is not taken for the trend.
        rows, seconds = self.curve[-1]
        low, before = next(
            (p for p in reversed(self.curve[:-1]) if p[0] <= rows / 2), self.curve[0]
        )
        return (seconds - before) / (rows - low)


#: Before anything is measured: a pass that doubles its time at 32 tokens. Its scale is
#: replaced by the first steps seen, its shape bit by bit.
ASSUMED = Calibration(((1, 0.01), (33, 0.02)), 1e-5, 2e-7, 1e-8, measured=False)


def cache_key(model: str, device: str, dtype: str, threads: int, code: str) -> str:
    """A file name for the calibration of one model, computed by one version of the code, on one
    machine setting."""
    text = json.dumps([_VERSION, model, device, dtype, threads, code])
    return f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


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
        seconds: once measuring took this long, what is left is extrapolated. The shapes come
            in order of importance.
    """
    session = _Session(measure, seconds)
    points = {1: session.time(1, 1, _SHORT_CONTEXT)}
    rows = 1
    while rows < most_rows and not session.over:
        rows = min(rows * 2, most_rows)
        points[rows] = session.time(rows, 1, _SHORT_CONTEXT)
    terms = _measure_terms(session, points[1], most_sequences, long_context)
    known = sorted(points)
    for low, high in pairwise(known):
        _find_step(session, points, low, high)
    return Calibration(_ascending(points), *terms)


class _Session:
    """Medians of repeated measurements, and whether time is up."""

    def __init__(self, measure: Measure, seconds: float) -> None:
        self._measure = measure
        self._left = seconds

    @property
    def over(self) -> bool:
        return self._left <= 0

    def time(self, rows: int, sequences: int, context: int) -> float:
        times = [self._measure(rows, sequences, context) for _ in range(_REPEATS)]
        self._left -= sum(times)
        return median(times)


def _measure_terms(
    session: _Session, single: float, most_sequences: int, long_context: int
) -> tuple[float, float, float]:
    """Seconds per sequence, per cached token, and per pair of query and cached token."""
    batch = min(8, most_sequences)
    extra = long_context - _SHORT_CONTEXT
    if session.over or extra < 1:
        return 0.0, 0.0, 0.0
    one = session.time(batch, 1, _SHORT_CONTEXT)
    many = session.time(batch, batch, _SHORT_CONTEXT) if batch > 1 else single
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
        points[low + 1] = session.time(low + 1, 1, _SHORT_CONTEXT)
        if points[low + 1] - points[low] > 0.3 * growth:
            _find_step(session, points, low + 1, high)
            return
    middle = (low + high) // 2
    points[middle] = session.time(middle, 1, _SHORT_CONTEXT)
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
