"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.access import caller_of
from server.api.answers import CompletionResponse
from server.api.body import StrictRoute
from server.api.context import ServerContext
from server.api.generation import Generation
from server.api.logprobs import LogprobWriter
from server.api.respond import new_id, respond
from server.api.schemas import CompletionRequest
from server.api.trace import write_trace
from server.api.translate import completion_job
from server.text.choice import Delta
from server.text.codec import TextCodec


def completions_router(context: ServerContext) -> APIRouter:
    """The route of text completions."""
    router = APIRouter(route_class=StrictRoute, tags=["generation"])

    @router.post(
        "/v1/completions",
        responses={200: {"model": CompletionResponse, "content": {"text/event-stream": {}}}},
    )
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continues one or more prompts."""
        codec = context.codec()
        caller = caller_of(request)
        caller.check_tokens()
        job = await completion_job(context, codec, body)
        generation = Generation(context, codec, job, caller)
        answer = CompletionAnswer(codec, body, generation)
        answer_id = new_id("cmpl", body)
        return await respond(request, context, generation, answer, body, answer_id)

    return router


class CompletionAnswer:
    """Writes the choices of /v1/completions."""

    chunk_kind = "text_completion"

    def __init__(self, codec: TextCodec, body: CompletionRequest, generation: Generation) -> None:
        self._codec = codec
        self._body = body
        self._generation = generation
        self._writer = LogprobWriter(
            codec, body.logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._echoes: dict[int, str] = {}  # prompt -> its text, once it was needed
        self._opened: set[int] = set()  # choices whose first chunk is out

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        with_tokens = self._body.logprobs is not None or self._body.return_token_ids or delta.pieces
        if not delta.text and not delta.finish_reason and not with_tokens:
            return []
        first = number not in self._opened
        self._opened.add(number)
        return [self._choice(number, delta, number, first=first)]

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        samples = self._generation.job.samples
        wanted = self._body.n if self._body.n is not None else 1
        choices = []
        for prompt in range(len(self._generation.job.requests)):
            joined = [
                (prompt * samples + sample, join(deltas[prompt * samples + sample]))
                for sample in range(samples)
            ]
            if samples > wanted:  # best_of
                joined.sort(key=lambda item: -_mean_logprob(item[1]))
            for sample, (number, delta) in enumerate(joined[:wanted]):
                index = prompt * wanted + sample
                choice = self._choice(index, delta, number, first=True)
                if self._body.prompt_logprobs is not None:
                    entries = self._generation.prompt_logprobs[prompt] or ()
                    choice["prompt_logprobs"] = self._writer.prompt(
                        entries, self._body.prompt_logprobs
                    )
                choices.append(choice)
        return {"object": "text_completion", "choices": choices}

    def _choice(self, index: int, delta: Delta, number: int, *, first: bool) -> dict[str, Any]:
        """One choice.

        Args:
            index: its index in the answer.
            number: its number in the generation.
            first: whether it is the choice's first (or only) chunk, which carries the echo.
        """
        body = self._body
        prompt = self._generation.choices[number].prompt
        echo = self._echo(prompt) if body.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text if first else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.logprobs is not None:
            lists = self._writer.completion_delta(delta, len(echo))
            if first and body.echo:
                ahead = self._prompt_lists(prompt, len(echo))
                lists = {name: ahead[name] + values for name, values in lists.items()}
            choice["logprobs"] = lists
        if delta.pieces:
            choice["trace"] = write_trace(
                delta, self._codec, self._generation.choices[number].speedup
            )
        if body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = list(self._generation.job.requests[prompt].prompt)
        return choice

    def _echo(self, prompt: int) -> str:
        if prompt not in self._echoes:
            job = self._generation.job
            text = job.prompt_texts[prompt]
            if text is None:
                text = self._codec.decode(
                    job.requests[prompt].prompt,
                    skip_special_tokens=job.rules.skip_special_tokens,
                )
            self._echoes[prompt] = text
        return self._echoes[prompt]

    def _prompt_lists(self, prompt: int, length: int) -> dict[str, list[Any]]:
        job = self._generation.job
        tokens = job.requests[prompt].prompt
        detokenizer = self._codec.detokenizer(skip_special_tokens=job.rules.skip_special_tokens)
        offsets, position = [], 0
        for token in tokens:
            offsets.append(min(position, length))
            position += len(detokenizer.push(token))
        entries = self._generation.prompt_logprobs[prompt] or ()
        return self._writer.completion(entries, tokens, offsets)


def join(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprobs),
        offsets=tuple(offset for delta in deltas for offset in delta.offsets),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        pieces=tuple(piece for delta in deltas for piece in delta.pieces),
        reasoning="".join(delta.reasoning for delta in deltas),
    )


def _mean_logprob(delta: Delta) -> float:
    values = [entry.logprob for entry in delta.logprobs or ()]
    return sum(values) / len(values) if values else 0.0
