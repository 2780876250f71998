"""Small estimators of noisy positive quantities that outliers cannot poison.

Step times have a heavy upper tail: a first call compiles, a garbage collector pauses, another
process takes the core. One such sample says nothing about the next step, so both estimators
here bound what one can do: by the median of the last few, or by the size of usual errors. A
lasting change passes in a few samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_WINDOW = 5

#: The first samples of a level move it by at most this factor, either way.
_FIRST_LIMIT = 4.0

#: Errors below this size are all the same.
_SMALLEST_ERROR = 0.02

#: Weights never fall below this share of what they were assumed to be, so that they can grow.
_FLOOR = 1e-3

#: Share of an error that one of the first samples corrects, however little later ones do.
_FIRST_GAIN = 0.2

#: What a sample of a `Slope` still counts after the next one.
_SLOPE_KEEP = 0.98


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

    __slots__ = ("_assumed", "_gain", "_recent", "count", "value")

    def __init__(self, value: float, gain: float = 0.2) -> None:
        self.value = self._assumed = value
        self.count = 0
        self._gain = gain
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def add(self, sample: float) -> None:
        """Takes one sample in."""
        self._recent.append(sample)
        self.count += 1
        middle = low_median(self._recent)
        if self.count <= _WINDOW:
            bounded = min(max(middle, self._assumed / _FIRST_LIMIT), self._assumed * _FIRST_LIMIT)
            self.value = (self._assumed + self.count * bounded) / (self.count + 1)
        else:
            self.value += self._gain * (middle - self.value)


class NonNegativeLinear:
    """seconds = sum of weights[i] * features[i], with weights that stay above 0.

    Learns multiplicatively: an error is taken back by the terms in proportion to their share,
    so that a term that was not involved does not move and none changes sign. Unlike least
    squares with forgetting it cannot run away while the features stand still. An error counts
    for at most three times the usual error.

    Args:
        weights: initial values, above 0.
        known: whether they were measured; else the first three samples set the scale.
        gain: share of a relative error that one sample corrects; of the first ones up to 0.2.

    Attributes:
        count: samples learnt from.
        usual: size of an error, as a logarithm.
    """

    __slots__ = ("_floors", "_gain", "count", "usual", "weights")

    def __init__(self, weights: Sequence[float], known: bool = False, gain: float = 0.2) -> None:
        self.weights = list(weights)
        self.count = 3 if known else 0
        self._floors = [weight * _FLOOR for weight in weights]
        self._gain = gain
        self.usual = 0.3

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features."""
        return sum(map(float.__mul__, self.weights, map(float, features)))

    def update(self, features: Sequence[float], seconds: float) -> None:
        """Learns from one measurement."""
        if self.predict(features) > 0.0:
            error, bound = self.error(features, seconds), 3.0 * self.usual
            self.learn(features, error if self.count < 3 else min(max(error, -bound), bound))

    def error(self, features: Sequence[float], seconds: float) -> float:
        """Logarithm of measured over predicted, which must be above 0."""
        return math.log(max(seconds / self.predict(features), 1e-6))

    def learn(self, features: Sequence[float], error: float) -> None:
        """Takes a share of an error back: see `error`."""
        self.count += 1
        if self.count <= 3:
            # A first call takes too long, never too short.
            self._move([math.exp(error if self.count == 1 else min(error, 0.0))] * len(features))
            return
        self.usual += 0.25 * (max(abs(error), _SMALLEST_ERROR) - self.usual)
        predicted = self.predict(features)
        shares = [w * f / predicted for w, f in zip(self.weights, features, strict=True)]
        gain = max(self._gain, min(1.0 / self.count, _FIRST_GAIN))
        step = gain * error / sum(share * share for share in shares)
        self._move([math.exp(min(max(step * share, -0.7), 0.7)) for share in shares])

    def _move(self, factors: Sequence[float]) -> None:
        moved = map(float.__mul__, self.weights, factors)
        self.weights = list(map(max, moved, self._floors))


class Slope:
    """How much an amount grows by the unit, where single amounts are noise for the most part and
    may be negative: the ratio of two sums, which noise leaves alone on average.

    Args:
        assumed: before there are samples.
        units: of a sample that would count as much as that assumption.
    """

    def __init__(self, assumed: float, units: float) -> None:
        self._amount, self._units = assumed * units, units

    @property
    def value(self) -> float:
        """By the unit; never negative."""
        return max(self._amount / self._units, 0.0)

    def add(self, amount: float, units: float) -> None:
        """Takes a sample in."""
        self._amount = _SLOPE_KEEP * self._amount + amount
        self._units = _SLOPE_KEEP * self._units + units
