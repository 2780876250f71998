"""A row of logits computed once more, alone, to judge how near two tokens were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Span, build_batch
from engine.cache.pages import PRIVATE
from engine.core import EngineParts
from engine.sampling import Purpose, SamplingRow, gumbel, noise_key, process_logits
from engine.types import Request

#: Two scores that lie closer than this are a near-tie: a few units in the last place of a logit
#: between 16 and 32, where trained models have their best ones.
NEAR_TIE = {"float32": 1e-3, "float16": 1 / 32, "bfloat16": 1 / 4}

_CHUNK = 256  # tokens of a pass


def logits_after(parts: EngineParts, tokens: Sequence[int]) -> Tensor:
    """The target's logits [1, V] after `tokens`, from pages that are given back at once.

    Raises:
        RuntimeError: there are not enough free pages.
    """
    pool, target = parts.pool, parts.target
    table = pool.new_table(PRIVATE)
    if not pool.reserve(table, len(tokens)):
        raise RuntimeError(f"{pool.num_available} free pages cannot hold {len(tokens)} tokens")
    try:
        for start in range(0, len(tokens), _CHUNK):
            fed = tokens[start : start + _CHUNK]
            span = Span(fed, start, table, int(start + len(fed) == len(tokens)))
            batch = build_batch(
                [span], pool.page_size, pool.num_pages, target.device, target.min_rows
            )
            logits = target.forward(batch).logits
        return logits[:, : parts.judge.vocab_size].float().clone()
    finally:
        pool.free(table)


def processed_after(parts: EngineParts, request: Request, generated: Sequence[int]) -> Tensor:
    """Log weights [V] of the next token of choice 0, up to a constant."""
    logits = logits_after(parts, [*request.prompt, *generated])
    return process_logits(logits, [_row(parts, request, generated)])[0]


def gap_between(
    parts: EngineParts, request: Request, generated: Sequence[int], tokens: tuple[int, int]
) -> float:
    """How far the worse of two tokens lies below the best, in units of a logit.

    Args:
        request: greedy or seeded; what is asked of its choice 0.
        generated: tokens before the one in question.
        tokens: the two that were said.
    """
    params = request.sampling
    scores = processed_after(parts, request, generated).double()
    if not params.greedy:
        position = len(request.prompt) + len(generated)
        key = noise_key(params.seed or 0, 0, position, Purpose.TOKEN)
        scores += gumbel(key, torch.arange(scores.numel(), device=scores.device))
        scores *= params.temperature
    return float(scores.max() - scores[list(tokens)].min())


def _row(parts: EngineParts, request: Request, generated: Sequence[int]) -> SamplingRow:
    return SamplingRow(
        params=request.sampling,
        prompt=request.prompt,
        generated=generated,
        position=len(request.prompt) + len(generated),
        seed=request.sampling.seed or 0,
        choice=0,
        eos_token_ids=parts.judge.eos_token_ids,
    )
