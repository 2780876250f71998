"""A request of /v1/responses as the chat request that asks for the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from engine.errors import EngineError, InvalidRequest
from server.api.checks import is_one_of, joined
from server.api.errors import ApiError, quote, to_api_error
from server.api.messages import MOST_MESSAGES, CalledFunction, ChatMessage, ToolCall
from server.api.response_schemas import (
    AllowedTools,
    CallItem,
    CallOutputItem,
    ChosenFunction,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    ResponseSchemaFormat,
    ResponseTool,
)
from server.api.schemas import (
    ChatCompletionRequest,
    ReasoningFields,
    SamplingFields,
    TemplateOptions,
)
from server.api.unsupported import UNSUPPORTED_RESPONSES

#: What a field of the chat request is called here.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "include",
}
_IN_MESSAGES = re.compile(
    r"\b(max_completion_tokens|max_tokens|response_format|top_logprobs|messages)(\.\d+)?\b"
)

_PASSED_ON = (
    *SamplingFields.model_fields,
    *TemplateOptions.model_fields,
    *ReasoningFields.model_fields,
)


def chat_request(body: ResponseRequest) -> ChatCompletionRequest:
    """The chat request that asks for the same.

    Raises:
        ApiError: a field that only makes sense where responses are stored, or fields that
            contradict each other.
    """
    _check(body)
    given = {name: getattr(body, name) for name in _PASSED_ON if name in body.model_fields_set}
    tools, choice = _tools(body)
    if wants_logprobs(body):
        if tools and choice != "none":
            raise ApiError(
                400,
                "Log probabilities are not available with tools that may be called; leave "
                "tools or top_logprobs out.",
                param="top_logprobs",
            )
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _format(body.text.format)
    return ChatCompletionRequest.model_validate(
        {
            **given,
            "messages": _messages(body),
            "tools": [_nested(tool) for tool in tools] or None,
            "tool_choice": _chat_choice(choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
        }
    )


def wants_logprobs(body: ResponseRequest) -> bool:
    """Whether log probabilities go with the text."""
    return body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())


def renamed(error: ApiError | EngineError) -> ApiError:
    """An error of the chat path, with the names that the fields have here."""
    found = to_api_error(error)
    return ApiError(
        found.status,
        _IN_MESSAGES.sub(lambda match: _NAMES.get(match[1], match[0]), found.message),
        param=_NAMES.get(found.param or "", found.param),
        code=found.code,
        headers=found.headers,
    )


def _check(body: ResponseRequest) -> None:
    for name, value in (body.model_extra or {}).items():
        neutral, reason = UNSUPPORTED_RESPONSES.get(name, ((value,), ""))
        if value is not None and not is_one_of(value, neutral):
            raise ApiError(400, f"{name} is not supported: {reason}.", param=name)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if body.speculation is not None and body.speculation.trace:
        raise InvalidRequest(
            "speculation.trace is not available here; /v1/chat/completions has it.",
            "speculation.trace",
        )
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None and body.reasoning_effort is not None:
        raise ApiError(
            400, "Send reasoning.effort or reasoning_effort, not both.", param="reasoning_effort"
        )


def _format(asked: Any) -> Any:
    if not isinstance(asked, ResponseSchemaFormat):
        return asked
    named = {"name": asked.name, "schema": asked.body, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": named}


# ------------------------------------------------------------------------------------ tools


def _tools(body: ResponseRequest) -> tuple[Sequence[ResponseTool], str | ChosenFunction | None]:
    """The tools that may be called, and which of them must be."""
    tools, choice = body.tools or [], body.tool_choice
    if not isinstance(choice, AllowedTools):
        return tools, choice
    allowed = {tool.name for tool in choice.tools}
    if missing := sorted(allowed - {tool.name for tool in tools}):
        raise ApiError(
            400,
            f"tool_choice allows {quote(missing[0])}, which is not in tools.",
            param="tool_choice",
        )
    return [tool for tool in tools if tool.name in allowed], choice.mode


def _nested(tool: ResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _chat_choice(choice: str | ChosenFunction | None) -> Any:
    if not isinstance(choice, ChosenFunction):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


# --------------------------------------------------------------------------------- messages


def _said(**fields: Any) -> ChatMessage:
    return ChatMessage.model_validate(fields)


def _messages(body: ResponseRequest) -> list[ChatMessage]:
    messages = []
    if body.instructions is not None:
        messages.append(_said(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, _said(role="user", content=body.input)]
    messages += _conversation(body.input)
    if not 1 <= len(messages) <= MOST_MESSAGES:
        raise ApiError(
            400,
            f"input and instructions make {len(messages)} conversation entries, but there must be "
            f"from 1 to {MOST_MESSAGES}.",
            param="input",
        )
    return messages


def _conversation(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Items as messages: what an assistant thought, said and called at one time is one message."""
    messages: list[ChatMessage] = []
    called: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            _add_message(messages, item)
        elif isinstance(item, ReasoningItem):
            if item.text:
                messages.append(_said(role="assistant", reasoning_content=item.text))
        elif isinstance(item, CallItem):
            called.add(item.call_id)
            _add_call(messages, item)
        elif isinstance(item, CallOutputItem):
            if item.call_id not in called:
                raise ApiError(
                    400,
                    f"input.{index} answers the call {quote(item.call_id)}, but no function_call "
                    "before it has this call_id.",
                    param="input",
                )
            output = joined(item.output)
            messages.append(_said(role="tool", content=output, tool_call_id=item.call_id))
    return messages


def _add_message(messages: list[ChatMessage], item: MessageItem) -> None:
    """Adds a message, or to an assistant's thought what it said then."""
    content = joined(item.content)
    last = messages[-1] if messages else None
    bare = last is not None and last.content is None and not last.tool_calls
    if item.role == "assistant" and last is not None and bare:
        messages[-1] = last.model_copy(update={"content": content})
    else:
        messages.append(_said(role=item.role, content=content))


def _add_call(messages: list[ChatMessage], item: CallItem) -> None:
    """Adds a call to the assistant's message right before it, or as a message of its own."""
    function = CalledFunction(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, type="function", function=function)
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})
    else:
        messages.append(_said(role="assistant", tool_calls=[call]))
