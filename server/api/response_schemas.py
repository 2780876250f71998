"""Requests of /v1/responses: the same strictness as elsewhere, in the shapes of this endpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (  # fmt: skip
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
)

from server.api.errors import quote
from server.api.formats import JsonObjectFormat, Schema, TextFormat
from server.api.messages import MEDIA, TextPart
from server.api.schemas import Effort, ReasoningFields, SamplingFields, TemplateOptions
from server.api.tools import FunctionTool, NamedFunction
from server.api.unsupported import describe_unsupported_responses

_INT32 = 2**31 - 1

#: Parts of a message that are text, and the field that holds it.
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class InputText(BaseModel):
    """A piece of text."""

    model_config = ConfigDict(strict=True)

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(BaseModel):
    """What an assistant said instead of an answer."""

    model_config = ConfigDict(strict=True)

    type: Literal["refusal"]
    refusal: str


def _check_content(value: Any) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(  # noqa: TRY004
            "send a string, or a list of parts with type input_text or output_text"
        )
    return [_check_part(index, part) for index, part in enumerate(value)] or ""


def _check_part(index: int, part: Any) -> TextPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise ValueError(
            f"part {index} is {MEDIA[kind]} (type {kind}), but this server reads text only"
        )
    if isinstance(kind, str) and isinstance(text := part.get(_TEXTS.get(kind, "")), str):
        return TextPart(type="text", text=text)
    raise ValueError(f'part {index} must be such as {{"type": "input_text", "text": "..."}}')


InputContent = Annotated[
    str | list[TextPart],
    PlainValidator(_check_content, json_schema_input_type=str | list[InputText | Refusal]),
]


class MessageItem(BaseModel):
    """A message, also one that an earlier response had in its output."""

    model_config = ConfigDict(strict=True)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class CallItem(BaseModel):
    """A call of an earlier response."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class CallOutputItem(BaseModel):
    """What a call brought."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class Thought(BaseModel):
    """A piece of a thought."""

    model_config = ConfigDict(strict=True)

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(BaseModel):
    """A thought of an earlier response; its summary counts where its text is missing."""

    model_config = ConfigDict(strict=True)

    type: Literal["reasoning"]
    summary: list[Thought] | None = None
    content: list[Thought] | None = None

    @property
    def text(self) -> str:
        """What was thought."""
        return "\n".join(part.text for part in self.content or self.summary or ())


def _check_item(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type", "message" if "role" in value else None)
    if kind == "item_reference":
        raise ValueError("an item_reference needs stored responses; send the item itself")
    if kind not in _ITEMS:
        shown = quote(kind) if isinstance(kind, str) else "no string"
        raise ValueError(f"the type is {shown}, but it must be one of {', '.join(_ITEMS)}")
    return {**value, "type": kind}


InputItem = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_check_item),
]

Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=4096), Tag("list")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "list"),
]


class ResponseSchemaFormat(BaseModel):
    """JSON that a schema allows."""

    model_config = ConfigDict(strict=True)

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    body: Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted, without effect.")


class TextOptions(BaseModel):
    """What the answer's text must look like."""

    model_config = ConfigDict(strict=True)

    format: (
        Annotated[TextFormat | JsonObjectFormat | ResponseSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Accepted, without effect."
    )


class ReasoningOptions(BaseModel):
    """How much the model is to think."""

    model_config = ConfigDict(strict=True)

    effort: Effort | None = Field(None, description="A variable of the chat template.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted, without effect: thoughts are given whole."
    )


def _check_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise ValueError(
            f"the type is {quote(kind)}, but this server runs no tools of its own; the caller's "
            "functions (type function) are all that a model can call here"
        )
    return value


class ResponseTool(FunctionTool):
    """A function that the model may call, in the flat form of this endpoint."""

    type: Literal["function"]


class ChosenFunction(NamedFunction):
    """The tool that has to be called."""

    type: Literal["function"]


class AllowedTools(BaseModel):
    """The only tools of the list that may be called now."""

    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[ChosenFunction, BeforeValidator(_check_tool)]],
        Field(min_length=1, max_length=128),
    ]


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "str")
    return kind if kind in ("allowed_tools", "str") else "dict"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[ChosenFunction, BeforeValidator(_check_tool), Tag("dict")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]

_Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_Value = Annotated[str, Field(max_length=512)]


class ResponseStreamOptions(BaseModel):
    """Only with `stream`."""

    model_config = ConfigDict(strict=True)

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class ResponseRequest(TemplateOptions, ReasoningFields, SamplingFields):
    """POST /v1/responses."""

    model_config = ConfigDict(
        strict=True, extra="allow", json_schema_extra=describe_unsupported_responses
    )

    input: Input
    instructions: str | None = Field(None, description="Stands before the input.")
    text: TextOptions | None = None
    tools: (
        Annotated[
            list[Annotated[ResponseTool, BeforeValidator(_check_tool)]], Field(max_length=128)
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = Field(None, description="Default auto.")
    parallel_tool_calls: bool | None = Field(None, description="Default true.")
    max_output_tokens: int | None = Field(
        None,
        description="Default: the context's rest, unless the server sets one.",
        json_schema_extra={"minimum": 0, "maximum": _INT32},
    )
    include: list[_Includable] | None = Field(
        None, description="Thoughts are never encrypted; asking for it is without effect."
    )
    top_logprobs: int | None = Field(
        None,
        description="Not with tools that may be called.",
        json_schema_extra={"minimum": 0, "maximum": 20},
    )
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=64)], _Value], Field(max_length=16)] | None
    ) = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
