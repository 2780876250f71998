"""Server-sent events: frames, and a response that always lets go of what it streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = "data: [DONE]\n\n"
PING = b": ping\n\n"

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def frame(payload: Mapping[str, Any]) -> str:
    """One event on one line.

    Everything beyond ASCII is escaped: many clients split lines as Python does, at U+2028 too.
    """
    return f"data: {_encode(payload)}\n\n"


def named_frame(payload: Mapping[str, Any]) -> str:
    """The same, with the payload's `type` as the name of the event."""
    return f"event: {payload['type']}\n{frame(payload)}"


class EventStream(StreamingResponse):
    """Streams frames; whatever ends it, the generator is closed and `on_close` is called.

    Args:
        frames: the events, in order.
        on_close: called exactly once at the end, even if `frames` never started.
        on_disconnect: called before it if the client left early.
        ping_seconds: longest silence; a comment is sent before it, so that proxies keep the
            line; 0 = never.
        send_timeout_seconds: a client that accepts nothing for so long is cut off; 0 = never.
        headers: extra response headers.
    """

    def __init__(
        self,
        frames: AsyncGenerator[str, None],
        on_close: Callable[[], None],
        *,
        on_disconnect: Callable[[], None],
        ping_seconds: float,
        send_timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        quiet = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(
            frames,
            media_type="text/event-stream; charset=utf-8",
            headers={**quiet, **(headers or {})},
        )
        self._frames = frames
        self._on_close = on_close
        self._on_disconnect = on_disconnect
        self._ping_seconds = ping_seconds
        self._send_timeout_seconds = send_timeout_seconds
        self._open = False  # between the first and the last message
        self._complete = False
        self._sending = False
        self._since = 0.0  # when the last message was handed over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted_send(message: Message) -> None:
            self._complete = not message.get("more_body", True)
            self._open = not self._complete
            self._since, self._sending = time.monotonic(), True
            await send(message)
            self._sending = False

        with anyio.CancelScope() as limit:
            watcher = asyncio.create_task(self._watch(send, limit))
            try:
                async with contextlib.aclosing(self._frames):
                    await super().__call__(scope, receive, noted_send)
            finally:
                watcher.cancel()
                if not self._complete:
                    self._on_disconnect()
                self._on_close()

    async def _watch(self, send: Send, limit: anyio.CancelScope) -> None:
        """Sends comments into silence, and ends the response of a client that takes nothing.

        One slow clock beside the stream, so that a message costs no timer of its own.
        """
        periods = [p for p in (self._ping_seconds, self._send_timeout_seconds) if p > 0]
        while periods:
            await asyncio.sleep(min(periods) / 2)
            silence = time.monotonic() - self._since
            if self._sending:
                if 0 < self._send_timeout_seconds < silence:
                    limit.cancel()
            elif self._open and 0 < self._ping_seconds <= 2 * silence:
                try:
                    async with asyncio.timeout(self._send_timeout_seconds or None):
                        await send({"type": "http.response.body", "body": PING, "more_body": True})
                    self._since = time.monotonic()
                except OSError:  # gone, or (TimeoutError) as good as gone
                    limit.cancel()
