"""One HTTP connection: uvicorn's, with limits on clients that send slowly or never read.

uvicorn bounds how long a connection may stay idle between two requests, but waits for ever for
the first byte, for the rest of the headers, and for the rest of a body that nobody reads. Its
own refusals are plain text. Both are mended here.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import dataclass
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api.errors import ApiError
from server.metrics.registry import Metrics

#: After a refusal, what the client still sends is thrown away for so long: closing at once
#: would reset the connection, and the client might never see the answer.
_LINGER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client and all of them together may take.

    Args:
        connections: open at once; more are answered with 503 and closed.
        request_seconds: for the headers to arrive, and to finish a body nobody reads.
        unread_seconds: for a client to accept bytes that wait for it (where the kernel can).
        metrics: where refusals are counted.
    """

    connections: int
    request_seconds: float
    unread_seconds: float
    metrics: Metrics


def connection_class(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The protocol class to give to uvicorn."""

    class LimitedConnection(_Connection):
        _limits = limits

    return LimitedConnection


class _Connection(H11Protocol):
    _limits: ConnectionLimits
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_unread(transport, self._limits.unread_seconds)
        if len(self.connections) > self._limits.connections:
            self._refuse(
                "connections",
                ApiError(
                    503,
                    f"{self._limits.connections} connections are open, the server's limit.",
                    code="overloaded",
                    headers={"Retry-After": "1"},
                ),
            )
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        error = sys.exception()  # why h11 gave up on the client
        if self.cycle is not None and self.cycle.response_started and self._answering:
            self.transport.abort()  # no second answer into the middle of the first
            return
        too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        if too_large:
            refusal = ApiError(431, "The request's headers are too large.", code="header_too_large")
        else:
            refusal = ApiError(400, "This is not valid HTTP.", code="invalid_http")
        self._refuse("header_too_large" if too_large else "invalid", refusal)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Runs the timer while the client owes bytes that nothing else waits for."""
        if self._refused:
            return
        if self._answering or self.timeout_keep_alive_task or self.transport.is_closing():
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._limits.request_seconds, self.transport.close)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, reason: str, error: ApiError) -> None:
        """Answers without the application, and hangs up."""
        self._limits.metrics.rejected(reason)
        body = json.dumps(error.envelope()).encode()
        fields = {
            **error.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        phrase = HTTPStatus(error.status).phrase
        self.transport.write(f"HTTP/1.1 {error.status} {phrase}\r\n{head}\r\n".encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._answering:  # the application waits for a body that will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        self.connections.discard(self)
        self._stop_watching()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _bound_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Lets the kernel drop a client that accepts nothing, even after the answer was handed
    over, when no timer of the application's runs any more."""
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
