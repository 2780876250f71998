"""What a pass of a model costs on this machine, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: (query tokens, seconds), ascending in both; linear in between.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of a pass: curve(query tokens) + three terms in proportion to counts.

    Attributes:
        curve: where all query tokens are given logits, as drafts are.
        sequence_seconds: for each sequence in the pass.
        context_seconds: for each cached token that is read.
        attention_seconds: for each pair of a query token and a cached token.
        measured: False if this is an assumption whose scale is unknown.
        whole: False if time was over before all that matters was timed; better not kept.
        prompt: as `curve`, where only the last query token is given logits; empty = the same.
    """

    curve: Curve
    sequence_seconds: float
    context_seconds: float
    attention_seconds: float
    measured: bool = True
    whole: bool = True
    prompt: Curve = ()

    def __post_init__(self) -> None:
        for curve in (self.curve, self.prompt or self.curve):
            rows, times = [n for n, _ in curve], [t for _, t in curve]
            if not rows or rows != sorted(set(rows)) or rows[0] < 1 or times != sorted(times):
                raise ValueError(f"a curve is {curve}; it must ascend in tokens and in seconds")
            if times[0] <= 0 or not all(math.isfinite(t) and t >= 0 for t in (*times, *self.terms)):
                raise ValueError("a calibration holds finite times that are not negative")

    @property
    def terms(self) -> tuple[float, float, float]:
        """The three, in the order of their fields."""
        return self.sequence_seconds, self.context_seconds, self.attention_seconds

    def rows_seconds(self, rows: float) -> float:
        """The curve at any number of query tokens; beyond its end it goes on as it ended."""
        return _read(self.curve, rows)

    def prompt_seconds(self, rows: float) -> float:
        """The same of a prompt, whose last token alone is given logits."""
        return _read(self.prompt or self.curve, rows)


def _read(curve: Curve, rows: float) -> float:
    """A curve at any number of query tokens."""
    points = ((0, curve[0][1]), *curve)
    for (low, before), (high, after) in zip(points, curve, strict=False):
        if rows <= high:
            return before + (after - before) * (rows - low) / (high - low)
    return curve[-1][1] + _final_slope(curve) * (rows - curve[-1][0])


def _final_slope(curve: Curve) -> float:
    if len(curve) < 2:
        return 0.0
    # Over the last octave, so that a plateau at the very end is not taken for the trend.
    rows, seconds = curve[-1]
    low, before = next((p for p in reversed(curve[:-1]) if p[0] <= rows / 2), curve[0])
    return (seconds - before) / (rows - low)


#: Before anything is measured: a pass that doubles its time at 32 tokens. Its scale is
#: replaced by the first steps seen, its shape bit by bit.
ASSUMED = Calibration(((1, 0.01), (33, 0.02)), 1e-5, 2e-7, 1e-8, measured=False)
