"""Temperature, top-k, top-p and min-p of one row, in transformers' order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.sampling.threads import one_thread
from engine.types import SamplingParams

_LARGEST = torch.finfo(torch.float32).max

#: Up to this many tokens are sorted outright; more are first bracketed by bisection, each round
#: of which halves the (logarithmic) range of weights that remains to be sorted.
_SORT_AT_ONCE = 2048
_BISECTIONS = 5


@one_thread()
def truncate(logits: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The support of one row's distribution and its scaled logits.

    Top-k keeps every token as likely as the k-th. Top-p keeps a token while the more likely
    ones hold less than `top_p`; among equals the lowest ids come first. Min-p keeps what is at
    least `min_p` times as likely as the best. The best token is always kept.

    Args:
        logits: [V] float32, no NaN or +inf, at least one entry above -inf.
        params: of a row that is not greedy.

    Returns:
        Ids of the support (ascending int64 [N], None = all V ids) and their logits after
        temperature ([N] float32); without top-k, top-p and min-p some may still be -inf.
    """
    scaled = logits if params.temperature == 1.0 else _scale(logits, params.temperature)
    ids: Tensor | None = None
    if 0 < params.top_k < scaled.numel():
        kth = torch.topk(scaled, params.top_k).values[-1].clamp(min=-_LARGEST)
        ids, scaled = _keep(None, scaled, scaled >= kth)
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return ids, scaled
    weights = (scaled - scaled.max()).exp_()
    if params.top_p < 1.0:
        ids, scaled, weights = _top_p(ids, scaled, weights, params.top_p)
    if params.min_p > 0.0:
        ids, scaled = _keep(ids, scaled, weights >= params.min_p)
    return ids, scaled


def _scale(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits / temperature
    if temperature < 1.0:  # dividing huge logits may overflow, and inf - inf is no number
        scaled.clamp_(max=_LARGEST)
    return scaled


def _keep(ids: Tensor | None, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`ids` and `values` where `mask` holds."""
    kept = mask.nonzero().squeeze(1)
    return (kept if ids is None else ids[kept]), values[kept]


def _top_p(
    ids: Tensor | None, scaled: Tensor, weights: Tensor, top_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The nucleus of (ids, scaled) whose unnormalised probabilities are `weights`.

    Tokens lighter than (1 - top_p) / N of all the weight hold less than 1 - top_p together, so
    none of them is in the nucleus. Few are left, and only those near the edge need sorting.
    """
    total = float(weights.sum(dtype=torch.float64))
    floor = 0.999 * (1.0 - top_p) * total / weights.numel()  # a hair less: it is rounded
    maybe = (weights >= floor).nonzero().squeeze(1)
    candidates = weights[maybe]
    light, heavy = _bracket(candidates, floor, top_p * total)
    sure = candidates >= heavy
    edge = (~sure & (candidates >= light)).nonzero().squeeze(1)
    heaviest_first, order = torch.sort(candidates[edge], descending=True, stable=True)
    before = heaviest_first.cumsum(0, dtype=torch.float64) - heaviest_first
    before += _mass(candidates, sure)
    sure[edge[order[before < top_p * total]]] = True
    nucleus = maybe[sure]
    return (nucleus if ids is None else ids[nucleus]), scaled[nucleus], weights[nucleus]


def _bracket(weights: Tensor, light: float, mass: float) -> tuple[float, float]:
    """Two weights around the nucleus's edge: it holds all from `heavy` up, none below `light`.

    Args:
        weights: [N], unsorted.
        light: a weight below which nothing is in the nucleus.
        mass: the nucleus is the heaviest tokens up to this mass.
    """
    heavy = math.inf
    if weights.numel() > _SORT_AT_ONCE:
        for _ in range(_BISECTIONS):
            middle = math.sqrt(light * min(heavy, 1.0))
            if _mass(weights, weights >= middle) < mass:
                heavy = middle
            else:
                light = middle
    return light, heavy


def _mass(weights: Tensor, mask: Tensor) -> float:
    """Sum of the `weights` where `mask` holds."""
    return float((weights * mask).sum(dtype=torch.float64))
