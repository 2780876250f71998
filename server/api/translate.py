"""From API requests to engine requests: the only file that knows both."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.types import EngineInfo, Request, SamplingParams, SpeculationParams
from server.api.checks import (
    bounded,
    check_choices,
    check_common,
    check_stop,
    is_token_ids,
    largest,
    require,
    template_variables,
)
from server.api.context import ServerContext
from server.api.conversation import check_tools, tools_of
from server.api.drafting import speculation_params
from server.api.errors import ApiError
from server.api.formats import answer_schema
from server.api.generation import Job
from server.api.infill import check_suffix
from server.api.lengths import Count, check_messages, check_texts, max_tokens, truncated
from server.api.reasoning import (
    reasoning_budget,
    reasoning_format,
    reasoning_phase,
    signs_by_control,
    thought_grammar,
)
from server.api.sampling import check_token_ids, sampling_params
from server.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from server.api.tools import ToolUse, tool_use
from server.text.choice import TextRules
from server.text.codec import TextCodec
from server.text.reasoning import ReasoningFormat, ReasoningRules


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
    cuts = body.truncate_prompt_tokens is not None
    check_texts(texts, codec, context.engine.info, "prompt", truncates=cuts)
    gap = check_suffix(codec, body)
    check_texts([body.suffix or ""], codec, context.engine.info, "suffix")
    wishes = await _wishes(context, codec, body, count)
    add_special = body.add_special_tokens is not False
    if gap:
        prompts = await codec.infill.prompts(items, body.suffix or "", begin=add_special)
        texts = [
            t if isinstance(t, str) else codec.decode(t, skip_special_tokens=False) for t in items
        ]
        wishes = wishes.ending(codec.infill.ends)
        return _job(context.engine.info, body, count, wishes, prompts, texts)
    prompts = await codec.encode(texts, add_special_tokens=add_special) if texts else list(items)
    return _job(context.engine.info, body, count, wishes, prompts, texts)


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
    use = await tool_use(context, codec, body, answer_schema(body))
    form = reasoning_format(context, codec)
    budget = reasoning_budget(body, form)
    wishes = await _wishes(context, codec, body, count, use, form)
    messages = check_tools(body.messages, codec.template)
    cuts = body.truncate_prompt_tokens is not None
    check_messages(messages, codec, context.engine.info, truncates=cuts)
    text = await codec.write_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
        variables=template_variables(body),
        tools=tools_of(body),
    )
    check_texts([text], codec, context.engine.info, "messages", truncates=cuts)
    if form is not None:
        phase = reasoning_phase(form, text, body.messages, continued=continued)
        wishes = await _thoughtful(context, codec, wishes, ReasoningRules(form, phase), budget)
    # The template has written the special tokens already.
    prompts = await codec.encode([text], add_special_tokens=bool(body.add_special_tokens))
    return _job(context.engine.info, body, count, wishes, prompts, [text])


# -------------------------------------------------------------------------- the engine's side


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What a request asks for besides its prompts; `sampling` lacks their `max_tokens`."""

    sampling: SamplingParams
    speculation: SpeculationParams
    rules: TextRules
    tools: ToolUse | None = None

    def ending(self, tokens: frozenset[int]) -> _Wishes:
        """The same of answers that more tokens end, unless none are to."""
        sampling, rules = self.sampling, self.rules
        if not sampling.ends_at_eos:
            return self
        return replace(
            self,
            sampling=replace(sampling, stop_token_ids=sampling.stop_token_ids | tokens),
            rules=replace(rules, terminators=rules.terminators | tokens),
        )


async def _wishes(
    context: ServerContext,
    codec: TextCodec,
    body: GenerationRequest,
    count: Count,
    use: ToolUse | None = None,
    form: ReasoningFormat | None = None,
) -> _Wishes:
    """What is quick to check, before prompts are tokenised."""
    check_stop(context.options, body)
    grammar = None if use is None else use.grammar
    sampling = await sampling_params(context, codec, body, count, grammar)
    return _Wishes(
        sampling=sampling,
        speculation=await speculation_params(
            codec, body, context.engine.info, context.options.allow_trace
        ),
        rules=_text_rules(
            body, sampling, context.engine.info, keep_control=signs_by_control(codec, use, form)
        ),
        tools=use,
    )


def _job(
    info: EngineInfo,
    body: GenerationRequest,
    count: Count,
    wishes: _Wishes,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> Job:
    arrival, unique = time.monotonic(), uuid.uuid4().hex
    requests = []
    for index, prompt in enumerate(prompts):
        keep, side = body.truncate_prompt_tokens, body.truncation_side
        kept = truncated(prompt, count, info, keep=keep, side=side)
        limit = max_tokens(len(kept), count, info)  # what cannot fit is not looked at
        check_token_ids(kept, info, "prompt")
        requests.append(
            Request(
                request_id=f"{unique}-{index}",
                prompt=tuple(kept),
                sampling=replace(wishes.sampling, max_tokens=limit),
                speculation=wishes.speculation,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                arrival=arrival,
            )
        )
    whole = bool(texts) and body.truncate_prompt_tokens is None
    return Job(
        requests=tuple(requests),
        rules=wishes.rules,
        prompt_texts=tuple(texts) if whole else (None,) * len(requests),
        tools=wishes.tools,
    )


async def _thoughtful(
    context: ServerContext,
    codec: TextCodec,
    wishes: _Wishes,
    rules: ReasoningRules,
    budget: int | None,
) -> _Wishes:
    """The same of answers that may begin with a thought of `budget` tokens (None = of any)."""
    answer = wishes.sampling.grammar
    rules = replace(rules, exact=answer is not None)
    grammar = await thought_grammar(codec, context.engine.info, rules, answer, budget)
    return replace(
        wishes,
        sampling=replace(wishes.sampling, grammar=grammar),
        rules=replace(wishes.rules, reasoning=rules),
    )


def _text_rules(
    body: GenerationRequest, sampling: SamplingParams, info: EngineInfo, *, keep_control: bool
) -> TextRules:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    named = frozenset(body.stop_token_ids or ())
    return TextRules(
        stop=tuple(dict.fromkeys(stop)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not keep_control,
        min_tokens=body.min_tokens or 0,
        terminators=named | info.eos_token_ids if sampling.ends_at_eos else named,
        stop_token_ids=named,
    )
