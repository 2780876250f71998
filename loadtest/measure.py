"""One streamed answer, measured by token: pure functions of times and events.

A chunk may hold several tokens (a speculative step emits a whole block), so the number of
chunks says nothing about tokens. Tokens are counted from `usage` alone: the final one for the
total, and the running one of `continuous_usage_stats` for each chunk. What the server does
not tell stays None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class StreamError(Exception):
    """The server reported an error, or sent what is no answer, after its 200.

    Args:
        kind: short class of the error, for counting.
        message: the server's words.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that brought text or tokens.

    Args:
        at: seconds after the request started.
        tokens: tokens that became countable with it; None = the server did not say.
    """

    at: float
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request went. Times are seconds since it started.

    `error` is a short kind ("http 503", "timeout", "connection", "stream", "malformed",
    "incomplete") or None; `detail` is its message. What speculation did is None where a server
    does not tell (specserve does, in the last chunk).
    """

    started: float  # time.perf_counter()
    seconds: float
    chunks: tuple[Chunk, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to first token: until the first chunk with text or tokens."""
        return self.chunks[0].at if self.chunks else None

    @property
    def counted(self) -> bool:
        """Whether the server said how many tokens each chunk brought."""
        return all(chunk.tokens is not None for chunk in self.chunks)

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk.

        (last chunk - first chunk) / tokens after the first chunk. Where the first chunk's
        size is unknown it is taken as one token, the usual convention. None when nothing
        came after the first chunk, or the token count is unknown.
        """
        if self.output_tokens is None or len(self.chunks) < 2:
            return None
        first = self.chunks[0].tokens if self.counted else 1
        later = self.output_tokens - (first or 0)
        return (self.chunks[-1].at - self.chunks[0].at) / later if later > 0 else None

    def token_gaps(self) -> list[tuple[float, int]]:
        """Inter-token latencies as (seconds a token, number of tokens).

        A chunk with n tokens that came g seconds after the previous tokens gives n latencies
        of g / n. Empty when the chunks' token counts are unknown.
        """
        if not self.counted:
            return []
        gaps = []
        previous: float | None = None
        for chunk in self.chunks:
            if previous is not None and chunk.tokens:
                gaps.append(((chunk.at - previous) / chunk.tokens, chunk.tokens))
            if previous is None or chunk.tokens:
                previous = chunk.at
        return gaps

    def chunk_gaps(self) -> list[float]:
        """Seconds between neighbouring chunks: the stutter a reader sees."""
        times = [chunk.at for chunk in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]


class Meter:
    """Turns the events of one stream into an `Answer`.

    Args:
        started: `time.perf_counter()` from which all times count.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._chunks: list[Chunk] = []
        self._text: list[str] = []
        self._seen = 0  # completion tokens told so far
        self._usage: Mapping[str, Any] = {}
        self._speculation: object = None
        self._finish_reason: str | None = None

    def feed(self, now: float, event: object) -> None:
        """Takes one event's JSON, read at `now`.

        Raises:
            StreamError: it is an error event, or not a completion chunk at all.
        """
        if not isinstance(event, dict):
            raise StreamError("malformed", f"an event is {type(event).__name__}, not an object")
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise StreamError("stream", str(message))
        usage = event.get("usage")
        choices = event.get("choices")
        if not isinstance(choices, list) or not isinstance(usage, dict | None):
            raise StreamError("malformed", "an event lacks `choices`, or `usage` is no object")
        if usage:
            self._usage = usage
        self._speculation = event.get("speculation") or self._speculation
        if choices:
            self._take(now - self._started, choices[0], usage)

    def _take(self, at: float, choice: object, usage: Mapping[str, Any] | None) -> None:
        if not isinstance(choice, dict):
            raise StreamError("malformed", "a choice is not an object")
        text = _text(choice)
        self._text.append(text)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        new = _count(usage, "completion_tokens")
        if new is not None:
            new, self._seen = max(0, new - self._seen), max(new, self._seen)
        if text or new:
            self._chunks.append(Chunk(at, new))

    def answer(self, now: float, *, done: bool) -> Answer:
        """The finished answer; `done` = the stream ended with [DONE]."""
        if not done:
            return self.failed(now, "incomplete", "the stream ended without [DONE]")
        if self._finish_reason in (None, "error", "abort"):
            return self.failed(now, "incomplete", f"finish_reason is {self._finish_reason!r}")
        return self._build(now, None, "")

    def failed(self, now: float, kind: str, detail: str) -> Answer:
        """What is known of a request that failed."""
        return self._build(now, kind, detail)

    def _build(self, now: float, error: str | None, detail: str) -> Answer:
        details = self._usage.get("prompt_tokens_details")
        return Answer(
            started=self._started,
            seconds=now - self._started,
            chunks=_counts_or_none(self._chunks),
            prompt_tokens=_count(self._usage, "prompt_tokens"),
            cached_tokens=_count(details, "cached_tokens"),
            output_tokens=_count(self._usage, "completion_tokens"),
            passes=_count(self._speculation, "target_passes"),
            drafted=_count(self._speculation, "drafted"),
            accepted=_count(self._speculation, "accepted"),
            text="".join(self._text),
            finish_reason=self._finish_reason,
            error=error,
            detail=detail,
        )


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a completion or chat choice; reasoning counts, since its tokens do."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return f"{thought}{delta.get('content') or ''}"


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


def _counts_or_none(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    """All counts, or none at all: a usage that comes only with the last chunk is a total."""
    if any(chunk.tokens is None for chunk in chunks):
        return tuple(Chunk(chunk.at, None) for chunk in chunks)
    return tuple(chunks)
