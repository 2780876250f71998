"""What a pass of a model costs on this machine, as plain numbers that are kept between starts."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

_VERSION = 1


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
