"""A pass's integers on their way to the device: one buffer, one copy, always the same places.

::

    ids | positions | slots | lasts | picks | tile rows | tile counts | tile pages | page tables
    <------------------ eight sections of `capacity` entries ------------------->

Kernels that are captured in a graph read them where they always are. What a pass does not fill of
its (padded) sections is padding: token 0 at position 0, written into the scratch page, seeing
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.model.cuda.kernels.attention import Rows

_SECTIONS = 8


@dataclass(frozen=True, slots=True)
class Views:
    """Sections of a pass on the device, int32; T rows with padding, R of them picked.

    Attributes:
        ids: [T]
        slots: [T]
        picks: [R] rows whose logits are wanted.
        rows: where the rows lie, for attention.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    picks: torch.Tensor
    rows: Rows


class Inputs:
    """The buffers.

    Args:
        capacity: most rows of a pass.
        pages: most entries of its page tables together.
        device: where passes run.
        tile_rows: query rows that share a tile of attention.
        scratch: slot where padding rows write.
    """

    def __init__(
        self, capacity: int, pages: int, device: torch.device, tile_rows: int, scratch: int
    ) -> None:
        self.capacity, self.pages = capacity, pages
        self._tile_rows, self._scratch = tile_rows, scratch
        size = _SECTIONS * capacity + pages
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._device = self._host.to(device, copy=True)
        self._copied = torch.cuda.Event() if on_gpu else None

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return self._device.nbytes

    def load(self, batch: Batch, rows: int, picks: int, page_size: int) -> Views:
        """Copies a batch to the device; the host does not wait for it.

        Args:
            batch: on the CPU.
            rows: of the pass, with padding.
            picks: of the logits, with padding.
            page_size: tokens per page.
        """
        if self._copied is not None:
            self._copied.synchronize()  # until the last copy has read what is overwritten now
        tables = batch.page_tables.reshape(-1)
        end = _SECTIONS * self.capacity + tables.numel()
        self._fill(batch, rows, picks)
        self._host[_SECTIONS * self.capacity : end] = tables
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self._views(rows, picks, page_size)

    def _fill(self, batch: Batch, rows: int, picks: int) -> None:
        starts, own = batch.query_starts, batch.input_ids.numel()
        counts = starts.diff()
        whose = torch.repeat_interleave(counts)  # the sequence of every row
        behind = batch.context_lengths - starts[1:]
        lasts = torch.arange(len(whose), dtype=torch.int32) + behind[whose]
        tiles = (counts + self._tile_rows - 1) // self._tile_rows
        of_tile = torch.repeat_interleave(tiles)  # the sequence of every tile
        number = torch.arange(len(of_tile)) - (tiles.cumsum(0) - tiles)[of_tile]
        offset = number * self._tile_rows
        sections = (
            (batch.input_ids, own, rows, 0),
            (batch.positions, own, rows, 0),
            (batch.slots, own, rows, self._scratch),
            (lasts, len(lasts), rows, -1),
            (batch.logit_rows, batch.num_logits, picks, 0),
            (starts[:-1][of_tile] + offset, len(of_tile), rows, 0),
            ((counts[of_tile] - offset).clamp(max=self._tile_rows), len(of_tile), rows, 0),
            (of_tile * batch.page_tables.shape[1], len(of_tile), rows, 0),
        )
        for i, (values, count, padded, padding) in enumerate(sections):
            first = i * self.capacity
            self._host[first : first + count] = values[:count]
            self._host[first + count : first + padded] = padding

    def _views(self, rows: int, picks: int, page_size: int) -> Views:
        counts = (rows, rows, rows, rows, picks, rows, rows, rows)
        ids, positions, slots, lasts, picked, *tiles = (
            self._device[i * self.capacity : i * self.capacity + count]
            for i, count in enumerate(counts)
        )
        pages = self._device[_SECTIONS * self.capacity :]
        return Views(ids, slots, picked, Rows(lasts, positions, *tiles, pages, page_size))
