"""HTTP: find out what a target is, and send it one request at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import httpx

from loadtest.measure import Answer, Meter, StreamError
from loadtest.plan import Target, UsageError
from loadtest.sse import data_events


class Client:
    """Asks OpenAI-compatible servers over a pool of connections.

    Proxies and credentials of the environment are ignored: the requests go to the given
    address alone. Nothing is retried; a failure is a result.

    Args:
        timeout: seconds one request may take in all.
        api_key: sent as bearer token when not empty.
        transport: for tests; None = the network.
    """

    def __init__(
        self,
        timeout: float,
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Accept-Encoding": "identity"}  # a compressor would hold chunks back
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def prepare(self, target: Target, path: str, body: Mapping[str, object]) -> Target:
        """Fills in the model and learns whether running usage is taken, by asking the server.

        Args:
            body: a small request for `path`; its model and stream_options are replaced.

        Raises:
            UsageError: the server cannot be reached, or refuses even the plainest request.
        """
        if not target.model:
            target = replace(target, model=await self._first_model(target))
        plain = {"include_usage": True}
        for continuous in (True, False):
            options = plain | {"continuous_usage_stats": True} if continuous else plain
            answer = await self.ask(
                target, path, {**body, "model": target.model, "stream_options": options}
            )
            if answer.error is None:
                return replace(target, continuous_usage=continuous)
            if answer.error not in ("http 400", "http 422"):
                break
        raise UsageError(
            f"target {target.name} at {target.url}{path} failed its first request "
            f"({answer.error}: {answer.detail})."
        )

    async def _first_model(self, target: Target) -> str:
        address = f"{target.url}/v1/models"
        try:
            response = await self._http.get(address)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(
                f"target {target.name} does not answer at {address} ({_describe(error)}). "
                "Is the server running, and the address right?"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{address} lists no model; name one with --model.") from error

    async def ask(
        self, target: Target, path: str, body: Mapping[str, object], due: float | None = None
    ) -> Answer:
        """Sends one streaming request and times its answer; failures are answers too.

        Args:
            due: `perf_counter()` at which the request should have started, if times are to
                count from there; None = now.
        """
        meter = Meter(perf_counter() if due is None else due)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._stream(meter, target.url + path, body)
        except StreamError as error:
            return meter.failed(perf_counter(), error.kind, str(error))
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            return meter.failed(perf_counter(), "timeout", f"no end within {self._timeout:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return meter.failed(perf_counter(), "connection", _describe(error))

    async def _stream(self, meter: Meter, url: str, body: Mapping[str, object]) -> Answer:
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                detail = _error_message(await response.aread())
                return meter.failed(perf_counter(), f"http {response.status_code}", detail)
            ended: float | None = None
            # Read on after [DONE]: only a body read to its end gives the connection back.
            async for data in data_events(response.aiter_bytes()):
                if data == "[DONE]":
                    ended = ended or perf_counter()
                elif ended is None:
                    meter.feed(perf_counter(), _parse(data))
            return meter.answer(ended or perf_counter(), done=ended is not None)


def _parse(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise StreamError("malformed", f"an event is not JSON: {error}") from error


def _error_message(payload: bytes) -> str:
    """The server's own words, cut to a readable length."""
    text = payload.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        pass
    return text[:300]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
