"""Messages of a conversation as callers send them: text and tool calls, refused in one plain
sentence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from server.api.errors import quote

Role = Literal["developer", "system", "user", "assistant", "tool"]
_ROLES = ("developer", "system", "user", "assistant", "tool")

#: Names of a thought: DeepSeek's and vLLM's.
THOUGHTS = ("reasoning_content", "reasoning")

#: Parts that OpenAI's API knows beside text, and what a person calls them.
MEDIA = {
    "image_url": "an image",
    "input_image": "an image",
    "image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "video": "a video",
    "file": "a file",
    "input_file": "a file",
}


#: Parts of one message. Each is looked at, while nobody else is served.
MOST_PARTS = 1024


class TextPart(BaseModel):
    """A piece of text."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


def _check_role(value: Any) -> Any:
    if not isinstance(value, str) or value not in _ROLES:
        shown = quote(value) if isinstance(value, str) else "no string"
        raise ValueError(
            f"the role is {shown}, but it must be one of developer, system, user, assistant "
            "and tool"
        )
    return value


def _check_content(value: Any) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("send a string, or a non-empty list of parts with type text")
    if len(value) > MOST_PARTS:
        raise ValueError(f"it has {len(value)} parts; at most {MOST_PARTS} are allowed")
    return [_check_part(index, part) for index, part in enumerate(value)]


def _check_part(index: int, part: Any) -> TextPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise ValueError(
            f"part {index} is {MEDIA[kind]} (type {kind}), but this server reads text only"
        )
    if kind == "text" and isinstance(text := part.get("text"), str):
        return TextPart(type="text", text=text)
    raise ValueError(f'part {index} must be such as {{"type": "text", "text": "..."}}')


_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS)]
Content = Annotated[
    str | list[TextPart], PlainValidator(_check_content, json_schema_input_type=str | _Parts)
]


class CalledFunction(BaseModel):
    """What was called, with arguments as the model wrote them."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(BaseModel):
    """A call that an assistant made before."""

    model_config = ConfigDict(strict=True)

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction


def _check_message(value: Any) -> Any:
    """Rules between a message's fields."""
    if not isinstance(value, dict):
        return value
    role, calls = value.get("role"), value.get("tool_calls")
    if calls and role != "assistant":
        raise ValueError("only messages of the assistant have tool_calls")
    if role == "tool" and not isinstance(value.get("tool_call_id"), str):
        raise ValueError("a message of a tool needs tool_call_id, the call that it answers")
    thought = [name for name in THOUGHTS if value.get(name) is not None]
    if thought and role != "assistant":
        raise ValueError(f"only messages of the assistant have {thought[0]}")
    if value.get("content") is None and not calls and not thought:
        raise ValueError(
            "content is missing; only a message with tool_calls or reasoning_content may go without"
        )
    return value


def _describe_message(schema: dict[str, Any]) -> None:
    """The same rules, for the OpenAPI document."""
    calls = {
        "required": ["tool_calls"],
        "properties": {"tool_calls": {"minItems": 1, "type": "array"}},
    }
    speaks = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
    thinks = [{"required": [name], "properties": {name: {"type": "string"}}} for name in THOUGHTS]
    tool = {"properties": {"role": {"const": "tool"}}}
    assistant = {"properties": {"role": {"const": "assistant"}}}
    named = {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}}
    schema["allOf"] = [
        {"anyOf": [speaks, calls, *thinks]},
        {"if": {"anyOf": [calls, *thinks]}, "then": assistant},
        {"if": tool, "then": named},
    ]


class ChatMessage(BaseModel):
    """One message. Media are not supported."""

    model_config = ConfigDict(strict=True, json_schema_extra=_describe_message)

    _rules = model_validator(mode="before")(_check_message)

    role: Annotated[Role, PlainValidator(_check_role, json_schema_input_type=Role)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str | None, Field(description="An earlier answer's thought.")] = (
        None
    )
    reasoning: Annotated[str | None, Field(description="Another name of reasoning_content.")] = None
    function_call: None = None
    audio: None = None

    @property
    def thought(self) -> str | None:
        """What the assistant thought before this message."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


#: A template is a program that runs once for each of them, on the event loop.
MOST_MESSAGES = 4096
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
