"""From API requests to engine requests: the only file that knows both."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.errors import InvalidRequest
from engine.types import EngineInfo, Request, SamplingParams, SpeculationParams
from server.api.checks import (
    bounded,
    check_choices,
    check_common,
    is_token_ids,
    joined,
    largest,
    plain_messages,
    require,
    template_variables,
)
from server.api.context import ServerContext
from server.api.errors import ApiError, quote
from server.api.generation import Job
from server.api.lengths import Count, max_tokens, truncated
from server.api.options import ServerOptions
from server.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from server.text.choice import TextRules
from server.text.codec import TextCodec

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling, so that no id comes twice


async def completion_job(context: ServerContext, codec: TextCodec, body: CompletionRequest) -> Job:
    """Checks a completion request and writes it down for the engine.

    Raises:
        ApiError, InvalidRequest: what is wrong, with the field's name.
    """
    options = context.options
    check_common(context, body)
    n, best_of = body.n if body.n is not None else 1, body.best_of
    if best_of is not None:
        require(1 <= best_of <= 20, "best_of", best_of, "from 1 to 20")
        require(best_of >= n, "best_of", best_of, f"at least n ({n})")
        ranked_stream = bool(body.stream) and best_of > n
        require(not ranked_stream, "best_of", best_of, f"n ({n}) or left out with stream")
    logprobs = bounded("logprobs", body.logprobs, options.max_logprobs)
    samples = n if best_of is None else best_of
    ranked = samples > n  # candidates are ranked by mean log probability
    count = Count(
        max_tokens=body.max_tokens,
        default_max_tokens=options.default_max_tokens,
        field="max_tokens",
        prompt="prompt",
        samples=samples,
        logprobs=logprobs if logprobs is not None or not ranked else 0,
        prompt_logprobs=largest(body.prompt_logprobs, logprobs if body.echo else None),
    )
    prompt = body.prompt
    items: Sequence[Any] = [prompt] if isinstance(prompt, str) or is_token_ids(prompt) else prompt
    require(
        len(items) <= options.max_prompts,
        "prompt",
        f"a list of {len(items)}",
        f"at most {options.max_prompts} prompts",
    )
    check_choices(options, samples, len(items))
    texts = [item for item in items if isinstance(item, str)]
    add_special = body.add_special_tokens is not False
    prompts = await codec.encode(texts, add_special_tokens=add_special) if texts else list(items)
    return await _job(context, codec, body, count, prompts, texts)


async def chat_job(context: ServerContext, codec: TextCodec, body: ChatCompletionRequest) -> Job:
    """Checks a chat request and writes it down for the engine.

    Raises:
        ApiError, InvalidRequest: what is wrong, with the field's name.
    """
    options = context.options
    check_common(context, body)
    top = bounded("top_logprobs", body.top_logprobs, options.max_logprobs)
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    samples = body.n if body.n is not None else 1
    preferred = body.max_completion_tokens
    count = Count(
        max_tokens=preferred if preferred is not None else body.max_tokens,
        default_max_tokens=options.default_chat_max_tokens,
        field="max_tokens" if preferred is None else "max_completion_tokens",
        prompt="messages",
        samples=samples,
        logprobs=(top or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    check_choices(options, samples, 1)
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    text = codec.render_chat(
        plain_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
        variables=template_variables(body),
    )
    # The template has written the special tokens already.
    prompts = await codec.encode([text], add_special_tokens=bool(body.add_special_tokens))
    return await _job(context, codec, body, count, prompts, [text])


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


# -------------------------------------------------------------------------- the engine's side


async def _job(
    context: ServerContext,
    codec: TextCodec,
    body: GenerationRequest,
    count: Count,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> Job:
    info, arrival, unique = context.engine.info, time.monotonic(), uuid.uuid4().hex
    for prompt in prompts:
        check_token_ids(prompt, info, "prompt")
    sampling = await _sampling(context, codec, body, count)
    speculation = await _speculation(codec, body, info)
    requests = []
    for index, prompt in enumerate(prompts):
        kept = truncated(
            prompt, count, info, keep=body.truncate_prompt_tokens, side=body.truncation_side
        )
        requests.append(
            Request(
                request_id=f"{unique}-{index}",
                prompt=tuple(kept),
                sampling=replace(sampling, max_tokens=max_tokens(len(kept), count, info)),
                speculation=speculation,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                arrival=arrival,
            )
        )
    whole = bool(texts) and body.truncate_prompt_tokens is None
    return Job(
        requests=tuple(requests),
        rules=_text_rules(context.options, body, info),
        prompt_texts=tuple(texts) if whole else (None,) * len(requests),
    )


async def _sampling(
    context: ServerContext, codec: TextCodec, body: GenerationRequest, count: Count
) -> SamplingParams:
    """Everything but `max_tokens`, which depends on the prompt."""
    info, options = context.engine.info, context.options
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(body, name)
        if ids is not None and name == "stop_token_ids":
            _few(options, name, len(ids))
        check_token_ids(ids or (), info, name)
    allowed = body.allowed_token_ids
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
        )
    except InvalidRequest as error:
        if error.param != "max_tokens" or count.field == "max_tokens":
            raise
        message = str(error).replace("max_tokens", count.field, 1)
        raise InvalidRequest(message, count.field) from None


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
    spellings = [prefix + word for word in stripped for prefix in ("", " ")]
    encoded = await codec.encode(spellings, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded))


def _few(options: ServerOptions, param: str, count: int) -> None:
    most = options.max_token_list
    require(count <= most, param, f"a collection of {count}", f"at most {most} entries")


def _text_rules(options: ServerOptions, body: GenerationRequest, info: EngineInfo) -> TextRules:
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
    named = frozenset(body.stop_token_ids or ())
    return TextRules(
        stop=tuple(dict.fromkeys(stop)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        terminators=named if body.ignore_eos else named | info.eos_token_ids,
        stop_token_ids=named,
    )


async def _speculation(
    codec: TextCodec, body: GenerationRequest, info: EngineInfo
) -> SpeculationParams:
    asked, prediction = body.speculation, body.prediction
    tokens: Sequence[int] = ()
    if prediction is not None:
        [tokens] = await codec.encode([joined(prediction.content)], add_special_tokens=False)
    drafter = asked.drafter if asked is not None else None
    if drafter is not None and drafter not in (*info.drafters, "none"):
        loaded = ", ".join([*info.drafters, "none"])
        raise InvalidRequest(
            f"speculation.drafter is {quote(drafter)}, which is not loaded; choose from: {loaded}.",
            "speculation.drafter",
        )
    return SpeculationParams(
        enabled=asked.enabled if asked is not None else None,
        drafter=drafter,
        max_draft=asked.max_draft if asked is not None else None,
        # What lies beyond the context can never be generated.
        prediction=tuple(tokens[: info.max_model_len]),
    )
