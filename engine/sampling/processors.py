"""Logits to a distribution, or to tokens: one row after the other, each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.sampling.noise import Purpose, noise_key, race_winner
from engine.sampling.penalties import Prompts, adjust, adjusts, repair
from engine.sampling.rows import SamplingRow
from engine.sampling.truncation import truncate

__all__ = ["SamplingRow", "Selector", "peaks", "process_logits"]

_LARGEST = torch.finfo(torch.float32).max


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
    touched = {i: out[i, :size] for i, untouched in enumerate(as_they_are) if not untouched}
    _make_drawable(touched, rows)
    for i, row_logits in touched.items():
        if not rows[i].params.greedy:
            ids, values = truncate(row_logits, rows[i].params)
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
        values, ids = self._peaks
        tokens = [ids[pick] for pick in picks]
        drawable = [abs(values[pick]) <= _LARGEST for pick in picks]
        plain = [ok and not adjusts(row) for ok, row in zip(drawable, rows, strict=True)]
        winners = {
            i: _winner(self._copy(picks[i]), row, purpose)
            for i, row in enumerate(rows)
            if plain[i] and not row.params.greedy
        }
        others = {i: self._copy(picks[i]) for i, is_plain in enumerate(plain) if not is_plain}
        _make_drawable(others, rows)
        winners |= {i: _winner(logits, rows[i], purpose) for i, logits in others.items()}
        if winners:
            chosen = torch.stack(list(winners.values())).tolist()
            for i, token in zip(winners, chosen, strict=True):
                tokens[i] = token
        return tokens

    def _copy(self, pick: int) -> Tensor:
        return self._logits[pick].to(torch.float32, copy=True)


def _make_drawable(copies: Mapping[int, Tensor], rows: Sequence[SamplingRow]) -> None:
    """Adjusts rows in place, and repairs those without a token to draw; they are looked at
    together, so that a device is waited for once.

    Args:
        copies: logits [V] float32 of some of `rows`, by their place.
        rows: what they ask for.
    """
    prompts = Prompts()
    for i, logits in copies.items():
        if adjusts(rows[i]):
            adjust(logits, rows[i], prompts)
    if copies:
        best = torch.stack([logits.max() for logits in copies.values()]).tolist()
        for (i, logits), value in zip(copies.items(), best, strict=True):
            if not math.isfinite(value):
                repair(logits, rows[i])


def _winner(logits: Tensor, row: SamplingRow, purpose: Purpose) -> Tensor:
    """The token of one row that is drawable, int64 without dimensions, where the logits are."""
    if row.params.greedy:
        return torch.tensor(peaks(logits[None])[1][0]) if logits.is_cpu else logits.argmax()
    support, log_weights = truncate(logits, row.params)
    key = noise_key(row.seed, row.choice, row.position, purpose, row.step)
    return race_winner(key, support, log_weights)


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
    # Both at once, since a device is waited for each time; float64 holds either exactly.
    values, ids = torch.stack([found.double() for found in torch.max(logits, -1)]).tolist()
    return values, list(map(int, ids))


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
