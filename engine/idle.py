"""Work for the engine's thread while nobody wants anything of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

from engine.stats import AuditStats
from engine.types import Event, Request

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class IdleTask(Protocol):
    """What the engine's thread does between requests, in short pieces.

    All methods are called on that thread. A task has a step of its own at heart and never
    touches what the engine serves with; whatever it borrows, such as pages, it gives back when a
    request arrives. If it raises, it is dropped for good, and nobody's request suffers.
    """

    @property
    def patience(self) -> float | None:
        """Seconds without work after which `step` should be called; None = there is nothing to
        do."""
        ...

    def watch(self, request: Request) -> None:
        """A caller's request has arrived: gives back at once what `step` has borrowed."""
        ...

    def observe(self, events: Seq[Event]) -> None:
        """Sees what the engine says to its callers."""
        ...

    def step(self) -> AuditStats | None:
        """Does a little, while the engine has no work.

        Returns:
            What was found, once there is something.
        """
        ...

    def close(self) -> None:
        """Gives back what `step` has borrowed; nothing is called after that."""
        ...


class IdleWork:
    """An idle task, or none, that cannot fail: one that raises is dropped, and the log says so.

    Args:
        task: what to do.
    """

    def __init__(self, task: IdleTask | None) -> None:
        self._task = task

    @property
    def patience(self) -> float | None:
        """See `IdleTask.patience`."""
        return self._ask(lambda task: task.patience)

    def watch(self, request: Request) -> None:
        """See `IdleTask.watch`."""
        self._ask(lambda task: task.watch(request))

    def observe(self, events: Seq[Event]) -> None:
        """See `IdleTask.observe`."""
        self._ask(lambda task: task.observe(events))

    def step(self) -> AuditStats | None:
        """See `IdleTask.step`."""
        return self._ask(lambda task: task.step())

    def _ask(self, question: Callable[[IdleTask], _Result]) -> _Result | None:
        task = self._task
        if task is None:
            return None
        try:
            return question(task)
        except Exception:
            logger.exception("idle work failed and is dropped; requests are unaffected")
            self._task = None
            task.close()
            return None
