"""Thoughts before the answer: what a chat request may ask of them, and how they are told apart."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from engine.grammar import Grammar
from engine.types import EngineInfo
from server.api.checks import require
from server.api.context import ServerContext
from server.api.conversation import last_text
from server.api.errors import ApiError
from server.api.messages import ChatMessage
from server.api.schemas import ReasoningFields
from server.api.tools import ToolUse
from server.text.choice import Delta
from server.text.codec import TextCodec
from server.text.reasoning import (
    FORMATS,
    Phase,
    ReasoningFormat,
    ReasoningRules,
    format_of,
    phase_of,
    phase_within,
)
from server.text.thought import TagTokens, ThoughtGrammar

_MOST = 2**31 - 1


def reasoning_budget(body: ReasoningFields, form: ReasoningFormat | None) -> int | None:
    """Tokens after which a thought has to be closed; None = it may go on.

    Raises:
        ApiError: it is given twice, or the model writes no thoughts.
        InvalidRequest: it is out of its range.
    """
    given = {
        name: value
        for name in ("max_reasoning_tokens", "thinking_token_budget")
        if (value := getattr(body, name)) is not None
    }
    for name, value in given.items():
        require(0 <= value <= _MOST, name, value, f"from 0 to {_MOST}")
        if form is None:
            raise ApiError(
                400,
                f"{name} is {value}, but this model's chat template has no thoughts; leave it out, "
                "or serve a model whose template has them.",
                param=name,
            )
    if len(given) > 1:
        raise ApiError(
            400,
            "Send max_reasoning_tokens or thinking_token_budget, not both.",
            param="thinking_token_budget",
        )
    return next(iter(given.values()), None)


async def thought_grammar(
    codec: TextCodec,
    info: EngineInfo,
    rules: ReasoningRules,
    answer: Grammar | None,
    most: int | None,
) -> Grammar | None:
    """What a whole text must match whose answer must match `answer`, and whose thought is closed
    after `most` tokens.

    Raises:
        ApiError: the tokenizer cannot spell the tag that would close it.
    """
    if rules.phase == "after" or (answer is None and most is None):
        return answer
    tags = tag_tokens(codec, rules.form)
    if most is not None and not tags.ends[0]:
        raise ApiError(
            400,
            f"max_reasoning_tokens is {most}, but this model's tokenizer cannot spell "
            f"{rules.form.end}; leave it out.",
            param="max_reasoning_tokens",
        )
    if answer is not None:
        await asyncio.to_thread(tags.running_on, info.vocab_size)
    return ThoughtGrammar(tags, rules.phase, answer, most, info.vocab_size)


@functools.lru_cache(maxsize=4)
def tag_tokens(codec: TextCodec, form: ReasoningFormat) -> TagTokens:
    """A format's tags in a model's tokens."""
    return TagTokens(codec, form)


def reasoning_format(context: ServerContext, codec: TextCodec) -> ReasoningFormat | None:
    """How the served model writes thoughts; None = it writes none, or nobody is to look."""
    name = context.options.reasoning_parser
    if name == "auto":
        name = format_of(codec.template) or "none"
    return FORMATS.get(name)


def reasoning_phase(
    form: ReasoningFormat, prompt: str, messages: list[ChatMessage], *, continued: bool
) -> Phase:
    """Where in a thought, or before or after one, the model goes on from a prompt.

    Args:
        prompt: the conversation as the template wrote it, with all it opens for the model.
        continued: the model goes on with the last of the messages.
    """
    return phase_within(last_text(messages), form) if continued else phase_of(prompt, form)


def reasoning_message(rules: ReasoningRules | None, delta: Delta) -> dict[str, Any]:
    """The fields of a whole message that tell its thought, under DeepSeek's name and vLLM's."""
    if rules is None:
        return {}
    thought = delta.reasoning or None
    content = {"content": None} if thought and not delta.text else {}
    return {"reasoning_content": thought, "reasoning": thought, **content}


def reasoning_delta(delta: Delta) -> list[dict[str, Any]]:
    """The same of a stream's chunk, if there is any."""
    thought = delta.reasoning
    return [{"reasoning_content": thought, "reasoning": thought}] if thought else []


def signs_by_control(codec: TextCodec, use: ToolUse | None, form: ReasoningFormat | None) -> bool:
    """Whether calls or thoughts begin or end with a control token, which has to be read then."""
    signs = {form.begin, form.end} if form is not None else set[str]()
    if use is not None:
        signs.add(use.form.begin.strip())
    return not signs.isdisjoint(codec.special_ids)
