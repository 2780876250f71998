"""Messages of a conversation as callers send them: text only, refused in one plain sentence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from server.api.errors import quote

Role = Literal["developer", "system", "user", "assistant"]
_ROLES = ("developer", "system", "user", "assistant")

#: Parts that OpenAI's API knows beside text, and what a person calls them.
_MEDIA = {
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


class TextPart(BaseModel):
    """A piece of text."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


def _check_role(value: Any) -> Any:
    if not isinstance(value, str) or value not in _ROLES:
        shown = quote(value) if isinstance(value, str) else "no string"
        raise ValueError(
            f"the role is {shown}, but it must be one of developer, system, user and assistant"
        )
    return value


def _check_content(value: Any) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("send a string, or a non-empty list of parts with type text")
    return [_check_part(index, part) for index, part in enumerate(value)]


def _check_part(index: int, part: Any) -> TextPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise ValueError(
            f"part {index} is {_MEDIA[kind]} (type {kind}), but this server reads text only"
        )
    if kind == "text" and isinstance(text := part.get("text"), str):
        return TextPart(type="text", text=text)
    raise ValueError(f'part {index} must be such as {{"type": "text", "text": "..."}}')


_Parts = Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[
    str | list[TextPart], PlainValidator(_check_content, json_schema_input_type=str | _Parts)
]


class ChatMessage(BaseModel):
    """One message. Tools and media are not supported."""

    model_config = ConfigDict(strict=True)

    role: Annotated[Role, PlainValidator(_check_role, json_schema_input_type=Role)]
    content: Content
    name: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None


#: A template is a program that runs once for each of them, on the event loop.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
