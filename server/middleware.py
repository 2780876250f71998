"""The outermost layer, pure ASGI: request ids, the body limit, HTTP metrics, the last resort."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, error_response, to_api_error
from server.metrics import Metrics

logger = logging.getLogger("specserve.server")

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")

#: Methods that may become metric labels; anything else is "other".
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


def safe_id(value: str | None) -> str:
    """A client's request id with only harmless characters, or a fresh one."""
    cleaned = _UNSAFE.sub("", value or "")[:128]
    return cleaned or uuid.uuid4().hex


class RequestGuard:
    """Wraps the whole application.

    Every response carries `x-request-id`; a body over `max_body_bytes` is answered with 413
    before it has been read; an unexpected exception is logged and answered with a 500 that
    gives nothing away.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        request_id = safe_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_declared_length(headers)
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
            method = scope["method"] if scope["method"] in _METHODS else "other"
            handler = getattr(scope.get("route"), "path", "unknown")
            self._metrics.http_answered(handler, method, status, time.monotonic() - started)

    def _check_declared_length(self, headers: Headers) -> None:
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        total = 0

        async def receive_limited() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body_bytes:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        self._metrics.rejected("too_large")
        return ApiError(
            413,
            f"The request body is larger than {self._max_body_bytes} bytes, the server's limit.",
            code="content_too_large",
        )
