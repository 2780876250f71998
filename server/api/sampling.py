"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.grammar import Grammar
from engine.types import EngineInfo, SamplingParams
from server.api.checks import require
from server.api.context import ServerContext
from server.api.errors import ApiError, quote
from server.api.formats import grammar_source
from server.api.lengths import Count
from server.api.options import ServerOptions
from server.api.schemas import GenerationRequest
from server.text.codec import TextCodec

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling, so that no id comes twice


async def sampling_params(
    context: ServerContext,
    codec: TextCodec,
    body: GenerationRequest,
    count: Count,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """What a request says on how tokens are drawn; `max_tokens` is as the caller wrote it.

    Args:
        grammar: that the request's tools ask for.

    Raises:
        ApiError: tools and another field both bind the answer.
        InvalidRequest: a value is out of its range.
    """
    info, options = context.engine.info, context.options
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(body, name)
        if ids is not None and name == "stop_token_ids":
            _few(options, name, len(ids))
        check_token_ids(ids or (), info, name)
    allowed = body.allowed_token_ids
    grammar = await _grammar(codec, body, info, grammar)
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    try:
        return SamplingParams(
            **given,
            max_tokens=count.max_tokens if count.max_tokens is not None else 2**31 - 1,
            top_k=0 if body.top_k in (None, -1) else body.top_k,
            logit_bias=_logit_bias(options, body, info),
            allowed_token_ids=None if allowed is None else frozenset(allowed),
            bad_words=await _bad_words(options, codec, body),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            seed=body.seed,
            n=count.samples,
            logprobs=count.logprobs,
            prompt_logprobs=count.prompt_logprobs,
            grammar=grammar,
        )
    except InvalidRequest as error:
        if error.param != "max_tokens" or count.field == "max_tokens":
            raise
        message = str(error).replace("max_tokens", count.field, 1)
        raise InvalidRequest(message, count.field) from None


async def _grammar(
    codec: TextCodec, body: GenerationRequest, info: EngineInfo, of_tools: Grammar | None
) -> Grammar | None:
    """What the answer must match."""
    source = grammar_source(body)
    if source is None:
        return of_tools
    if of_tools is not None:
        name = source.param
        if name == "response_format":  # its schema is within, unless a tool must be called
            return of_tools
        raise ApiError(400, f"{name} cannot be had with tools that must be called.", param=name)
    return await codec.grammars.compile(source, info.eos_token_ids)


def _logit_bias(
    options: ServerOptions, body: GenerationRequest, info: EngineInfo
) -> dict[int, float]:
    bias = body.logit_bias or {}
    _few(options, "logit_bias", len(bias))
    bad = next((key for key in bias if not _TOKEN_KEY.fullmatch(key)), None)
    if bad is not None:
        raise InvalidRequest(
            f'logit_bias has the key {quote(bad)}; keys must be token ids such as "50256".',
            "logit_bias",
        )
    ids = {int(key): value for key, value in bias.items()}
    check_token_ids(list(ids), info, "logit_bias")
    return ids


async def _bad_words(
    options: ServerOptions, codec: TextCodec, body: GenerationRequest
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and after a space."""
    words = body.bad_words or []
    _few(options, "bad_words", len(words))
    stripped = [word.lstrip() for word in words]
    require(all(stripped), "bad_words", "an empty word", "a list of non-empty words")
    longest = max(map(len, stripped), default=0)
    require(
        longest <= options.max_stop_length,
        "bad_words",
        f"a word of {longest} characters",
        f"made of words of at most {options.max_stop_length} characters",
    )
    spellings = [prefix + word for word in stripped for prefix in ("", " ")]
    encoded = await codec.encode(spellings, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded))


def _few(options: ServerOptions, param: str, count: int) -> None:
    most = options.max_token_list
    require(count <= most, param, f"a collection of {count}", f"at most {most} entries")


def check_token_ids(ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raises unless every id is in the model's vocabulary."""
    bad = next((token for token in ids if not 0 <= token < info.vocab_size), None)
    if bad is not None:
        shown = bad if abs(bad) < 2**63 else "a huge number"
        raise InvalidRequest(
            f"{param} holds the token id {shown}, which is out of vocabulary; ids go from 0 to "
            f"{info.vocab_size - 1}.",
            param,
        )
