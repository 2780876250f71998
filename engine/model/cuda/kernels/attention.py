"""Paged attention for any number of query rows of a sequence: decode, verify, trees, prefill.

The work is cut three ways. None of the cuts changes a bit of a row's result:

- *Tiles* of query rows: a few rows of one sequence and all query heads of one key/value head, as
  the rows of one small matrix product, whose rows do not know of each other.
- *Splits* over K/V, of a fixed number of positions from position 0 on. A row's splits are merged
  in ascending order, whoever computed them: one program after the other (`attend` with many rows),
  or many at once with what they found in a workspace (few rows).
- *Pages*, which only say where a position lies.

Splits and blocks that a row does not see leave its sums as they are, bit for bit: they are
multiplied by 1 and 0 is added. So a row may share its tile with any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Query vectors (rows x heads of a group) of a tile. Tensor cores want 16 at least.
TILE = 16
#: Positions of K/V that are read at a time; a split is a multiple of it.
BLOCK = 64
#: A row has at most so many splits, each of `MIN_SPLIT` positions at least.
MOST_SPLITS, MIN_SPLIT = 128, 256


@triton.jit
def _merge(peak, total, sums, other_peak, other_total, other_sums):
    """Puts a later split behind what was merged before."""
    best = tl.maximum(peak, other_peak)
    base = tl.where(best == float("-inf"), 0.0, best)
    mine, theirs = tl.exp2(peak - base), tl.exp2(other_peak - base)
    total = total * mine + other_total * theirs
    sums = sums * mine[:, None] + other_sums * theirs[:, None]
    return best, total, sums


@triton.jit(do_not_specialize=["window", "num_splits", "split_step"])
def _attend_kernel(
    queries, key_cache, value_cache, pages, tile_rows, tile_counts, tile_pages, lasts, positions,
    tree_starts, tree_masks, output, peaks, totals, sums_out,
    scale, window, num_splits, split_step, stride_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    tile, group, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tile_counts + tile)
    if count > 0:
        vector = tl.arange(0, TILE_M)
        offset, member = vector // GROUP_PAD, vector % GROUP_PAD
        row = tl.load(tile_rows + tile) + offset
        inside = (offset < count) & (member < GROUP)
        last = tl.load(lasts + row, mask=inside, other=-1)
        head = group * GROUP + member
        d = tl.arange(0, SIZE_PAD)
        where = (row.to(tl.int64) * HEADS + head) * SIZE
        q = tl.load(
            queries + where[:, None] + d[None, :],
            mask=inside[:, None] & (d[None, :] < SIZE), other=0.0,
        )  # fmt: skip
        table = pages + tl.load(tile_pages + tile)
        tree_start = last + 1
        tree_mask = tl.zeros((TILE_M,), tl.int64)
        if TREE:
            tree_start = tl.load(tree_starts + row, mask=inside, other=0)
            tree_mask = tl.load(tree_masks + row, mask=inside, other=0)
        end = tl.max(last, axis=0) + 1
        seen = tl.zeros((TILE_M,), tl.int32)  # first position that a row sees
        if window > 0:
            seen = tl.load(positions + row, mask=inside, other=0) + 1 - window
            seen = tl.maximum(seen, 0)
        begin = tl.min(tl.where(inside, seen, end), axis=0)
        peak = tl.full((TILE_M,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_M,), tl.float32)
        sums = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
        for split in range(begin // SPLIT + first, (end + SPLIT - 1) // SPLIT, split_step):
            p = tl.full((TILE_M,), float("-inf"), tl.float32)
            t = tl.zeros((TILE_M,), tl.float32)
            s = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
            start = tl.maximum(split * SPLIT, begin // BLOCK_N * BLOCK_N)
            for place in range(start, tl.minimum(end, split * SPLIT + SPLIT), BLOCK_N):
                n = place + tl.arange(0, BLOCK_N)
                page = tl.load(table + n // PAGE, mask=n < end, other=0).to(tl.int64)
                slot = (page * PAGE + n % PAGE) * stride_slot + group * SIZE
                held = (n[:, None] < end) & (d[None, :] < SIZE)
                k = tl.load(key_cache + slot[:, None] + d[None, :], mask=held, other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                visible = (n[None, :] <= last[:, None]) & (n[None, :] >= seen[:, None])
                if TREE:
                    behind = n[None, :] - tree_start[:, None]
                    bit = tree_mask[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)
                    visible = visible & ((behind < 0) | ((bit & 1) == 1))
                score = tl.where(visible, score, float("-inf"))
                best = tl.maximum(p, tl.max(score, axis=1))
                base = tl.where(best == float("-inf"), 0.0, best)
                weight = tl.exp2(score - base[:, None])
                shrink = tl.exp2(p - base)
                v = tl.load(value_cache + slot[:, None] + d[None, :], mask=held, other=0.0)
                t = t * shrink + tl.sum(weight, axis=1)
                s = tl.dot(weight.to(v.dtype), v, s * shrink[:, None], input_precision="ieee")
                p = best
            if PARTIAL:
                at = (row.to(tl.int64) * num_splits + split) * HEADS + head
                tl.store(peaks + at, p, mask=inside)
                tl.store(totals + at, t, mask=inside)
                tl.store(
                    sums_out + at[:, None] * SIZE + d[None, :], s,
                    mask=inside[:, None] & (d[None, :] < SIZE),
                )  # fmt: skip
            else:
                peak, total, sums = _merge(peak, total, sums, p, t, s)
        if not PARTIAL:
            mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # 0 where no row is
            tl.store(
                output + where[:, None] + d[None, :], mean.to(output.dtype.element_ty),
                mask=inside[:, None] & (d[None, :] < SIZE),
            )  # fmt: skip


@triton.jit(do_not_specialize=["window", "num_splits"])
def _merge_kernel(
    peaks, totals, sums_in, lasts, positions, output, window, num_splits,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(lasts + row)
    if last >= 0:
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        d = tl.arange(0, SIZE_PAD)
        inside = head < HEADS
        held = inside[:, None] & (d[None, :] < SIZE)
        begin = 0
        if window > 0:
            begin = tl.maximum(tl.load(positions + row) + 1 - window, 0)
        peak = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS_BLOCK,), tl.float32)
        sums = tl.zeros((HEADS_BLOCK, SIZE_PAD), tl.float32)
        for split in range(begin // SPLIT, last // SPLIT + 1):
            at = (row * num_splits + split) * HEADS + head
            p = tl.load(peaks + at, mask=inside, other=float("-inf"))
            t = tl.load(totals + at, mask=inside, other=0.0)
            s = tl.load(sums_in + at[:, None] * SIZE + d[None, :], mask=held, other=0.0)
            peak, total, sums = _merge(peak, total, sums, p, t, s)
        mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            output + (row * HEADS + head)[:, None] * SIZE + d[None, :],
            mean.to(output.dtype.element_ty), mask=held,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a pass's rows lie; all tensors int32 on the device unless noted.

    Attributes:
        lasts: [T] place of the row's own token in its sequence, the last one it sees; -1 for
            padding, whose result is left as it is.
        positions: [T] the row's position, from which a window counts back; the same as its
            place, but for nodes of a tree.
        tile_rows: [N] first row of each tile.
        tile_counts: [N] rows of each tile; 0 = none.
        tile_pages: [N] where the tile's page table begins in `pages`.
        pages: page tables, one after the other.
        page_size: tokens per page.
        tree_starts: [T] from this place on a row sees only what its mask says; None = no trees.
        tree_masks: [T] int64: bit i says that the row sees place `tree_starts` + i. A row's own
            bit and those of its ancestors are set.
    """

    lasts: torch.Tensor
    positions: torch.Tensor
    tile_rows: torch.Tensor
    tile_counts: torch.Tensor
    tile_pages: torch.Tensor
    pages: torch.Tensor
    page_size: int
    tree_starts: torch.Tensor | None = None
    tree_masks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Masks:
    """What a layer's attention is like.

    Attributes:
        scale: factor on the scores.
        split: positions of a split: `split_size`.
        window: each row sees at most this many positions, itself included; 0 = all.
        tile: query vectors of a tile. Another size may give other bits on a GPU.
    """

    scale: float
    split: int
    window: int = 0
    tile: int = TILE


