"""POST /v1/responses: chat in another shape. Nothing is stored."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.errors import EngineError
from server.api.access import caller_of
from server.api.answers import ResponseObject
from server.api.body import StrictRoute
from server.api.checks import ignored_params
from server.api.context import ServerContext
from server.api.errors import ApiError, to_api_error
from server.api.generation import Generation
from server.api.respond import collect_while_connected
from server.api.response_input import chat_request, renamed
from server.api.response_output import ResponseAnswer
from server.api.response_schemas import ResponseRequest
from server.api.sse import EventStream, named_frame
from server.api.translate import chat_job
from server.api.unsupported import UNSUPPORTED_RESPONSES

logger = logging.getLogger("specserve.server")


def responses_router(context: ServerContext) -> APIRouter:
    """The route of responses."""
    router = APIRouter(route_class=StrictRoute, tags=["generation"])

    @router.post(
        "/v1/responses",
        responses={200: {"model": ResponseObject, "content": {"text/event-stream": {}}}},
    )
    async def create_response(request: Request, body: ResponseRequest) -> Response:
        """Answers a conversation in OpenAI's newer shape, of text and calls of functions."""
        codec = context.codec()
        caller = caller_of(request)
        caller.check_tokens()
        asked = chat_request(body)
        try:
            job = await chat_job(context, codec, asked)
            generation = Generation(context, codec, job, caller)
        except (ApiError, EngineError) as error:
            raise renamed(error) from None
        answer = ResponseAnswer(codec, body, generation, context.model_name)
        return await _respond(request, context, generation, answer, body)

    return router


async def _respond(
    request: Request,
    context: ServerContext,
    generation: Generation,
    answer: ResponseAnswer,
    body: ResponseRequest,
) -> Response:
    request.state.generation, request.state.stream = generation, bool(body.stream)  # for the log
    ignored = ignored_params(body, UNSUPPORTED_RESPONSES)
    headers = {"x-ignored-params": ignored} if ignored else {}
    if body.stream:
        return EventStream(
            _frames(generation, answer),
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
        for delta in deltas[0]:
            answer.push(delta)
        payload = answer.whole()
    finally:
        generation.close()
    return Response(
        json.dumps(payload, ensure_ascii=False, allow_nan=False),
        headers=headers,
        media_type="application/json",
    )


async def _frames(generation: Generation, answer: ResponseAnswer) -> AsyncGenerator[str, None]:
    try:
        for event in answer.opening():
            yield named_frame(event)
        async for _, delta in generation.deltas():
            for event in answer.push(delta):
                yield named_frame(event)
        yield named_frame(answer.closing())
    except Exception as error:
        # The 200 is out; all that is left is to say so in the stream.
        if not isinstance(error, ApiError | EngineError):
            logger.exception("unexpected error in a stream of /v1/responses")
            generation.error = "internal_error"
        yield named_frame(answer.failure(to_api_error(error).message))
