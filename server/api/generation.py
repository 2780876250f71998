"""One HTTP request's work in the engine, from submission to the last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from engine.errors import CorruptedLogits, EngineError, RequestFailed
from engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    SequenceStats,
    TokenLogprobs,
    Tokens,
)
from server.api.callers import Caller
from server.api.context import ServerContext
from server.api.errors import ApiError, to_api_error
from server.api.patience import Patience
from server.api.tools import ToolUse
from server.text.choice import ChoiceText, Delta, TextRules
from server.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate.

    Args:
        requests: one engine request per prompt; all with the same number of samples.
        rules: how tokens become text.
        prompt_texts: per prompt its text, if the caller sent text.
        tools: how its answers call tools, if they may.
    """

    requests: tuple[Request, ...]
    rules: TextRules
    prompt_texts: tuple[str | None, ...]
    tools: ToolUse | None = None

    @property
    def samples(self) -> int:
        """Choices per prompt."""
        return self.requests[0].sampling.n


@dataclass(slots=True)
class _Choice:
    """One choice: choice `sample` of prompt `prompt`."""

    prompt: int
    sample: int
    text: ChoiceText
    last_token: float | None = None
    stats: SequenceStats | None = None
    finish_reason: str | None = None
    speedup: float | None = None  # so far, of one that is traced; None = unknown


class Generation:
    """Submits a job at once; `deltas` yields what its choices gain; `close` lets go of it.

    Choice numbers run over the whole job: prompt index times samples, plus sample.

    Raises:
        EngineError: the engine refuses one of the requests; none of them runs then.
    """

    def __init__(self, context: ServerContext, codec: TextCodec, job: Job, caller: Caller) -> None:
        self._engine = context.engine
        self._metrics = context.metrics
        self._context = context
        self._caller = caller
        self._patience = Patience(context.options.queue_seconds, context.options.generation_seconds)
        self.job = job
        self.first_token: float | None = None  # time.monotonic() of the first of any choice
        self.error: str | None = None  # the code of what ended it, if it failed
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None] | None] = [
            None for _ in job.requests
        ]
        self._prompts = {request.request_id: i for i, request in enumerate(job.requests)}
        self._prompt_seen = [False] * len(job.requests)
        self._not_started = set(range(len(job.requests)))
        self.choices = [
            _Choice(index, sample, self._choice_text(codec, request))
            for index, request in enumerate(job.requests)
            for sample in range(job.samples)
        ]
        self._closed = False
        self._streams: list[AsyncIterator[Event]] = []
        try:
            for request in job.requests:
                # Whatever the request asks for, it shares cached pages with its tenant alone.
                salt = caller.salt(request.cache_salt)
                self._streams.append(self._engine.submit(replace(request, cache_salt=salt)))
        except BaseException:
            for request in job.requests[: len(self._streams)]:
                self._engine.abort(request.request_id)
            raise
        context.running.add(self)
        caller.spend(sum(len(request.prompt) for request in job.requests))
        self._metrics.submitted(job.requests[0].sampling, len(self.choices))

    def _choice_text(self, codec: TextCodec, request: Request) -> ChoiceText:
        rules = self.job.rules
        detokenizer = codec.detokenizer(
            request.prompt, skip_special_tokens=rules.skip_special_tokens
        )
        return ChoiceText(rules, detokenizer)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (choice number, delta) as text becomes certain; every choice's last delta has
        a finish reason.

        Raises:
            ApiError, EngineError: the engine could not finish.
        """
        async with contextlib.aclosing(_merge(self._streams)) as events:
            try:
                while (event := await self._patience.next(events)) is not None:
                    if isinstance(event, PromptLogprobs):
                        self.prompt_logprobs[self._prompts[event.request_id]] = event.entries
                    elif isinstance(event, Failed):
                        raise self._failure(event.error)
                    elif (delta := self._on_event(event)) is not None:
                        yield self._number(event.request_id, event.choice), delta
            except (ApiError, EngineError) as error:
                self.error = to_api_error(error).code
                raise

    def interrupt(self, error: EngineError) -> None:
        """Ends it with an error, whether or not the engine still answers."""
        self._patience.interrupt(error)

    def _failure(self, error: EngineError) -> Exception:
        if isinstance(error, CorruptedLogits):
            self._metrics.corrupted()
        return self._context.explain(error)

    def _on_event(self, event: Tokens | Finished) -> Delta | None:
        return self._on_tokens(event) if isinstance(event, Tokens) else self._on_finished(event)

    def _number(self, request_id: str, sample: int) -> int:
        return self._prompts[request_id] * self.job.samples + sample

    def _on_tokens(self, event: Tokens) -> Delta | None:
        choice = self.choices[self._number(event.request_id, event.choice)]
        if choice.text.finished:
            return None  # computed before the engine heard of the stop string
        if event.trace is not None:
            choice.speedup = event.trace.speedup
        before = choice.text.tokens
        delta = choice.text.push(event.token_ids, event.logprobs, event.trace)
        now = time.monotonic()
        since = self.job.requests[choice.prompt].arrival
        first = choice.last_token is None
        gap = now - (since if choice.last_token is None else choice.last_token)
        self._metrics.tokens_arrived(choice.text.tokens - before, gap, first=first)
        self._caller.spend(choice.text.tokens - before)
        choice.last_token = now
        if first:
            self._on_first_token(choice.prompt, now)
        if delta is not None and delta.finish_reason is not None:
            self._engine.abort(event.request_id, event.choice, FinishReason.STOP)
        return delta

    def _on_first_token(self, prompt: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        if prompt in self._not_started:
            self._not_started.remove(prompt)
            if not self._not_started:
                self._patience.started()

    def _on_finished(self, event: Finished) -> Delta | None:
        choice = self.choices[self._number(event.request_id, event.choice)]
        choice.stats = event.stats
        first_of_prompt = not self._prompt_seen[choice.prompt]
        self._prompt_seen[choice.prompt] = True
        stopped = choice.text.finished
        reason = FinishReason.STOP if stopped else event.reason
        choice.finish_reason = reason.value
        self._metrics.finished(
            event.stats, reason.value, choice.text.tokens, count_prompt=first_of_prompt
        )
        if stopped:
            return None
        if reason is FinishReason.ABORT:
            raise RequestFailed("The request was aborted inside the server.")
        return choice.text.finish(reason.value, event.stop_token_id)

    def close(self) -> None:
        """Aborts what still runs and settles the counts. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._context.running.discard(self)
        running = {choice.prompt for choice in self.choices if choice.stats is None}
        for prompt in sorted(running):
            self._engine.abort(self.job.requests[prompt].request_id)
        unfinished = sum(choice.stats is None for choice in self.choices)
        self._metrics.gave_up(unfinished, "error" if self.error else "abort")


async def _merge(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[Event, None]:
    """Events of all streams as they come; the order within a stream is kept."""
    if len(streams) == 1:
        async with _closing(streams[0]) as stream:
            async for event in stream:
                yield event
        return
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    async def pump(source: AsyncIterator[Event]) -> None:
        try:
            async with _closing(source) as stream:
                async for event in stream:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(stream: AsyncIterator[Event]) -> AsyncIterator[AsyncIterator[Event]]:
    """Closes the stream at the end, if it can be closed."""
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
