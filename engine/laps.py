"""A step's stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Laps:
    """What each part of a step took, by name.

    A lap lasts from the end of the one before it, so that nothing of a step belongs to none.

    Args:
        clock: monotonic seconds.
        before: laps of the step before.

    Attributes:
        before: seconds of the laps of the step before, by name.
        between: seconds since that step's "commit"; 0 if it had none, or if there was nothing to
            do since.
    """

    def __init__(self, clock: Callable[[], float], before: Laps | None = None) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._rested = False
        self._started = self._now = clock()
        self.before = {} if before is None else before._seconds
        committed = None if before is None or before._rested else before._ends.get("commit")
        self.between = 0.0 if committed is None else self._started - committed

    def time(self, name: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Does the work; what it took is the lap of that name."""
        result = work(*args, **kwargs)
        began, self._now = self._now, self._clock()
        self._seconds[name], self._ends[name] = self._now - began, self._now
        return result

    def rest(self) -> None:
        """There is nothing to do from here on: the time until the next step is nobody's."""
        self._rested = True

    @property
    def total(self) -> float:
        """Seconds of all laps so far."""
        return self._now - self._started

    def __getitem__(self, name: str) -> float:
        """Seconds of one lap."""
        return self._seconds[name]

    def end(self, name: str) -> float:
        """When a lap ended, by the clock."""
        return self._ends[name]
