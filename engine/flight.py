"""What passes between the event loop and the engine's thread: messages to it, and a request in
flight with the stream of its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from engine.types import Event, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Add:
    """Queues a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, or one choice of it."""

    request_id: str
    choice: int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Look:
    """Wants to know what the planner knows."""

    answer: asyncio.Future[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread at the next step; what still runs fails."""


Message = Add | Abort | Look | Stop


@dataclass(slots=True)
class Flight:
    """A request in flight, as the event loop sees it."""

    request: Request
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    choices_left: int = 1
    started: bool = False


class EventStream(AsyncIterator[Event]):
    """The events of one request; ends after the last `Finished`, or after `Failed`."""

    def __init__(self, flight: Flight, abort: Callable[[str], None]) -> None:
        self._flight = flight
        self._abort = abort

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        event = await self._flight.events.get()
        if event is None:
            self._flight.events.put_nowait(None)  # stays ended, however often it is asked
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Aborts what still runs; harmless when nothing does."""
        self._abort(self._flight.request.request_id)


def settle(future: asyncio.Future[Any], result: object) -> None:
    """Answers who waits, with a result or an error."""
    if future.done():  # whoever waited has given up
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
