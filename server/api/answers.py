"""Answers of the API: plain dictionaries with these shapes, since they are written once for every
few tokens."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


class ErrorBody(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """Every error of the server."""

    error: ErrorBody


class Usage(TypedDict):
    """Tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Speculation(TypedDict):
    """What speculation did."""

    drafted: int
    accepted: int
    target_passes: int
    tokens_per_pass: float | None
    speedup: float | None


class TracedToken(TypedDict):
    """A token's text; who drafted it, null = the model said it; refused guesses in its place."""

    text: str
    drafter: str | None
    refused: NotRequired[list[str]]


class Trace(TypedDict):
    """Where the tokens of a choice, or of its chunk, came from; and the choice's speed-up so far,
    by wall clock against plain decoding, null = unknown."""

    drafted: int
    accepted: int
    tokens: list[TracedToken]
    speedup: float | None


class CompletionLogprobs(TypedDict):
    """Four lists of equal length; offsets count characters of the returned text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    trace: NotRequired[Trace]


class CompletionResponse(TypedDict):
    """The answer of /v1/completions, and every chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    speculation: NotRequired[Speculation]


class ChatChoice(TypedDict):
    """One answer; a stream has `delta` in place of `message`."""

    index: int
    message: NotRequired[dict[str, Any]]
    delta: NotRequired[dict[str, Any]]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    trace: NotRequired[Trace]


class ChatCompletionResponse(TypedDict):
    """The answer of /v1/chat/completions, and every chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    speculation: NotRequired[Speculation]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class ResponseUsage(TypedDict):
    """Tokens a response took."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(TypedDict):
    """The answer of /v1/responses, and in several events of its stream; beside what it says it
    repeats what was asked for."""

    id: str
    object: str
    created_at: int
    completed_at: NotRequired[int]
    status: str
    model: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    speculation: NotRequired[Speculation]
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