@dataclass(frozen=True, slots=True)
class Workspace:
    """What is found of single splits, float32.

    Attributes:
        peaks: [T, S, H]
        totals: [T, S, H]
        sums: [T, S, H, D]
        programs: splits of a tile that are looked at at the same time.
    """

    peaks: torch.Tensor
    totals: torch.Tensor
    sums: torch.Tensor
    programs: int


def rows_per_tile(heads: int, groups: int, tile: int = TILE) -> int:
    """How many query rows share a tile."""
    return tile // triton.next_power_of_2(heads // groups)


def attend(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    output: torch.Tensor,
    masks: Masks,
    workspace: Workspace | None = None,
) -> None:
    """Causal attention over paged keys and values, which are in the cache already.

    Args:
        queries: [T, H, D], rotated, contiguous.
        cache: keys and values [slots, G, D] of one layer.
        rows: where the T rows lie.
        output: [T, H, D] of the queries' type; rows of padding are left as they are.
        masks: of the layer.
        workspace: splits are computed at the same time, and merged afterwards; None = each tile
            goes through its splits in turn. Both give the same bits.
    """
    keys, values = cache
    heads, size = queries.shape[1:]
    groups = keys.shape[1]
    shape = {"HEADS": heads, "SIZE": size, "SIZE_PAD": max(16, triton.next_power_of_2(size))}
    blank = rows.lasts  # stands where nothing is read or written
    found = (workspace.peaks, workspace.totals, workspace.sums) if workspace else (blank,) * 3
    num_splits = workspace.peaks.shape[1] if workspace else 0
    programs = workspace.programs if workspace else 1
    no_fusion = {"enable_fp_fusion": False}  # it would differ between the two ways to merge
    _attend_kernel[rows.tile_rows.numel(), groups, programs](
        queries, keys, values, rows.pages, rows.tile_rows, rows.tile_counts, rows.tile_pages,
        rows.lasts, rows.positions,
        blank if rows.tree_starts is None else rows.tree_starts,
        blank if rows.tree_masks is None else rows.tree_masks,
        output, *found,
        masks.scale * math.log2(math.e), masks.window, num_splits, programs, keys.stride(0),
        **shape, GROUP=heads // groups, GROUP_PAD=triton.next_power_of_2(heads // groups),
        PAGE=rows.page_size, TILE_M=masks.tile, BLOCK_N=BLOCK, SPLIT=masks.split,
        PARTIAL=workspace is not None, TREE=rows.tree_masks is not None,
        num_warps=4, **no_fusion,
    )  # fmt: skip
    if workspace is not None:
        block = min(8, triton.next_power_of_2(heads))
        _merge_kernel[queries.shape[0], triton.cdiv(heads, block)](
            *found, rows.lasts, rows.positions, output, masks.window, num_splits,
            **shape, HEADS_BLOCK=block, SPLIT=masks.split, num_warps=4, **no_fusion,
        )  # fmt: skip


def split_size(max_model_len: int) -> int:
    """Positions of a split, for all rows of a model alike: a row's result depends on it."""
    return max(MIN_SPLIT, triton.next_power_of_2(-(-max_model_len // MOST_SPLITS)))
