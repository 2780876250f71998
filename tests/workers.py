"""What lets several workers run one suite at the same time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Turns:
    """Turns of all workers' tests: many at once, or one that measures time, alone.

    Whoever wants to be alone shuts the gate and waits until the others' tests have ended; who
    comes meanwhile waits at the gate, so that nobody waits forever.

    Args:
        place: of two files that the workers of one run share.
    """

    def __init__(self, place: Path) -> None:
        self._gate, self._machine = place.with_suffix(".gate"), place.with_suffix(".machine")
        self._files = [path.open("w") for path in (self._gate, self._machine)]

    def close(self) -> None:
        """Lets go of the files and removes them; other workers keep what they have opened."""
        for file in self._files:
            file.close()
        for path in (self._gate, self._machine):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Holds a turn; waits for it as long as it takes."""
        gate, machine = self._files
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(gate, kind)
        try:
            fcntl.flock(machine, kind)
            if not alone:
                fcntl.flock(gate, fcntl.LOCK_UN)
            yield
        finally:
            for file in self._files:
                fcntl.flock(file, fcntl.LOCK_UN)


def printable(data: Any) -> Any:
    """The same lists and dictionaries; characters in strings that UTF-8 lacks are escaped."""
    match data:
        case str():
            return data.encode("utf-8", "backslashreplace").decode("utf-8")
        case dict():
            return {key: printable(value) for key, value in data.items()}
        case list():
            return [printable(value) for value in data]
        case tuple():
            return tuple(printable(value) for value in data)
        case _:
            return data
