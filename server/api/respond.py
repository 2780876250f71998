"""Answering a generation request: as one JSON body, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from engine.errors import EngineError
from server.api.checks import ignored_params
from server.api.context import ServerContext
from server.api.errors import ApiError, to_api_error
from server.api.generation import Generation
from server.api.schemas import GenerationRequest
from server.api.sse import DONE, EventStream, frame
from server.api.usage import speculation, usage
from server.text.choice import Delta

logger = logging.getLogger("specserve.server")


class Answer(Protocol):
    """How one endpoint writes what a generation brings forth."""

    @property
    def chunk_kind(self) -> str:
        """The `object` of a stream's chunks."""

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks that precede the first text."""

    def chunk(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices of the chunks for one delta."""

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """`object`, `choices` and other fields of the whole answer."""


def new_id(prefix: str, body: GenerationRequest) -> str:
    """The answer's id: the caller's `request_id` or a fresh one, after the endpoint's prefix."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


async def respond(
    request: Request,
    context: ServerContext,
    generation: Generation,
    answer: Answer,
    body: GenerationRequest,
    answer_id: str,
) -> Response:
    """Runs a generation to its end, or as long as the client stays.

    Raises:
        EngineError: the engine could not finish; nothing has been sent yet.
    """
    request.state.generation, request.state.stream = generation, bool(body.stream)  # for the log
    envelope = {"id": answer_id, "created": int(time.time()), "model": context.model_name}
    ignored = ignored_params(body)
    headers = {"x-ignored-params": ignored} if ignored else {}
    if body.stream:
        head = {**envelope, "object": answer.chunk_kind}
        return EventStream(
            _frames(generation, answer, head, body),
            generation.close,
            on_disconnect=context.metrics.disconnected,
            ping_seconds=context.options.ping_seconds,
            send_timeout_seconds=context.options.send_timeout_seconds,
            headers=headers,
        )
    try:
        deltas = await collect_while_connected(request, generation)
        if deltas is None:
            context.metrics.disconnected()
            return Response(status_code=499)  # nobody is left to read it
        payload = {
            **envelope,
            **answer.whole(deltas),
            "usage": usage(generation),
            "speculation": speculation(generation),
        }
    finally:
        generation.close()
    return Response(
        json.dumps(payload, ensure_ascii=False, allow_nan=False),
        headers=headers,
        media_type="application/json",
    )


async def _frames(
    generation: Generation, answer: Answer, head: Mapping[str, Any], body: GenerationRequest
) -> AsyncGenerator[str, None]:
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    continuous = with_usage and options is not None and bool(options.continuous_usage_stats)

    def chunk(choice: Mapping[str, Any]) -> str:
        payload = {**head, "choices": [choice]}
        if with_usage:
            payload["usage"] = usage(generation) if continuous else None
        return frame(payload)

    try:
        for choice in answer.opening():
            yield chunk(choice)
        async for number, delta in generation.deltas():
            for choice in answer.chunk(number, delta):
                yield chunk(choice)
        if with_usage:
            totals = {"usage": usage(generation), "speculation": speculation(generation)}
            yield frame({**head, "choices": [], **totals})
    except Exception as error:
        # The 200 is out; all that is left is to say so in the stream.
        if not isinstance(error, ApiError | EngineError):
            logger.exception("unexpected error in stream %s", head["id"])
            generation.error = "internal_error"
        yield frame(to_api_error(error).envelope())
    yield DONE


async def collect_while_connected(
    request: Request, generation: Generation
) -> list[list[Delta]] | None:
    """All deltas of every choice; None if the client goes away first."""
    work = asyncio.create_task(_collect(generation))
    gone = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _collect(generation: Generation) -> list[list[Delta]]:
    deltas: list[list[Delta]] = [[] for _ in generation.choices]
    async for number, delta in generation.deltas():
        deltas[number].append(delta)
    return deltas


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
