"""Errors in OpenAI's envelope: one table from engine errors to status, type and code."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)

logger = logging.getLogger("specserve.server")

#: First match wins: (engine error, HTTP status, code). The type follows from the status.
ERROR_TABLE: tuple[tuple[type[EngineError], int, str | None], ...] = (
    (ContextLengthExceeded, 400, "context_length_exceeded"),
    (InvalidRequest, 400, None),
    (Overloaded, 503, "overloaded"),
    (EngineUnavailable, 503, "engine_unavailable"),
    (RequestFailed, 500, "request_failed"),
    (EngineError, 500, "internal_error"),
)

#: Seconds after which to try again when the engine loads or drains.
UNAVAILABLE_RETRY_SECONDS = 5

#: Error code -> reason in the metric of refused requests; everything else is "invalid".
_REJECTIONS = {
    "context_length_exceeded": "too_long",
    "overloaded": "queue_full",
    "engine_unavailable": "unavailable",
    "server_shutting_down": "draining",
    "queue_timeout": "queue_timeout",
}

_FIELD = re.compile(r"[a-z_]{1,40}")
_TYPE_NAMES = frozenset({"body", "str", "int", "float", "bool", "list", "dict"})

_STATUS_CODES = {404: "not_found", 405: "method_not_allowed", 413: "content_too_large"}


class ApiError(Exception):
    """An answer other than success, complete: status, envelope and headers.

    Args:
        status: HTTP status.
        message: what is wrong, its value, the limit and what to do.
        param: the request field to blame, if any.
        code: OpenAI's machine-readable code, if there is one.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            self.type = "rate_limit_exceeded"
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """The body: ``{"error": {message, type, param, code}}``."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def to_api_error(error: Exception) -> ApiError:
    """Translates any exception; what is not known becomes a 500 that gives nothing away."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in ERROR_TABLE:
        if isinstance(error, kind):
            return ApiError(
                status,
                str(error),
                param=getattr(error, "param", None),
                code=code,
                headers=_retry_headers(error, status),
            )
    return ApiError(
        500,
        "The server failed to handle the request; its log says why.",
        code="internal_error",
        headers={"x-should-retry": "false"},
    )


def shutting_down() -> ApiError:
    """The answer to requests that a shutdown refuses or cuts off."""
    return ApiError(
        503,
        "The server is shutting down.",
        code="server_shutting_down",
        headers={"Retry-After": str(UNAVAILABLE_RETRY_SECONDS), "Connection": "close"},
    )


def _retry_headers(error: EngineError, status: int) -> dict[str, str]:
    if isinstance(error, Overloaded):
        # The SDK waits Retry-After if it is at most 120 s.
        return {"Retry-After": str(min(120, max(1, math.ceil(error.retry_after))))}
    if isinstance(error, EngineUnavailable):
        return {"Retry-After": str(UNAVAILABLE_RETRY_SECONDS)}
    # A request that failed once by its own content fails again.
    return {"x-should-retry": "false"} if status >= 500 else {}


def error_response(error: ApiError) -> Response:
    """The whole answer to a request that failed before its first byte."""
    return Response(
        json.dumps(error.envelope()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def quote(value: str, limit: int = 64) -> str:
    """`value` for a message: printable ASCII, quoted, and never long."""
    shown = value if len(value) <= limit else value[:limit] + "..."
    return ascii(shown)


def install_error_handlers(app: FastAPI, rejected: Callable[[str], None]) -> None:
    """Makes every error of `app` leave in the envelope.

    Args:
        rejected: called with a short reason for each request that was refused.
    """

    def answer(error: ApiError) -> Response:
        if error.status in (400, 503):
            rejected(_REJECTIONS.get(error.code or "", "invalid"))
        return error_response(error)

    async def api_error(_: Request, error: Exception) -> Response:
        translated = to_api_error(error)
        if translated.status == 500:
            logger.error("request failed: %s", error)
        return answer(translated)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            reason = "Unknown URL" if error.status_code == 404 else "Wrong method"
            message = f"{reason}: {quote(request.method, 16)} {quote(request.url.path)}."
        code = _STATUS_CODES.get(error.status_code)
        return error_response(
            ApiError(error.status_code, message, code=code, headers=error.headers)
        )

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(_from_validation(error.errors()))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(EngineError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One sentence for the first field at fault; values are left out, for they may be huge or
    secret."""
    path = [part for part in errors[0]["loc"] if part != "body"]
    if not path:
        return ApiError(400, "The request has no body; send a JSON object.")
    param = str(path[0])
    reasons: dict[str, list[str]] = {}
    for error in errors:
        if param in error["loc"]:
            message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
            reasons.setdefault(_dotted(error["loc"]), []).append(message)
    parts = [f"{where}: {' or '.join(messages[:3])}" for where, messages in reasons.items()]
    return ApiError(400, f"{'; '.join(parts[:3])}.", param=param)


def _dotted(location: Sequence[str | int]) -> str:
    """``stop.0`` or ``prediction.type``, without the names of types that were tried."""
    names = [
        str(part)
        for part in location
        if isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _TYPE_NAMES)
    ]
    return ".".join(names)
