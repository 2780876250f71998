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
from server.api.reasoning import reasoning_delta, reasoning_message
from server.api.respond import new_id, respond
from server.api.schemas import ChatCompletionRequest
from server.api.tools import ToolText, whole_calls
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
        use = generation.job.tools
        self._tools = [ToolText(use) for _ in generation.choices] if use is not None else []
        self._reasoning = generation.job.rules.reasoning
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
        """A delta's thought, text and calls; its tokens go with the first of its chunks."""
        last, called = delta.finish_reason is not None, False
        parts, content, calls = reasoning_delta(delta), delta.text, list[dict[str, Any]]()
        if self._tools:
            content, calls = self._tools[number].push(delta.text, last=last)
            called = self._tools[number].called
        parts += [{"content": content}] if content else []
        parts += [{"tool_calls": [call]} for call in calls]
        if not parts and delta.token_ids and self._wants_tokens(delta):
            parts = [{} if self._tools or self._reasoning else {"content": ""}]
        chunks = [_bare(number, "delta", part, None) for part in parts]
        if chunks:
            self._with_tokens(chunks[0], delta)
        if last:
            reason = _reason(delta, called=called)
            chunks.append({**_bare(number, "delta", {}, reason), "stop_reason": delta.stop_reason})
        return chunks

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        choices = []
        for number, parts in enumerate(deltas):
            delta = join(parts)
            message, reason = self._message(number, delta)
            choice = _bare(number, "message", message, reason)
            choice["stop_reason"] = delta.stop_reason
            choices.append(self._with_tokens(choice, delta))
        result: dict[str, Any] = {"object": "chat.completion", "choices": choices}
        if self._body.return_token_ids:
            result["prompt_token_ids"] = list(self._generation.job.requests[0].prompt)
        if self._body.prompt_logprobs is not None:
            entries = self._generation.prompt_logprobs[0] or ()
            result["prompt_logprobs"] = self._writer.prompt(entries, self._body.prompt_logprobs)
        return result

    def _message(self, number: int, delta: Delta) -> tuple[dict[str, Any], str | None]:
        """A whole answer as a message, and why it ended."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.text,
            "refusal": None,
            **reasoning_message(self._reasoning, delta),
        }
        if not self._tools:
            return message, delta.finish_reason
        content, calls = self._tools[number].push(delta.text, last=True)
        if not calls:
            return message, delta.finish_reason
        message |= {"content": content or None, "tool_calls": whole_calls(calls)}
        return message, _reason(delta, called=True)

    def _wants_tokens(self, delta: Delta) -> bool:
        """Whether tokens without text are worth a chunk."""
        return bool(self._body.logprobs or self._body.return_token_ids or delta.pieces)

    def _with_tokens(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        if self._body.logprobs:
            choice["logprobs"] = self._writer.chat(delta)
        if delta.pieces:
            speedup = self._generation.choices[choice["index"]].speedup
            choice["trace"] = write_trace(delta, self._codec, speedup)
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _reason(delta: Delta, *, called: bool) -> str | None:
    return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


def _bare(
    number: int, field: str, content: dict[str, Any], finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": number,
        field: content,
        "logprobs": None,
        "finish_reason": finish_reason,
    }
