"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.access import caller_of
from server.api.answers import ChatCompletionResponse
from server.api.body import StrictRoute
from server.api.completions import join
from server.api.context import ServerContext
from server.api.generation import Generation
from server.api.logprobs import LogprobWriter
from server.api.respond import new_id, respond
from server.api.schemas import ChatCompletionRequest
from server.api.trace import write_trace
from server.api.translate import chat_job
from server.text.choice import Delta
from server.text.codec import TextCodec


def chat_router(context: ServerContext) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter(route_class=StrictRoute, tags=["generation"])

    @router.post(
        "/v1/chat/completions",
        responses={200: {"model": ChatCompletionResponse, "content": {"text/event-stream": {}}}},
    )
    async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
        """Answers a conversation, written down by the tokenizer's own chat template."""
        codec = context.codec()
        caller = caller_of(request)
        caller.check_tokens()
        job = await chat_job(context, codec, body)
        generation = Generation(context, codec, job, caller)
        answer = ChatAnswer(codec, body, generation)
        answer_id = new_id("chatcmpl", body)
        return await respond(request, context, generation, answer, body, answer_id)

    return router


class ChatAnswer:
    """Writes the choices of /v1/chat/completions."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, codec: TextCodec, body: ChatCompletionRequest, generation: Generation
    ) -> None:
        self._codec = codec
        self._body = body
        self._generation = generation
        self._writer = LogprobWriter(
            codec, body.top_logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids)
        )

    def opening(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        numbers = range(len(self._generation.choices))
        choices = [_bare(number, "delta", dict(role), None) for number in numbers]
        if self._body.return_token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = list(self._generation.job.requests[0].prompt)
        return choices

    def chunk(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        with_tokens = self._body.logprobs or self._body.return_token_ids or delta.pieces
        chunks = []
        if delta.text or (with_tokens and delta.token_ids):
            choice = _bare(number, "delta", {"content": delta.text}, None)
            chunks.append(self._with_tokens(choice, delta))
        if delta.finish_reason is not None:
            last = _bare(number, "delta", {}, delta.finish_reason)
            last["stop_reason"] = delta.stop_reason
            chunks.append(last)
        return chunks

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        choices = []
        for number, parts in enumerate(deltas):
            delta = join(parts)
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            choice = _bare(number, "message", message, delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            choices.append(self._with_tokens(choice, delta))
        result: dict[str, Any] = {"object": "chat.completion", "choices": choices}
        if self._body.return_token_ids:
            result["prompt_token_ids"] = list(self._generation.job.requests[0].prompt)
        if self._body.prompt_logprobs is not None:
            entries = self._generation.prompt_logprobs[0] or ()
            result["prompt_logprobs"] = self._writer.prompt(entries, self._body.prompt_logprobs)
        return result

    def _with_tokens(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        if self._body.logprobs:
            choice["logprobs"] = self._writer.chat(delta)
        if delta.pieces:
            choice["trace"] = write_trace(delta, self._codec)
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _bare(
    number: int, field: str, content: dict[str, Any], finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": number,
        field: content,
        "logprobs": None,
        "finish_reason": finish_reason,
    }
