"""The interface every attention backend implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.batch import Batch
from engine.cache.store import KVStore


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over a packed batch of T rows.

    Attributes:
        layer: index of the layer in the store.
        queries: [T, H, D], rotated.
        keys: [T, G, D], rotated; H is a multiple of G.
        values: [T, G, D]
        scale: factor on the scores.
        window: each row sees at most this many positions, itself included; 0 = all.
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int = 0


#: Writes the call's keys and values into the store, then attends; returns [T, H, D],
#: contiguous. Padding rows of the result hold zeros.
Attend = Callable[[AttentionCall], torch.Tensor]


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values.

    A row's result must not depend, to the last bit, on the other rows of the pass, on how a
    prompt was cut into chunks, or on the page size: the reduction over K/V runs in an order
    that only the row's position decides.
    """

    name: str

    def prepare(self, batch: Batch, store: KVStore) -> Attend:
        """Binds one step's batch; the result is called once per layer."""
        ...


@runtime_checkable
class TreeAttention(AttentionBackend, Protocol):
    """One that also takes drafts that branch: a row sees its own ancestors only (see
    `Batch.branches`), as if their tokens were the whole text."""

    def move(self, store: KVStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves what is stored of tokens: see `TreeRunner.move`."""
        ...
