"""The gate in front of every route: without a key, nothing but health.

It decides by the very path that the router will match, and by a list of what is allowed, so
that no spelling of a URL can reach a route and miss the check.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.callers import Caller, TokenBucket
from server.api.errors import ApiError
from server.api.keys import find_key
from server.api.options import ServerOptions
from server.api.page import PAGE_FILES
from server.metrics.registry import Metrics

#: Paths that anybody may ask for, matched exactly: what a load balancer needs to know.
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping"})

_SCHEME = "Bearer "


def open_paths(options: ServerOptions) -> frozenset[str]:
    """Paths that need no key. The page is the same for everybody; what it asks for needs one."""
    metrics = {"/metrics"} if options.open_metrics else set()
    return OPEN_PATHS | metrics | (PAGE_FILES.keys() if options.ui else set())


def describe_access(document: dict[str, Any], options: ServerOptions) -> None:
    """Writes into an OpenAPI document which operations need a key; nothing if none does."""
    if not options.keys:
        return
    scheme = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."}
    document["components"]["securitySchemes"] = {"bearer": scheme}
    document["security"] = [{"bearer": []}]
    for path in open_paths(options) & set(document["paths"]):
        for operation in document["paths"][path].values():
            operation["security"] = []


class Gatekeeper:
    """Knows the caller of every request, or answers 401; counts requests, or answers 429.

    Args:
        options: keys, rate limits, and whether /metrics is open.
        metrics: where refusals are counted.
    """

    def __init__(self, app: ASGIApp, *, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._keys = options.keys
        self._open = open_paths(options)
        self._anybody = self._caller("", "")
        self._callers = {key.name: self._caller(key.name, key.tenant) for key in options.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["caller"] = caller = self._identify(scope)
            if scope["method"] == "POST":
                caller.count_request()
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller:
        if not self._keys or scope["path"] in self._open:
            return self._anybody
        key = find_key(self._keys, _secret(Headers(scope=scope)))
        if key is None:
            self._metrics.rejected("auth")
            raise ApiError(
                401,
                "This server needs a valid API key in the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self._callers[key.name]

    def _caller(self, name: str, tenant: str) -> Caller:
        def bucket(per_minute: int | None) -> TokenBucket | None:
            return None if per_minute is None else TokenBucket(per_minute)

        options = self._options
        return Caller(
            name,
            tenant,
            bucket(options.requests_per_minute),
            bucket(options.tokens_per_minute),
            self._metrics.rejected,
        )


def caller_of(request: Request) -> Caller:
    """Who sent a request that has passed the gate."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _secret(headers: Headers) -> bytes:
    """The key that was sent; empty, which no key is, unless there is exactly one."""
    given = headers.getlist("authorization")
    if len(given) != 1 or not given[0].startswith(_SCHEME):
        return b""
    return given[0].removeprefix(_SCHEME).encode("latin-1")
