"""A request in flight, as the event loop sees it, and the stream of its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engine.types import Event, Request


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
