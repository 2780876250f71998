"""Reading a JSON body strictly: what is ambiguous or not JSON is refused with a reason."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from server.api.errors import ApiError

#: Larger bodies are parsed in a worker thread, so that open streams do not stutter.
OFFLOAD_BYTES = 128 * 1024

#: Fields of a body. Each is looked at, while nobody else is served.
MOST_FIELDS = 1024

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses a request body.

    Raises:
        ApiError: 400; not UTF-8, not JSON (NaN and Infinity are not), nested too deeply, a
            duplicate key, half a surrogate pair, not an object, or too many fields.
    """
    if not body.strip():
        raise ApiError(400, "The request has no body; send a JSON object.")
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
        if _SURROGATE_ESCAPE.search(body):
            # Python's parser lets half a surrogate pair through; no encoder takes it back.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ApiError(400, "The JSON body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8 (byte {error.start}).") from None
    except UnicodeEncodeError:
        raise ApiError(
            400, "The body holds half of a surrogate pair (\\ud800 to \\udfff)."
        ) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"The body is not valid JSON: {error.msg} ({where}).") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body is a JSON {_json_type(value)}; send an object.")
    if len(value) > MOST_FIELDS:
        raise ApiError(400, f"The body has {len(value)} fields; at most {MOST_FIELDS} are allowed.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:64]!a} appears twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {list: "array", str: "string", int: "number", float: "number"}
    return names.get(type(value), "value")


class _ParsedRequest(Request):
    """A request whose JSON body has been read and parsed."""

    parsed: dict[str, Any]

    async def json(self) -> Any:
        return self.parsed


class StrictRoute(APIRoute):
    """A route whose body must be one plain JSON object in UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_json(request: Request) -> Response:
            _check_headers(request)
            parsed = _ParsedRequest(request.scope, request.receive)
            try:
                body = await parsed.body()
            except ClientDisconnect:
                return Response(status_code=499)  # nobody is left to read it
            if len(body) > OFFLOAD_BYTES:
                parsed.parsed = await asyncio.to_thread(parse_json, body)
            else:
                parsed.parsed = parse_json(body)
            return await handle(parsed)

        return handle_json


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "Compressed bodies are not accepted; send the JSON as it is.")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.")
