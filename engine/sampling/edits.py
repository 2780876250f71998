"""Penalties, biases and masks of many rows at once: what `penalties` does to one, as indices.

The host says which entries of the logits are concerned, and by how much; all arithmetic is done
where the logits are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.penalties import adjusts, banned_ids
from engine.sampling.rows import SamplingRow


class _Entries:
    """Entries of a table of logits [M, V], and a number for each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, row: int, ids: NDArray[np.int64], values: NDArray[np.float32] | float) -> None:
        """Those of `ids` that have a logit."""
        inside = (ids >= 0) & (ids < self._size)
        self._ids.append(ids[inside] + row * self._size)
        self._values.append(np.broadcast_to(np.float32(values), ids.shape)[inside])

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Flat indices int64, and values float32."""
        places = torch.from_numpy(np.concatenate(self._ids)).to(device)
        return places, torch.from_numpy(np.concatenate(self._values)).to(device)


class Edits:
    """What is to be done to the rows of a table.

    Args:
        rows: what each row asks for.
        size: ids from here on have no logit.
    """

    def __init__(self, rows: Sequence[SamplingRow], size: int) -> None:
        self._size = size
        self._seen, self._counted, self._biased = (_Entries(size) for _ in range(3))
        self._allowed, self._banned = _Entries(size), _Entries(size)
        self._limited: list[int] = []  # rows with allowed ids
        for i, row in enumerate(rows):
            if adjusts(row):
                self._note(i, row)

    def _note(self, i: int, row: SamplingRow) -> None:
        params = row.params
        generated = np.asarray(row.generated, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.concatenate([np.asarray(row.prompt, dtype=np.int64), generated]))
            self._seen.add(i, seen, params.repetition_penalty)
        frequency, presence = params.frequency_penalty, params.presence_penalty
        if row.generated and (frequency != 0.0 or presence != 0.0):
            counts = Counter(row.generated)
            amounts = [-(count * frequency + presence) for count in counts.values()]
            self._counted.add(i, _integers(counts), np.asarray(amounts))
        if params.logit_bias:
            amounts = list(params.logit_bias.values())
            self._biased.add(i, _integers(params.logit_bias), np.asarray(amounts))
        if params.allowed_token_ids is not None or row.allowed is not None:
            self._limited.append(i)
            self._allowed.add(i, _allowed_ids(row, self._size), 0.0)
        if banned := banned_ids(row):
            self._banned.add(i, _integers(banned), 0.0)

    def apply(self, logits: Tensor) -> None:
        """Changes logits [M, V] float32, contiguous, in place, in the order of `adjust`."""
        flat, device = logits.view(-1), logits.device
        if self._seen:
            places, penalty = self._seen.on(device)
            seen = flat[places]
            flat[places] = torch.where(seen < 0, seen * penalty, seen / penalty)
        for entries in (self._counted, self._biased):
            if entries:
                places, amounts = entries.on(device)
                flat[places] += amounts  # an entry is named once
        if self._limited:
            places, _ = self._allowed.on(device)
            kept = flat[places]
            logits[self._limited] = -torch.inf
            flat[places] = kept
        if self._banned:
            places, _ = self._banned.on(device)
            before = flat[places]
            flat[places] = -torch.inf
            gone = logits.amax(-1) == -torch.inf
            flat[places] = torch.where(gone[places // self._size], before, -torch.inf)

    def anything(self, like: Tensor) -> Tensor:
        """What stands for rows without any possible token: all that is allowed, alike."""
        if not self._limited:
            return like.new_zeros(())
        table = torch.zeros_like(like)
        places, _ = self._allowed.on(like.device)
        found = torch.zeros_like(table.view(-1), dtype=torch.bool)
        found[places] = True
        some = found.view_as(table)
        rows = some.any(-1, keepdim=True)  # of ids that have no logit none is allowed
        return table.masked_fill_(rows & ~some, -torch.inf)


def _allowed_ids(row: SamplingRow, size: int) -> NDArray[np.int64]:
    """What allowed_token_ids and the grammar leave; the grammar alone where both leave nothing."""
    listed = row.params.allowed_token_ids
    if row.allowed is None:
        return _integers(listed or ())
    bits = np.unpackbits(np.frombuffer(row.allowed, np.uint8), bitorder="little")
    by_grammar = np.flatnonzero(bits[:size])
    if listed is None:
        return by_grammar
    both = by_grammar[np.isin(by_grammar, _integers(listed))]
    return both if len(both) else by_grammar


def _integers(ids: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, dtype=np.int64, count=len(ids))
