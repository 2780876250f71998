"""A pass's integers on their way to the device: one buffer, one copy, always the same places.

::

    ids | positions | slots | lasts | picks | tile rows | tile counts | tile pages | page tables
    <------------------ eight sections of `capacity` entries ------------------->

Kernels that are captured in a graph read them where they always are. What a pass does not fill of
its (padded) sections is padding: token 0 at position 0, written into the scratch page, seeing
nothing.
"""

from __future__ import annotations

import dataclasses
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
        self._copied = torch.Event(device) if on_gpu else None

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
        lasts, *tiles = count_off(batch, self._tile_rows)
        sections = (
            (batch.input_ids, rows, 0),
            (batch.positions, rows, 0),
            (batch.slots, rows, self._scratch),
            (lasts, rows, -1),
            (batch.logit_rows[: batch.num_logits], picks, 0),
            *((tile, rows, 0) for tile in tiles),
        )
        for i, (values, padded, padding) in enumerate(sections):
            first, count = i * self.capacity, len(values)
            self._host[first : first + count] = values
            self._host[first + count : first + padded] = padding

    def _views(self, rows: int, picks: int, page_size: int) -> Views:
        counts = (rows, rows, rows, rows, picks, rows, rows, rows)
        ids, positions, slots, lasts, picked, tile_rows, tile_counts, tile_pages = (
            self._device[i * self.capacity : i * self.capacity + count]
            for i, count in enumerate(counts)
        )
        pages = self._device[_SECTIONS * self.capacity :]
        found = Rows(lasts, positions, tile_rows, tile_counts, tile_pages, pages, page_size)
        return Views(ids, slots, picked, found)


def count_off(
    batch: Batch, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the rows of a batch that is on the CPU lie.

    Args:
        batch: without rows of padding in `query_starts`.
        tile_rows: query rows that share a tile.

    Returns:
        For each row the place of its token in its sequence; for each tile its first row, how many
        it has, and where its page table begins among all of them.
    """
    starts = batch.query_starts
    counts = starts.diff()
    whose = torch.repeat_interleave(counts)  # the sequence of every row
    behind = batch.context_lengths - starts[1:]
    lasts = torch.arange(len(whose), dtype=torch.int32) + behind[whose]
    tiles = (counts + tile_rows - 1) // tile_rows
    of_tile = torch.repeat_interleave(tiles)  # the sequence of every tile
    number = torch.arange(len(of_tile)) - (tiles.cumsum(0) - tiles)[of_tile]
    offset = number * tile_rows
    rows = (counts[of_tile] - offset).clamp(max=tile_rows)
    return lasts, starts[:-1][of_tile] + offset, rows, of_tile * batch.page_tables.shape[1]


def locate(batch: Batch, tile_rows: int) -> Rows:
    """Where the rows of a batch lie, for attention, on the batch's own device. Reads it back."""
    device = batch.input_ids.device
    found = count_off(
        dataclasses.replace(
            batch,
            query_starts=batch.query_starts.cpu(),
            context_lengths=batch.context_lengths.cpu(),
        ),
        tile_rows,
    )
    lasts, first, count, table = (part.to(device, torch.int32) for part in found)
    positions, pages = batch.positions.int(), batch.page_tables.reshape(-1)
    lasts = torch.nn.functional.pad(lasts, (0, batch.num_padding_rows), value=-1)
    return Rows(lasts, positions, first, count, table, pages, batch.page_size)
