"""Log probabilities of chosen tokens under the model's own, unprocessed distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.types import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: int, vocab_size: int | None = None
) -> list[TokenLogprobs]:
    """What the model itself thought of each chosen token.

    One row is in the works at a time, so memory beyond `logits` is a few times V floats however
    many rows there are (a long prompt's, for instance).

    Args:
        logits: [R, V] as the model gave them, any floating dtype.
        token_ids: R chosen tokens.
        top: how many of the most likely tokens to add; capped at the vocabulary's size.
        vocab_size: ids from here on are padding and take no part; None = V.

    Returns:
        R entries. Ranks count from 1; of equally likely tokens the lower id ranks first, in
        `rank` as in `top`.
    """
    return [
        _row_logprobs(row[:vocab_size], token, top)
        for row, token in zip(logits, token_ids, strict=True)
    ]


def _row_logprobs(logits: Tensor, token: int, number: int) -> TokenLogprobs:
    row = logits.float()
    peak = float(row.max())
    log_total = peak + math.log(float((row - peak).exp_().sum(dtype=torch.float64)))
    mine = row[token]
    ahead = (row > mine).count_nonzero() + (row[:token] == mine).count_nonzero()
    best = _best(row, min(number, row.numel()))
    return TokenLogprobs(
        token_id=token,
        logprob=float(mine) - log_total,
        rank=int(ahead) + 1,
        top=tuple(
            (i, logit - log_total)
            for i, logit in zip(best.tolist(), row[best].tolist(), strict=True)
        ),
    )


def _best(row: Tensor, number: int) -> Tensor:
    """Ids of the `number` largest entries, best first, equal ones by ascending id."""
    if number == 0:
        return torch.empty(0, dtype=torch.int64, device=row.device)
    threshold = torch.topk(row, number).values[-1]  # its ids are arbitrary among equals
    maybe = (row >= threshold).nonzero().squeeze(1)
    return maybe[torch.sort(row[maybe], descending=True, stable=True).indices[:number]]
