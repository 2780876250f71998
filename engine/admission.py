"""Back-pressure: overload is refused at the door, before any work is done for it."""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.errors import Overloaded
from engine.types import Request


class Admission:
    """Counts what is in flight; lives on the event loop's side.

    Args:
        config: how much may run and wait.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._sequences = 0
        self._waiting_tokens = 0

    def admit(self, request: Request) -> None:
        """Counts a request in.

        Raises:
            Overloaded: naming the limit.
        """
        config = self._config
        waiting = self._sequences + request.sampling.n - config.max_sequences
        if waiting > config.max_waiting_sequences:
            raise Overloaded(
                f"{self._sequences} sequences run or wait and this request adds "
                f"{request.sampling.n}, above the limit of {config.max_sequences} running and "
                f"{config.max_waiting_sequences} waiting; try again later."
            )
        tokens = self._waiting_tokens + len(request.prompt)
        if self._waiting_tokens and tokens > config.max_waiting_tokens:
            raise Overloaded(
                f"{self._waiting_tokens} prompt tokens wait and this request adds "
                f"{len(request.prompt)}, above the limit of {config.max_waiting_tokens}; "
                "try again later."
            )
        self._sequences += request.sampling.n
        self._waiting_tokens = tokens

    def started(self, request: Request) -> None:
        """Its prompt no longer waits."""
        self._waiting_tokens -= len(request.prompt)

    def ended(self, request: Request) -> None:
        """It is over."""
        self._sequences -= request.sampling.n
