"""Checks of API requests that need no engine: unsupported fields, limits, the model's name."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

from engine.errors import InvalidRequest
from server.api.context import ServerContext
from server.api.errors import ApiError, quote
from server.api.messages import TextPart
from server.api.options import ServerOptions
from server.api.schemas import GenerationRequest, SamplingFields, TemplateOptions
from server.api.unsupported import UNSUPPORTED
from server.text.codec import RESERVED_VARIABLES

_HEADER_SAFE = re.compile(r"[^A-Za-z0-9._-]")


def check_common(context: ServerContext, body: GenerationRequest) -> None:
    check_model(context, body.model)
    for name, value in (body.model_extra or {}).items():
        neutral = UNSUPPORTED.get(name)
        if neutral is not None and value is not None and not is_one_of(value, neutral):
            raise ApiError(400, f"{name} is not supported by this server.", param=name)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if body.stream and body.prompt_logprobs:
        raise ApiError(
            400, "prompt_logprobs is not available with stream.", param="prompt_logprobs"
        )
    bounded("prompt_logprobs", body.prompt_logprobs, context.options.max_logprobs)
    if body.priority is not None:
        require(-(2**31) <= body.priority < 2**31, "priority", body.priority, "a 32-bit integer")


def is_one_of(value: object, neutral: Sequence[object]) -> bool:
    """Membership that tells true from 1 and false from 0."""
    kind = isinstance(value, bool)
    return any(value == other and isinstance(other, bool) == kind for other in neutral)


def check_choices(options: ServerOptions, samples: int, prompts: int) -> None:
    require(samples >= 1, "n", samples, "1 or more")
    require(
        samples * prompts <= options.max_choices,
        "n",
        samples,
        f"small enough for at most {options.max_choices} choices in all ({prompts} prompt(s))",
    )


def check_stop(options: ServerOptions, body: GenerationRequest) -> None:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    require(
        len(stop) <= options.max_stop_strings,
        "stop",
        f"a list of {len(stop)}",
        f"at most {options.max_stop_strings} strings",
    )
    for string in stop:
        require(
            1 <= len(string) <= options.max_stop_length,
            "stop",
            f"a string of {len(string)} characters",
            f"made of strings of 1 to {options.max_stop_length} characters",
        )


def require(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} is {str(value)[:40]}, but it must be {rule}.", param)


def bounded(param: str, value: int | None, most: int) -> int | None:
    if value is not None:
        require(0 <= value <= most, param, value, f"from 0 to {most}")
    return value


def largest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def is_token_ids(prompt: Sequence[Any]) -> bool:
    return type(prompt[0]) is int


def joined(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def template_variables(body: TemplateOptions) -> dict[str, Any]:
    """What the chat template may read beside the messages.

    Raises:
        ApiError: a name is not the caller's to set, or one is given twice.
    """
    variables = dict(body.chat_template_kwargs or {})
    if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
        raise ApiError(
            400,
            f"chat_template_kwargs sets {reserved[0]}, which is not a variable of the template "
            "that a request may set; leave it out.",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is None:
        return variables
    if "reasoning_effort" in variables:
        raise ApiError(
            400,
            "Send reasoning_effort by itself or in chat_template_kwargs, not both.",
            param="reasoning_effort",
        )
    off = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return {**off, **variables, "reasoning_effort": body.reasoning_effort}


def ignored_params(body: SamplingFields, known: Container[str] = UNSUPPORTED) -> str:
    """Names of fields that are not `known`, safe for a header; empty if there are none."""
    names = (name for name in body.model_extra or {} if name not in known)
    safe = (_HEADER_SAFE.sub("", name)[:64] for name in names)
    return ", ".join([name for name in safe if name][:20])


def check_model(context: ServerContext, model: str | None) -> None:
    """Raises a 404 unless `model` is the served one, or left out."""
    if model is not None and model not in context.model_names:
        raise ApiError(
            404,
            f"The model {quote(model)} does not exist here; this server serves "
            f"{', '.join(quote(name, 128) for name in context.model_names)}.",
            param="model",
            code="model_not_found",
        )
