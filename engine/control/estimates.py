"""Small estimators of noisy positive quantities that outliers cannot poison.

Step times have a heavy upper tail: a first call compiles, a garbage collector pauses, another
process takes the core. One such sample says nothing about the next step, so both estimators
here look at the median of the last few samples. A lasting change passes after three.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_WINDOW = 5

#: The first samples of a level move it by at most this factor, either way.
_FIRST_LIMIT = 4.0

#: Weights never fall below this share of what they were assumed to be, so that they can grow.
_FLOOR = 1e-3


def low_median(samples: Sequence[float] | deque[float]) -> float:
    """The median; of an even number the lower one, since times only err upwards."""
    return sorted(samples)[(len(samples) - 1) // 2]


class Level:
    """The level of a positive quantity: the median of the last five samples, then a mean with
    exponential forgetting.

    Args:
        value: what is assumed before there are samples; it counts as one.
        gain: weight of a new sample once there are enough.
    """

    __slots__ = ("_gain", "_recent", "count", "value")

    def __init__(self, value: float, gain: float = 0.2) -> None:
        self.value = value
        self.count = 0
        self._gain = gain
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def add(self, sample: float) -> None:
        """Takes one sample in."""
        self._recent.append(sample)
        self.count += 1
        middle = low_median(self._recent)
        if self.count < _WINDOW:
            middle = min(max(middle, self.value / _FIRST_LIMIT), self.value * _FIRST_LIMIT)
        self.value += max(self._gain, 1.0 / (self.count + 1)) * (middle - self.value)


class NonNegativeLinear:
    """seconds = sum of weights[i] * features[i], with weights that stay above 0.

    Learns multiplicatively: an error is taken back by the terms in proportion to their share,
    so that a term that was not involved does not move and none changes sign. Unlike least
    squares with forgetting it cannot run away while the features stand still.

    Args:
        weights: initial values, above 0.
        known: whether they were measured; else the first three samples set the scale.
        gain: share of a relative error that one sample corrects.
    """

    __slots__ = ("_floors", "_gain", "_ratios", "count", "weights")

    def __init__(self, weights: Sequence[float], known: bool = False, gain: float = 0.1) -> None:
        self.weights = list(weights)
        self.count = 3 if known else 0
        self._floors = [weight * _FLOOR for weight in weights]
        self._gain = gain
        self._ratios: deque[float] = deque(maxlen=_WINDOW)

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features."""
        return sum(map(float.__mul__, self.weights, map(float, features)))

    def update(self, features: Sequence[float], seconds: float) -> None:
        """Learns from one measurement; an isolated outlier has no effect."""
        predicted = self.predict(features)
        if predicted <= 0.0:
            return
        self.count += 1
        self._ratios.append(max(seconds, 0.0) / predicted)
        ratio = max(low_median(self._ratios), 1e-6)
        if self.count <= 3:
            self._move([ratio] * len(self.weights))
            self._ratios = deque((old / ratio for old in self._ratios), maxlen=_WINDOW)
            return
        shares = [w * f / predicted for w, f in zip(self.weights, features, strict=True)]
        error = math.log(min(max(ratio, 0.2), 5.0))
        step = self._gain * error / sum(share * share for share in shares)
        self._move([math.exp(min(max(step * share, -0.7), 0.7)) for share in shares])

    def _move(self, factors: Sequence[float]) -> None:
        moved = map(float.__mul__, self.weights, factors)
        self.weights = list(map(max, moved, self._floors))
