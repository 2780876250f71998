"""A conversation as chat templates expect it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.api.checks import joined
from server.api.errors import ApiError
from server.api.messages import ChatMessage
from server.api.tools import ToolFields
from server.text.calls import format_of


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, arguments of calls as objects, and no role
    of newer invention."""
    result = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        content = "" if message.content is None else joined(message.content)
        plain: dict[str, Any] = {"role": role, "content": content}
        if message.thought:
            plain["reasoning_content"] = plain["reasoning"] = message.thought
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _object(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        result.append(plain)
    return result


def last_text(messages: Sequence[ChatMessage]) -> str:
    """What the last message says."""
    content = messages[-1].content
    return "" if content is None else joined(content)


def check_tools(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    """The same, for a certain template.

    Raises:
        ApiError: calls or answers of tools, which this template would drop without a word.
    """
    for index, message in enumerate(messages):
        if (message.tool_calls or message.role == "tool") and format_of(template) is None:
            raise ApiError(
                400,
                f"messages.{index} is of a tool or calls one, but this model's chat template "
                "knows no tools.",
                param="messages",
            )
    return plain_messages(messages)


def tools_of(body: ToolFields) -> list[dict[str, Any]]:
    """Tools that the template is to show; none where the model must call none."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _object(arguments: str) -> Any:
    """Arguments as an object, which templates write down their own way; else as they are."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
