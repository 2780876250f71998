"""The way to the server: what it is, what it says, and what went wrong, in a sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import httpx

from loadtest.sse import data_events
from server.terminal.answer import Answer
from server.terminal.safe import safe

_CHAT = "/v1/chat/completions"

#: Longest server's message that is repeated.
_MOST_WORDS = 500

#: What a request asks to be told, the most first; the next is tried where a server refuses it.
_TELLING: tuple[dict[str, Any], ...] = (
    {"speculation": {"trace": True}, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
)


class Trouble(Exception):
    """What went wrong, as a sentence for a person.

    Args:
        field: the field of the request that the server blames, if any.
    """

    def __init__(self, sentence: str, field: str = "") -> None:
        super().__init__(safe(sentence))
        self.field = field


class Link:
    """A server of the OpenAI kind, asked for one model. An asynchronous context manager.

    Proxies and credentials of the environment are ignored: requests go to `url` alone.

    Args:
        url: without `/v1`.
        key: sent as bearer token unless empty.
        transport: for tests; None = the network.
    """

    def __init__(
        self, url: str, key: str = "", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url
        self.model = ""
        self.drafters: tuple[str, ...] = ()
        self._telling = 0
        headers = {"Accept-Encoding": "identity"}  # a compressor would hold chunks back
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            # A long prompt may take its time, and whoever waits can stop it.
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    @property
    def traces(self) -> bool:
        """Whether the server tells who guessed a token, as far as is known."""
        return self._telling == 0

    async def learn(self) -> None:
        """Finds out the model's name and the drafters.

        Raises:
            Trouble: the server does not answer, or not like this.
        """
        models = await self._get("/v1/models")
        try:
            self.model = str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise Trouble(f"{self.url}/v1/models lists no model.") from None
        status = await self.status()
        self.drafters = tuple(status.get("drafters", ()))

    async def status(self) -> Mapping[str, Any]:
        """`/v1/speculation/status`; empty where a server has none."""
        try:
            status = await self._get("/v1/speculation/status")
        except Trouble:
            return {}
        return status if isinstance(status, dict) else {}

    async def ask(self, body: Mapping[str, Any], answer: Answer) -> AsyncGenerator[None, None]:
        """Streams the answer to a chat request into `answer`; yields after each chunk.

        Closing the iterator closes the connection, which ends the request at the server, too.

        Raises:
            Trouble: the server refuses it, cannot be reached, or breaks off.
        """
        while True:
            telling = self._telling
            asked = {**body, "model": self.model, "stream": True, **_TELLING[telling]}
            if wished := {
                **_TELLING[telling].get("speculation", {}),
                **body.get("speculation", {}),
            }:
                asked["speculation"] = wished
            try:
                async with aclosing(self._stream(asked)) as events:
                    async for event in events:
                        answer.feed(event, perf_counter())
                        yield
                return
            except Trouble as trouble:
                mine = trouble.field in ("speculation", "speculation.trace", "stream_options")
                if not mine or telling == len(_TELLING) - 1:
                    raise
                self._telling = max(self._telling, telling + 1)  # another may know by now

    # -- HTTP ------------------------------------------------------------------------------

    async def _get(self, path: str) -> Any:
        try:
            response = await self._http.get(path, timeout=40.0)
            if response.status_code != 200:
                raise refusal(response.status_code, response.content, response.headers)
            return response.json()
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        except ValueError:
            raise Trouble(f"{self.url}{path} does not answer in JSON.") from None

    async def _stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        begun = done = False
        try:
            async with self._http.stream("POST", _CHAT, json=body) as response:
                if response.status_code != 200:
                    payload = await response.aread()
                    raise refusal(response.status_code, payload, response.headers)
                async for data in data_events(response.aiter_bytes()):
                    if data == "[DONE]":
                        done = True
                        continue
                    begun = True
                    yield _read(data)
        except httpx.HTTPError as error:
            if begun:
                raise Trouble("The connection broke off in the middle of the answer.") from error
            raise self._lost(error) from error
        if not done:
            raise Trouble("The server ended the answer in its middle.")

    def _lost(self, error: Exception) -> Trouble:
        reason = str(error) or type(error).__name__
        return Trouble(f"The server at {self.url} cannot be reached ({reason}). Does it run?")


def _read(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Trouble("The server sent something that is no chunk of an answer.")
    if error := event.get("error"):
        message, code, _ = _parts(error)
        if code == "server_shutting_down":
            raise Trouble("The server is shutting down and cut the answer off.")
        raise Trouble(f"The server broke the answer off: {message}")
    return event


def refusal(status: int, payload: bytes, headers: Mapping[str, str]) -> Trouble:
    """What an answer other than success means.

    Args:
        status: of HTTP.
        payload: its body.
        headers: by lower-case names.
    """
    try:
        error: object = json.loads(payload)["error"]
    except (ValueError, LookupError, TypeError):
        error = payload.decode("utf-8", "replace")
    message, code, field = _parts(error)
    message = message or f"HTTP {status}"
    if status == 401:
        return Trouble(f"{message} Name the variable that holds one: --api-key-env VAR.")
    if code == "server_shutting_down":
        return Trouble("The server is shutting down and takes no new questions.")
    if code == "context_length_exceeded":
        return Trouble(f"{message} /clear begins a new conversation.", field)
    if status in (429, 503):
        wait = headers.get("retry-after", "")
        when = f"again in {wait} s" if wait.isdigit() else "again later"
        return Trouble(f"{message} Ask {when}.", field)
    return Trouble(f"{message} (HTTP {status})", field)


def _parts(error: object) -> tuple[str, str, str]:
    """Message, code and field of an error; what is not there is empty."""
    if not isinstance(error, dict):
        return str(error)[:_MOST_WORDS].strip(), "", ""
    message = str(error.get("message") or "")[:_MOST_WORDS]
    field = str(error.get("param") or "")
    if field.startswith("stream_options") or "continuous_usage_stats" in message:
        field = "stream_options"
    return message, str(error.get("code") or ""), field
