"""Logits to a distribution, or to tokens: one row after the other, each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.noise import Purpose, noise_key, race_row
from engine.sampling.penalties import Prompts, adjust, adjusts, repair
from engine.sampling.rows import SamplingRow
from engine.sampling.truncation import truncate

__all__ = ["SamplingRow", "process_logits", "select_tokens"]


def process_logits(
    logits: Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None
) -> Tensor:
    """Applies every row's penalties, biases, masks, temperature, top-k, top-p and min-p.

    A greedy row (`SamplingParams.greedy`) has no temperature and keeps all its tokens.

    Args:
        logits: [R, V], any floating dtype; never changed.
        rows: R rows.
        vocab_size: ids from here on are padding and get -inf; None = V.

    Returns:
        [R, V] float32: log weights up to a constant per row, -inf outside the support, never
        NaN or +inf, at least one finite entry per row. It is `logits` itself if that is
        float32 and no row asks for anything.

    Raises:
        ValueError: `rows` and `logits` differ in length, or `vocab_size` exceeds V.
    """
    size = _checked_vocab_size(logits, rows, vocab_size)
    as_they_are = _as_they_are(logits[:, :size], rows)
    if all(as_they_are) and size == logits.shape[1]:
        return logits.float()
    out = logits.to(torch.float32, copy=True)
    out[:, size:] = -torch.inf
    prompts = Prompts()
    for row_logits, row, untouched in zip(out[:, :size], rows, as_they_are, strict=True):
        if not untouched:
            ids, values = _process_row(row_logits, row, prompts)
            if ids is None:
                row_logits.copy_(values)
            else:
                row_logits.fill_(-torch.inf)
                row_logits[ids] = values
    return out


def select_tokens(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    vocab_size: int | None = None,
    purpose: Purpose = Purpose.TOKEN,
) -> list[int]:
    """Chooses one token per row: the most likely one for greedy rows, a draw for the others.

    The same tokens as the argmax (greedy rows) and the `race` (others) of `process_logits`.

    Args:
        logits: [R, V], any floating dtype; never changed.
        rows: R rows.
        vocab_size: ids from here on are padding and never chosen; None = V.
        purpose: keys the noise; `Purpose.TOKEN` but for drafts that must be independent.

    Returns:
        R token ids; ties go to the lowest id.

    Raises:
        ValueError: `rows` and `logits` differ in length, or `vocab_size` exceeds V.
    """
    logits = logits[:, : _checked_vocab_size(logits, rows, vocab_size)]
    chosen = _plain_greedy(logits, rows)
    prompts = Prompts()
    for i, row in enumerate(rows):
        if i not in chosen:
            copy = logits[i].to(torch.float32, copy=True)
            ids, log_weights = _process_row(copy, row, prompts)
            if row.params.greedy:
                chosen[i] = int(log_weights.argmax())
            else:
                key = noise_key(row.seed, row.choice, row.position, purpose, row.step)
                chosen[i] = race_row(key, ids, log_weights)
    return [chosen[i] for i in range(len(rows))]


def _plain_greedy(logits: Tensor, rows: Sequence[SamplingRow]) -> dict[int, int]:
    """Row index -> token of the greedy rows without penalties or masks, in one pass.

    Rows whose best logit is no finite number are left to the careful path.
    """
    plain = [i for i, row in enumerate(rows) if row.params.greedy and not adjusts(row)]
    if not plain:
        return {}
    best = (logits if len(plain) == len(rows) else logits[plain]).max(-1)
    found = zip(plain, best.values.tolist(), best.indices.tolist(), strict=True)
    return {i: token for i, value, token in found if math.isfinite(value)}


def _process_row(
    logits: Tensor, row: SamplingRow, prompts: Prompts
) -> tuple[Tensor | None, Tensor]:
    """One row's support and log weights, as `truncate` returns them.

    Args:
        logits: [V] float32; changed in place, so hand in a copy.
        row: what the row asks for.
        prompts: shared by the rows of one call.
    """
    if adjusts(row):
        adjust(logits, row, prompts)
    if not bool(logits.max().isfinite()):
        repair(logits, row)
    return (None, logits) if row.params.greedy else truncate(logits, row.params)


def _as_they_are(logits: Tensor, rows: Sequence[SamplingRow]) -> list[bool]:
    """For each row, whether processing leaves its logits as they are."""
    plain = [_is_identity(row) and not adjusts(row) for row in rows]
    if not any(plain):
        return plain
    sound = logits.amax(-1).isfinite().tolist()
    return [a and b for a, b in zip(plain, sound, strict=True)]


def _is_identity(row: SamplingRow) -> bool:
    """Whether temperature, top-k, top-p and min-p are off."""
    params = row.params
    return params.greedy or (
        params.temperature == 1.0
        and params.top_k == 0
        and params.top_p >= 1.0
        and params.min_p == 0.0
    )


def _checked_vocab_size(logits: Tensor, rows: Sequence[SamplingRow], vocab_size: int | None) -> int:
    """How many entries of `logits` [R, V] are tokens, after checking the shapes.

    Raises:
        ValueError: there are not R `rows`, or `vocab_size` is not from 1 to V.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"There are {len(rows)} rows for {logits.shape[0]} rows of logits.")
    size = logits.shape[1] if vocab_size is None else vocab_size
    if not 1 <= size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size is {size}, but the model's logits have {logits.shape[1]} entries."
        )
    return size
