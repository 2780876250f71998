"""An OpenAI-shaped server that answers by script, on a real port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Script:
    """How the server answers.

    Args:
        chunks: tokens in each chunk; a request's max_tokens cuts the last ones.
        usage: "continuous" serves continuous_usage_stats, "final" knows include_usage only and
            ignores the other, "strict" answers it with 400, "none" never sends usage.
        delay: seconds before each chunk.
        fail: "http" answers 503, "error" breaks off with an error event, "cut" ends the stream
            early, "no_done" leaves [DONE] out, "garbage" sends an event that is not JSON,
            "hang" stops after the first chunk.
        fail_when: index of the first request (counted from 0) that fails.
        arm_marks: answers differ when the request's `speculation` differs.
        together: nothing is answered before so many requests have been under way at once, so
            that a test sees overlap, or the lack of it, however slow the machine is.
    """

    chunks: Sequence[int] = (1, 3, 4)
    usage: Literal["continuous", "final", "strict", "none"] = "continuous"
    delay: float = 0.0
    fail: str = ""
    fail_when: int = 0
    arm_marks: bool = False
    together: int = 0
    models: Sequence[str] = ("fake-model",)


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    started: float
    ended: float = 0.0


@dataclass
class FakeServer:
    """Serves `script` on 127.0.0.1 at a free port, in a thread; a context manager."""

    script: Script = field(default_factory=Script)
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0

    def __enter__(self) -> FakeServer:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        config = uvicorn.Config(app, port=0, log_level="critical", ws="none", lifespan="off")
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": m} for m in self.script.models]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        seen = Seen(request.url.path, body, dict(request.headers), time.perf_counter())
        number = len(self.seen)
        self.seen.append(seen)
        fail = self.script.fail if number >= self.script.fail_when else ""
        options = body.get("stream_options") or {}
        if self.script.usage == "strict" and "continuous_usage_stats" in options:
            message = "Unrecognized request argument: continuous_usage_stats"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        if fail == "http":
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=503)
        stream = self._stream(seen, request.url.path.endswith("/chat/completions"), fail)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, seen: Seen, chat: bool, fail: str) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            async for event in self._events(seen.body, chat, fail):
                yield event
        finally:
            self.in_flight -= 1
            seen.ended = time.perf_counter()

    async def _events(self, body: dict[str, Any], chat: bool, fail: str) -> AsyncIterator[bytes]:
        while self.max_in_flight < self.script.together:
            await asyncio.sleep(0.001)
        running = self.script.usage == "continuous"
        if chat:
            yield _event(_chunk(chat, "", None, role=True), 0 if running else None)
        yield b": ping\n\n"
        sent = 0
        mark = str(body.get("speculation")) if self.script.arm_marks else ""
        for size in self.script.chunks:
            await asyncio.sleep(self.script.delay)
            size = min(size, body["max_tokens"] - sent)
            if size <= 0:
                break
            text = "".join(f"t{sent + i}{mark} " for i in range(size))
            sent += size
            yield _event(_chunk(chat, text, None), sent if running else None)
            if fail == "error":
                yield _event({"error": {"message": "engine died"}}, None) + b"data: [DONE]\n\n"
                return
            if fail == "garbage":
                yield b"data: {not json\n\n"
            if fail == "hang":
                await asyncio.sleep(30)
            if fail == "cut":
                return
        yield _event(_chunk(chat, "", "length"), sent if running else None)
        if self.script.usage != "none":
            yield _event({"choices": []}, sent)
        if fail != "no_done":
            yield b"data: [DONE]\n\n"


def _chunk(chat: bool, text: str, finish: str | None, role: bool = False) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["delta"] = {"role": "assistant", "content": ""} if role else {"content": text}
    else:
        choice["text"] = text
    return {"choices": [choice]}


def _event(data: dict[str, Any], tokens: int | None) -> bytes:
    details = {"cached_tokens": 2}
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "prompt_tokens_details": details,
    }
    data["usage"] = None if tokens is None else usage
    return f"data: {json.dumps(data)}\n\n".encode()
