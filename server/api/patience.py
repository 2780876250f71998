"""Waiting for the engine, but neither for ever nor against a shutdown of the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.errors import EngineError
from engine.types import Event
from server.api.errors import ApiError


class Patience:
    """How long one generation waits for its next event.

    Args:
        queue_seconds: until every prompt has its first token; 0 = without end.
        generation_seconds: from then until the last token; 0 = without end.
    """

    def __init__(self, queue_seconds: float, generation_seconds: float) -> None:
        self._queue_seconds = queue_seconds
        self._generation_seconds = generation_seconds
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + queue_seconds if queue_seconds else None
        self._late = self._too_long_in_queue
        self._error: EngineError | None = None
        self._wait: asyncio.Timeout | None = None

    def started(self) -> None:
        """Every prompt has its first token: from here on the other limit counts."""
        seconds = self._generation_seconds
        self._until = self._loop.time() + seconds if seconds else None
        self._late = self._too_long_in_all

    def interrupt(self, error: EngineError) -> None:
        """Makes the wait, or the next one, fail with `error`."""
        self._error = error
        if self._wait is not None:
            self._wait.reschedule(self._loop.time())

    async def next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None after the last.

        Raises:
            ApiError: a limit has passed.
            EngineError: what `interrupt` was given.
        """
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout_at(self._until) as self._wait:
                return await anext(events, None)
        except TimeoutError:
            raise self._error or self._late() from None
        finally:
            self._wait = None

    def _too_long_in_queue(self) -> ApiError:
        return ApiError(
            503,
            f"The request had no token after {self._queue_seconds:g} s, the server's limit for "
            "waiting; try again later.",
            code="queue_timeout",
            headers={"Retry-After": "5"},
        )

    def _too_long_in_all(self) -> ApiError:
        return ApiError(
            504,
            f"The answer took longer than {self._generation_seconds:g} s, the server's limit; "
            "lower max_tokens.",
            code="generation_timeout",
            headers={"x-should-retry": "false"},
        )
