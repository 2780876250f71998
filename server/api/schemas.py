"""Requests of the API, nothing else.

They are validated strictly: "16" is no number, true no integer, 1.5 no whole number; null means
"default" everywhere. Ranges are checked where the values are used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from server.api.formats import GuidedFields, StructuredFields
from server.api.messages import Content, Messages
from server.api.shapes import (
    LENGTH,
    VARIABLES,
    Biases,
    FewTokenIds,
    PromptShape,
    SomeTokenIds,
    Stop,
    TokenIds,
    Words,
    one_of,
)
from server.api.tools import ToolFields
from server.api.unsupported import describe_unsupported

Prompt = str | list[str] | list[int] | list[list[int]]


def _ranged(low: float, high: float, text: str | None = None) -> Any:
    """An optional number whose range the document tells; it is checked where it is used."""
    return Field(None, description=text, json_schema_extra={"minimum": low, "maximum": high})


_INT32 = 2**31 - 1


def _check_prompt(value: Any) -> Prompt:
    """Tells the four shapes of a prompt apart without trying each in turn."""
    if isinstance(value, str):
        items: list[Any] = [value]
    elif isinstance(value, list) and value:
        items = value
    else:
        raise ValueError(
            "send a non-empty string, list of strings, list of token ids, or list "
            "of lists of token ids"
        )
    first = type(items[0])
    if first is bool or any(type(item) is not first for item in items):
        raise ValueError("a list must hold only strings, only token ids, or only lists")
    if first is list:
        if not all(items):
            raise ValueError("a list of token ids is empty; send at least one token")
        if any(type(token) is not int for item in items for token in item):
            raise ValueError("token ids must be integers")
    elif first is str:
        if not all(items):
            raise ValueError("a prompt is an empty string; send at least one character")
    elif first is not int:
        raise ValueError("send strings or token ids (integers)")
    return value  # type: ignore[no-any-return]


class StreamOptions(BaseModel):
    """Only with `stream`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="One more chunk, with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: usage in every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class Prediction(BaseModel):
    """Predicted Outputs: text the answer will probably contain. Changes speed, never text."""

    model_config = ConfigDict(strict=True)

    type: Literal["content"]
    content: Content


class SpeculationOptions(BaseModel):
    """What this request asks of speculation. Changes speed, never text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = Field(None, description="false switches speculation off.")
    drafter: str | None = Field(None, description="A loaded drafter, or none.")
    num_speculative_tokens: int | None = _ranged(0, 64, "Most draft tokens a step.")
    max_draft: int | None = _ranged(0, 64, "Older name of num_speculative_tokens.")
    trace: bool | None = Field(
        None,
        description="Each choice tells whose guesses its tokens are; refused where the server's "
        "setting allow_trace is off.",
    )


class SamplingFields(GuidedFields):
    """What every request for text may say."""

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, description="The served model; may be left out.")
    frequency_penalty: float | None = _ranged(-2, 2)
    presence_penalty: float | None = _ranged(-2, 2)
    repetition_penalty: float | None = _ranged(1e-3, 100, "Above 0; 1 = off.")
    temperature: float | None = _ranged(0, 2, "0 = greedy; default 1.")
    top_p: float | None = _ranged(0, 1, "Default 1; 0 = greedy.")
    top_k: int | None = _ranged(-1, _INT32, "0 or -1 = off.")
    min_p: float | None = _ranged(0, 1, "0 = off.")
    logit_bias: Biases | None = Field(None, description="Token id to -100..100.")
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: Words | None = None
    min_tokens: int | None = _ranged(0, _INT32, "At most max_tokens.")
    ignore_eos: bool | None = None
    seed: int | None = _ranged(-(2**63), 2**63 - 1)
    stop: Stop | None = Field(None, description="Up to 16 strings.")
    stop_token_ids: FewTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Prefix pages are shared only under the same salt."
    )
    priority: int | None = _ranged(-_INT32 - 1, _INT32, "Lower runs first; default 0.")
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    user: str | None = None
    speculation: SpeculationOptions | None = None
    prediction: Prediction | None = None


class GenerationRequest(SamplingFields, StructuredFields):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=describe_unsupported)

    max_tokens: int | None = _ranged(0, _INT32)
    n: int | None = _ranged(1, 128)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, WithJsonSchema(LENGTH)] | None = Field(
        None, description="Keep so many; -1 = what has room."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncation removes tokens; default left."
    )
    prompt_logprobs: int | None = _ranged(0, 20)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=PromptShape)]
    suffix: str | None = Field(None, description="What follows the gap that is to be filled.")
    best_of: int | None = _ranged(1, 20, "At least n; above n not with stream.")
    echo: bool | None = None
    logprobs: int | None = _ranged(0, 20, "Alternates; 0 is not null.")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TemplateOptions(BaseModel):
    """What a conversation's template is told beside the messages."""

    model_config = ConfigDict(strict=True)

    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables of the chat template, such as enable_thinking.",
        json_schema_extra=VARIABLES,
    )
    reasoning_effort: Effort | None = Field(
        None, description="A variable of the chat template; none also sets enable_thinking false."
    )


class ReasoningFields(BaseModel):
    """The fields of a chat request that concern thoughts."""

    model_config = ConfigDict(strict=True)

    max_reasoning_tokens: int | None = _ranged(0, _INT32, "A thought is closed after so many.")
    thinking_token_budget: int | None = _ranged(0, _INT32, "As max_reasoning_tokens.")


class ChatCompletionRequest(TemplateOptions, ReasoningFields, ToolFields, GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = _ranged(
        0, _INT32, "Default: the context's rest, unless the server sets one."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _ranged(0, 20, "Needs logprobs.")
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = None


class TokenizeRequest(TemplateOptions):
    """POST /tokenize: `prompt` (or `content`), or `messages`."""

    model_config = ConfigDict(
        strict=True, json_schema_extra=one_of("prompt", "content", "messages")
    )

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default true, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: TokenIds
