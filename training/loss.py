"""What a head is to make small, and how fast it learns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WARM_UP = 0.04  # share of the lesson in which the learning rate rises


def distance(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """How far a head's probabilities q are from the target's p among the words of the head.

    KL(p, q) where they are far apart, total variation, which decides what is accepted, the more
    the better they agree: `w KL + (1 - w) TV` with w = exp(-3 sum min(p, q)), after "LK losses"
    (arXiv 2602.23881). Words that are not among the target's likeliest count as one; rows whose
    likeliest is no word of the head count nothing, since nothing it says would be kept.

    Args:
        logits: [R, draft vocab]
        ids: int64 [R, N] the target's likeliest tokens as draft ids, first to last; -1 = unknown.
        weights: [R, N] their probabilities.
    """
    known = ids >= 0
    rows = known[:, 0]
    listed = weights * known
    rest = (1 - weights.sum(1, keepdim=True)).clamp(min=0)
    p = torch.cat([listed, rest], 1)
    p = p / p.sum(1, keepdim=True).clamp(min=1e-9)
    mine = logits.log_softmax(1).gather(1, ids.clamp(min=0)).exp() * known
    others = (1 - mine.sum(1, keepdim=True)).clamp(min=1e-6)
    q = torch.cat([mine, others], 1).clamp(min=1e-20)
    w = torch.exp(-3 * torch.minimum(p, q).sum(1)).detach()
    divergence = (torch.xlogy(p, p) - p * q.log()).sum(1)
    variation = 0.5 * (p - q).abs().sum(1)
    loss = w * divergence + (1 - w) * variation
    return (loss * rows).sum() / rows.sum().clamp(min=1)


def schedule(done: float) -> float:
    """Factor on the learning rate, by the share of the lesson that is over: warm-up, cosine."""
    if done < _WARM_UP:
        return (done + 1e-3) / (_WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))
