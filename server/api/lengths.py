"""How many tokens: of the prompt, of the completion, and of the context they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ContextLengthExceeded
from engine.types import EngineInfo
from server.api.checks import require
from server.text.codec import TextCodec

#: Of texts whose tokens cannot be bounded so many characters are read, or so many for each token
#: of the context, which is several times what any language makes of one.
_MOST_UNBOUNDED, _MOST_PER_TOKEN = 1 << 20, 16


@dataclass(frozen=True, slots=True)
class Count:
    """How many tokens and samples a request wants.

    Args:
        max_tokens: None = `default_max_tokens`, as far as the context has room.
        default_max_tokens: None = all the room there is.
        field: the name the caller used for `max_tokens`.
        prompt: the name of the field that holds the prompt.
        samples: choices per prompt that the engine makes.
    """

    max_tokens: int | None
    default_max_tokens: int | None
    field: str
    prompt: str
    samples: int
    logprobs: int | None
    prompt_logprobs: int | None


def check_texts(
    texts: Iterable[str],
    codec: TextCodec,
    info: EngineInfo,
    param: str,
    *,
    truncates: bool = False,
) -> None:
    """Refuses, before they are tokenised, texts that cannot fit the context.

    Args:
        truncates: whether what is too long is to be cut to the context: then longer texts are read,
            too. Within bounds, since which tokens are the last ones shows when all are known.

    Raises:
        ContextLengthExceeded: one is too long, however few tokens it makes; or longer than what
            is read where nobody knows how few that may be.
    """
    limit = info.max_model_len
    most = max(_MOST_UNBOUNDED, _MOST_PER_TOKEN * limit)
    for text in texts:
        least = codec.least_tokens(text)
        if least <= limit if least else len(text) <= most:
            continue
        if truncates and len(text) <= most:
            continue
        if truncates or not least:
            why = (
                "to be truncated" if truncates else "of this model, whose tokenizer may drop text,"
            )
            raise ContextLengthExceeded(
                f"{param} has {len(text)} characters; of a text {why} at most {most} are read. "
                "Shorten it.",
                param,
            )
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, {param} has "
            f"{len(text)} characters, which make at least {least} tokens. Shorten it.",
            param,
        )


def check_messages(
    messages: Iterable[Mapping[str, Any]],
    codec: TextCodec,
    info: EngineInfo,
    *,
    truncates: bool = False,
) -> None:
    """The same for a conversation before its template is run, which takes time as well. What users
    and the system say is what every template keeps, but for blanks around it.

    Raises:
        ContextLengthExceeded: as `check_texts`.
    """
    kept = (m["content"].strip() for m in messages if m["role"] in ("user", "system"))
    check_texts(["".join(kept)], codec, info, "messages", truncates=truncates)


def truncated(
    prompt: Sequence[int], count: Count, info: EngineInfo, *, keep: int | None, side: str | None
) -> Sequence[int]:
    """Keeps at most `keep` tokens of a prompt (None = all, -1 = what the context has room for),
    the last ones unless `side` is "right"."""
    if keep is None:
        return prompt
    require(
        keep == -1 or 1 <= keep <= info.max_model_len,
        "truncate_prompt_tokens",
        keep,
        f"-1, or from 1 to {info.max_model_len}",
    )
    if keep == -1:
        wanted = count.max_tokens if count.max_tokens is not None else count.default_max_tokens
        keep = max(1, _room(info) - (wanted or 1))
    return prompt[:keep] if side == "right" else prompt[-keep:]


def _room(info: EngineInfo) -> int:
    """Tokens of prompt and completion that can exist at once."""
    return min(info.max_model_len, info.num_pages * info.page_size)


def max_tokens(prompt_tokens: int, count: Count, info: EngineInfo) -> int:
    """The caller's own number if it fits; a default only as far as there is room."""
    wanted, limit = count.max_tokens, info.max_model_len
    if wanted is None:
        room = _room(info) - prompt_tokens
        if room >= 1:
            return room if count.default_max_tokens is None else min(room, count.default_max_tokens)
        wanted = 1
    if prompt_tokens + wanted > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt; {wanted} for the "
            f"completion). Shorten the prompt or lower {count.field}.",
            count.prompt,
        )
    return wanted
