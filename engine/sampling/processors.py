"""Logits to a distribution, or to tokens: one row after the other, each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.sampling.noise import Purpose, noise_key, race_row
from engine.sampling.penalties import Prompts, adjust, adjusts, repair
from engine.sampling.rows import SamplingRow
from engine.sampling.truncation import truncate

__all__ = ["SamplingRow", "Selector", "peaks", "process_logits"]


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
    size = _checked_vocab_size(logits, vocab_size)
    _check_number(rows, len(logits))
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


class Selector:
    """Chooses tokens: the most likely one for greedy rows, a draw for the others.

    The same tokens as the argmax (greedy rows) and the `race` (others) of `process_logits`;
    ties go to the lowest id. The best entries of all rows are found at once, when they are first
    asked for, so that a step's rows may be chosen from a few at a time.

    Args:
        logits: [R, V], any floating dtype; never changed.
        vocab_size: ids from here on are padding and never chosen; None = V.

    Raises:
        ValueError: `vocab_size` is not from 1 to V.
    """

    def __init__(self, logits: Tensor, vocab_size: int | None = None) -> None:
        self._logits = logits[:, : _checked_vocab_size(logits, vocab_size)]

    @cached_property
    def _peaks(self) -> tuple[list[float], list[int]]:
        return peaks(self._logits)

    def sound(self) -> list[bool]:
        """Which of the R rows hold neither NaN nor +inf, and are not -inf throughout."""
        return list(map(math.isfinite, self._peaks[0]))

    def select(
        self, picks: Sequence[int], rows: Sequence[SamplingRow], purpose: Purpose = Purpose.TOKEN
    ) -> list[int]:
        """One token for each of `picks`.

        Args:
            picks: rows of the logits.
            rows: what those rows ask for.
            purpose: keys the noise; `Purpose.TOKEN` but for drafts that must be independent.

        Raises:
            ValueError: `picks` and `rows` differ in length.
        """
        _check_number(rows, len(picks))
        prompts = Prompts()
        return [
            self._select_one(pick, row, purpose, prompts)
            for pick, row in zip(picks, rows, strict=True)
        ]

    def _select_one(self, pick: int, row: SamplingRow, purpose: Purpose, prompts: Prompts) -> int:
        if row.params.greedy and not adjusts(row):
            values, ids = self._peaks
            if math.isfinite(values[pick]):
                return ids[pick]
        copy = self._logits[pick].to(torch.float32, copy=True)
        support, log_weights = _process_row(copy, row, prompts)
        if row.params.greedy:
            return int(log_weights.argmax())
        key = noise_key(row.seed, row.choice, row.position, purpose, row.step)
        return race_row(key, support, log_weights)


def peaks(logits: Tensor) -> tuple[list[float], list[int]]:
    """The largest entry of every row and its id, the lowest of equal ones.

    Args:
        logits: [R, V].

    Returns:
        R values, NaN where a row holds NaN, and R ids.
    """
    if logits.is_cpu and logits.dtype is torch.float32:
        # Vectorised, and several times as fast as torch.max on a row of 49,152.
        table = logits.detach().numpy()
        places = table.argmax(1)
        return table[np.arange(len(table)), places].tolist(), places.tolist()
    values, ids = torch.max(logits, -1)
    return values.tolist(), ids.tolist()


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


def _checked_vocab_size(logits: Tensor, vocab_size: int | None) -> int:
    """How many entries of `logits` [R, V] are tokens.

    Raises:
        ValueError: `vocab_size` is not from 1 to V.
    """
    size = logits.shape[1] if vocab_size is None else vocab_size
    if not 1 <= size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size is {size}, but the model's logits have {logits.shape[1]} entries."
        )
    return size


def _check_number(rows: Sequence[SamplingRow], number: int) -> None:
    """Raises ValueError unless there are `number` rows."""
    if len(rows) != number:
        raise ValueError(f"There are {len(rows)} rows for {number} rows of logits.")
