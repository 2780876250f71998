"""The outermost layer, pure ASGI: request ids, limits, HTTP metrics, the log, the last resort."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.access import OPEN_PATHS
from server.api.errors import ApiError, error_response, to_api_error
from server.api.options import ServerOptions
from server.api.recent import recent_request
from server.api.target import resolve_target
from server.api.usage import summary
from server.logs import log_request
from server.metrics.registry import Metrics

#: Bytes and number of headers, and bytes of the URL. A connection holds back up to as many
#: bytes that are not yet a whole request; what arrives at once is counted here.
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_URL_BYTES = 8 * 1024

logger = logging.getLogger("specserve.server")

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")

#: Methods that may become metric labels; anything else is "other".
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

#: What probes and scrapers ask for all the time.
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}


def safe_id(value: str | None) -> str:
    """A client's request id with only harmless characters, or a fresh one."""
    cleaned = _UNSAFE.sub("", value or "")[:128]
    return cleaned or uuid.uuid4().hex


class RequestGuard:
    """Wraps the whole application.

    Every response carries `x-request-id`; HEAD is answered wherever GET is; requests that are
    too large or come too slowly are refused before they have been read; an unexpected exception
    is logged and answered with a 500 that gives nothing away; every request is counted and
    logged.
    """

    def __init__(self, app: ASGIApp, *, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        resolve_target(scope, self._options.root_path)
        method = scope["method"]
        if method == "HEAD":
            scope["method"] = "GET"  # the same answer, of which only the head is sent
        headers = Headers(scope=scope)
        request_id = safe_id(headers.get("x-request-id"))
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif method == "HEAD" and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check_head(scope, headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            translated = to_api_error(error)
            if not isinstance(error, ApiError):
                logger.exception("unexpected error in request %s", request_id)
            if status == 0:
                await error_response(translated)(scope, receive, send_with_id)
        finally:
            self._settle(scope, method, status, time.monotonic() - started)

    def _settle(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        """Counts and logs a request that is over; status 0 = nobody waited for an answer."""
        method = method if method in _METHODS else "other"
        handler = getattr(scope.get("route"), "path", "unknown")
        self._metrics.http_answered(handler, method, status, seconds)
        state = scope["state"]
        caller, generation = state.get("caller"), state.get("generation")
        fields = {
            "request_id": state["request_id"],
            "method": method,
            "endpoint": handler,
            "status": status,
            "seconds": round(seconds, 6),
            "caller": caller.name if caller is not None else "",
        }
        if generation is not None:
            fields |= {"stream": state["stream"], **summary(generation)}
            caller.recent.append(recent_request(generation, fields))
        log_request(fields, quiet=handler in _QUIET_PATHS and status != 500)

    def _check_head(self, scope: Scope, headers: Headers) -> None:
        url_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if url_bytes > MAX_URL_BYTES:
            self._metrics.rejected("header_too_large")
            raise ApiError(414, f"The URL is longer than {MAX_URL_BYTES} bytes, the limit.")
        raw = headers.raw
        size = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._metrics.rejected("header_too_large")
            raise ApiError(
                431,
                f"The request has {len(raw)} headers of {size} bytes; the limits are "
                f"{MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes.",
                code="header_too_large",
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            # Servers in front may count otherwise and see another request in the body.
            raise ApiError(
                400,
                "The request has a Content-Length and a Transfer-Encoding; send one of them.",
                headers={"Connection": "close"},
            )
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._options.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """Reads the body within its limits of size and time; what follows it is a disconnect,
        which may take its time."""
        total, complete = 0, False
        until = asyncio.get_running_loop().time() + self._options.body_seconds

        async def receive_limited() -> Message:
            nonlocal total, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            complete = not message.get("more_body", False)
            total += len(message.get("body", b""))
            if total > self._options.max_body_bytes:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        self._metrics.rejected("too_large")
        return ApiError(
            413,
            f"The request body is larger than {self._options.max_body_bytes} bytes, the server's "
            "limit.",
            code="content_too_large",
        )

    def _too_slow(self) -> ApiError:
        self._metrics.rejected("body_timeout")
        return ApiError(
            408,
            f"The request body took longer than {self._options.body_seconds:g} s to arrive, the "
            "server's limit.",
            code="body_timeout",
            headers={"Connection": "close"},
        )
