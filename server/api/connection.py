"""One HTTP connection: uvicorn's, with limits on clients that send slowly or never read.

uvicorn bounds how long a connection may stay idle between two requests, but waits for ever for
the first byte, for the rest of the headers, and for the rest of a body that nobody reads. Its
own refusals are plain text. Both are mended here.

When all places are taken, a newcomer gets the place of the connection that has owed a request
for the longest time, else of the one that has been idle for the longest. If all are being
answered, a few spare places are left, in which only the probes of an orchestrator are answered:
a crowd must not make a healthy server look like a dead one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api.access import OPEN_PATHS
from server.api.errors import ApiError
from server.api.target import resolve_target
from server.metrics.registry import Metrics

#: After a refusal, what the client still sends is thrown away for so long: closing at once
#: would reset the connection, and the client might never see the answer.
_LINGER_SECONDS = 2.0

#: Connections beyond the limit that wait for their request, and as many that linger.
SPARE_PLACES = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client and all of them together may take.

    Args:
        connections: open at once; beyond it, only the open paths are answered, and
            everything else with 503.
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
        _places = _Places()

    return LimitedConnection


_Group = MutableMapping["_Connection", None]  # those that came first are first


@dataclass(frozen=True, slots=True)
class _Places:
    """Connections that are not being answered, by what they do instead.

    Args:
        owing: their request, or the rest of it, is still to come.
        idle: they have been answered, and may ask again.
        spare: beyond the limit; waiting for their request or being answered.
        lingering: refused; what they still send is thrown away.
    """

    owing: _Group = field(default_factory=dict)
    idle: _Group = field(default_factory=dict)
    spare: _Group = field(default_factory=dict)
    lingering: _Group = field(default_factory=dict)

    def leave(self, connection: _Connection) -> None:
        for group in (self.owing, self.idle, self.spare, self.lingering):
            group.pop(connection, None)


class _Connection(H11Protocol):
    _limits: ConnectionLimits
    _places: _Places
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_unread(transport, self._limits.unread_seconds)
        if len(self.connections) - len(self._places.spare) > self._limits.connections:
            self._find_place()
        self._watch()

    def _find_place(self) -> None:
        """Takes the place of a connection that asks for nothing, or a spare one."""
        places = self._places
        for group in (places.owing, places.idle):
            if group:
                next(iter(group))._give_way()
                return
        if len(places.spare) >= SPARE_PLACES:
            waiting = next((other for other in places.spare if not other._answering), self)
            waiting._give_way()
        if not self._refused:
            places.spare[self] = None
            self.app = self._answer_probes

    async def _answer_probes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection in a spare place."""
        resolve_target(scope)
        if scope["path"] not in OPEN_PATHS:
            self._refuse("connections", self._full())
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self.config.loaded_app(scope, receive, send_last)

    def _full(self) -> ApiError:
        return ApiError(
            503,
            f"{self._limits.connections} connections are open, the server's limit.",
            code="overloaded",
            headers={"Retry-After": "1"},
        )

    def _give_way(self) -> None:
        """Hangs up; a client whose request has not arrived yet is told why."""
        if self.conn.our_state is h11.IDLE and self not in self._places.idle:
            self._refuse("connections", self._full())
        else:
            self._limits.metrics.rejected("connections")
            self._depart()
            self.transport.close()

    def _depart(self) -> None:
        """Is no longer counted, though the socket may be open for a while."""
        self._refused = True
        self.connections.discard(self)
        self._places.leave(self)
        self._stop_watching()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
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
        places, closing = self._places, self.transport.is_closing()
        idle = self.timeout_keep_alive_task is not None
        owing = not (self._answering or idle or closing)
        if not owing:
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._limits.request_seconds, self.transport.close)
        for group, belongs in ((places.owing, owing), (places.idle, idle and not closing)):
            if belongs and self not in places.spare:
                group.setdefault(self)
            else:
                group.pop(self, None)

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
        self._depart()
        if len(self._places.lingering) < SPARE_PLACES:
            self._places.lingering[self] = None
            self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _bound_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Lets the kernel drop a client that accepts nothing, even after the answer was handed
    over, when no timer of the application's runs any more."""
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
