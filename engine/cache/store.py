"""The K/V tensors of one model, indexed by the page ids of `PagePool`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.cache import huge_pages

#: Of a key or value in eight bits: its scale is a bfloat16 number.
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model stores per token.

    Args:
        num_layers: attention layers.
        num_heads: key/value heads (G).
        head_size: elements per head (D).
        dtype: element type; int8 = rounded, with a scale for each key and each value.
    """

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_heads * self.slot_size * self.dtype.itemsize

    @property
    def slot_size(self) -> int:
        """Elements of one head's key or value, its scale included."""
        return self.head_size + (SCALE_BYTES if self.dtype is torch.int8 else 0)


class KVStore:
    """Keys and values of every layer, one slot per token.

    A page is a run of `page_size` slots, so a token's slot is `page * page_size + offset`. How the
    tokens of a page lie in it is up to the attention that writes and reads it: the kernels
    interleave them.
    One page more than the pool has is allocated: padding rows write there.

    Args:
        shape: what a token stores.
        num_pages: pages of the pool.
        page_size: tokens per page.
        device: where the tensors live.
    """

    def __init__(
        self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str
    ) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        size = (
            shape.num_layers,
            (num_pages + 1) * page_size,
            shape.num_heads,
            shape.slot_size,
        )
        # Not zeroed: memory is taken as pages fill, and nothing unwritten is ever read.
        self.keys, self.values = (
            huge_pages.empty(size, shape.dtype)
            if torch.device(device).type == "cpu"
            else torch.empty(size, dtype=shape.dtype, device=device)
            for _ in range(2)
        )

    def populate(self, seconds: float) -> int:
        """Has the system back the memory of the pages, those with the lowest numbers first: the
        pool hands them out in that order. Elsewhere a step would wait for it, all layers at once.

        Args:
            seconds: that it may take; what is left is backed as it is used.

        Returns:
            Tokens whose memory is backed now.
        """
        slots = self.keys.shape[1]
        if self.keys.device.type != "cpu" or 0 in self.keys.shape:
            return slots
        end = time.monotonic() + seconds
        step = max(1, huge_pages.LARGE // self.keys[0, 0].nbytes)
        for first in range(0, slots, step):
            if time.monotonic() > end:
                return first
            for part in (self.keys, self.values):
                for layer in part[:, first : first + step]:
                    if not huge_pages.populate(layer):
                        return first
        return slots

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores the keys and values [T, G, D] of one layer at `slots` [T], token after token."""
        rounded = self.shape.dtype is torch.int8
        for part, given in ((self.keys, keys), (self.values, values)):
            part[layer].index_copy_(0, slots, round_heads(given) if rounded else given)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, G, D], in float32, that `write` has put at `slots` [T]."""
        found = (part[layer][slots] for part in (self.keys, self.values))
        keys, values = (
            widen_heads(x) if self.shape.dtype is torch.int8 else x.float() for x in found
        )
        return keys, values

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves the keys and values of all layers from slots [N] to others [N], for attention
        that lays tokens one after the other, as `write` does."""
        for part in (self.keys, self.values):
            for layer in part:
                layer.index_copy_(0, targets, layer[sources])


def round_heads(x: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., D] in eight bits, [..., D + SCALE_BYTES] int8: the largest magnitude of
    each becomes 127 or a little less, since its scale is rounded up to bfloat16. What is not finite
    stays so. The kernels do the same: kernels/eight_bits.h."""
    x = x.float()
    step = x.abs().amax(-1, keepdim=True) / 127
    bits = (step.view(torch.int32) + 0xFFFF) >> 16
    scale = bits.to(torch.int16).view(torch.bfloat16)
    sound = scale.isfinite() & (scale.float() >= 1e-30)  # smaller ones have no inverse
    inverse = torch.where(sound, 1 / scale.float(), 0.0)
    whole = torch.where(sound, x * inverse, 0.0).round().to(torch.int8)
    return torch.cat([whole, scale.view(torch.int8)], dim=-1)


def widen_heads(stored: torch.Tensor) -> torch.Tensor:
    """The keys or values [..., D] in float32 of what `round_heads` made."""
    whole, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous()
    return whole.float() * scale.view(torch.bfloat16).float()
