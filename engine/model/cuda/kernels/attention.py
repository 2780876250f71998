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
from triton import knobs

#: Query vectors (rows x heads of a group) of a tile. Tensor cores want 16 at least.
TILE = 16
#: Positions of K/V that are read at a time; a split is a multiple of it.
BLOCK = 64
#: A row has at most so many splits, each of `MIN_SPLIT` positions at least.
MOST_SPLITS, MIN_SPLIT = 128, 256
#: Pairs of a row and a head whose splits a program merges; many where programs are interpreted.
_PAIRS = 128 if knobs.runtime.interpret else 4


@triton.jit
def _merge(peak, total, sums, other_peak, other_total, other_sums):
    """Puts a later split behind what was merged before."""
    best = tl.maximum(peak, other_peak)
    base = tl.where(best == float("-inf"), 0.0, best)
    mine, theirs = tl.exp2(peak - base), tl.exp2(other_peak - base)
    total = total * mine + other_total * theirs
    sums = sums * mine[:, None] + other_sums * theirs[:, None]
    return best, total, sums


@triton.jit
def _attend_split(
    q, table, keys, values, start, end, last, seen, tree_start, tree_mask, scale, stride_slot,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE_M: tl.constexpr, BLOCK_N: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """What a tile's vectors see of the positions from `start` to `end`."""
    d = tl.arange(0, SIZE_PAD)
    peak = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    sums = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
    for place in range(start, end, BLOCK_N):
        n = place + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // PAGE, mask=n < end, other=0).to(tl.int64)
        at = ((page * PAGE + n % PAGE) * stride_slot)[:, None] + d[None, :]
        held = (n[:, None] < end) & (d[None, :] < SIZE)
        k = tl.load(keys + at, mask=held, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (n[None, :] <= last[:, None]) & (n[None, :] >= seen[:, None])
        if TREE:
            behind = n[None, :] - tree_start[:, None]
            bit = tree_mask[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)
            visible = visible & ((behind < 0) | ((bit & 1) == 1))
        score = tl.where(visible, score, float("-inf"))
        best = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(best == float("-inf"), 0.0, best)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        v = tl.load(values + at, mask=held, other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        sums = tl.dot(weight.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        peak = best
    return peak, total, sums


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
    tile, group = tl.program_id(0), tl.program_id(1)
    count = tl.load(tile_counts + tile)
    if count > 0:
        vector, d = tl.arange(0, TILE_M), tl.arange(0, SIZE_PAD)
        offset, member = vector // GROUP_PAD, vector % GROUP_PAD
        row, head = tl.load(tile_rows + tile) + offset, group * GROUP + member
        inside = (offset < count) & (member < GROUP)
        held = inside[:, None] & (d[None, :] < SIZE)
        last = tl.load(lasts + row, mask=inside, other=-1)
        at = ((row.to(tl.int64) * HEADS + head) * SIZE)[:, None] + d[None, :]
        q = tl.load(queries + at, mask=held, other=0.0)
        table = pages + tl.load(tile_pages + tile)
        tree_start, tree_mask = last + 1, tl.zeros((TILE_M,), tl.int64)
        if TREE:
            tree_start = tl.load(tree_starts + row, mask=inside, other=0)
            tree_mask = tl.load(tree_masks + row, mask=inside, other=0)
        end = tl.max(last, axis=0) + 1
        seen = tl.zeros((TILE_M,), tl.int32)  # first position that a row sees
        if window > 0:
            seen = tl.maximum(tl.load(positions + row, mask=inside, other=0) + 1 - window, 0)
        begin = tl.min(tl.where(inside, seen, end), axis=0)
        peak, total = tl.full((TILE_M,), float("-inf"), tl.float32), tl.zeros((TILE_M,), tl.float32)
        sums = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
        first = begin // SPLIT + tl.program_id(2)
        for split in range(first, (end + SPLIT - 1) // SPLIT, split_step):
            p, t, s = _attend_split(
                q, table, key_cache + group * SIZE, value_cache + group * SIZE,
                tl.maximum(split * SPLIT, begin // BLOCK_N * BLOCK_N),
                tl.minimum(end, split * SPLIT + SPLIT), last, seen, tree_start, tree_mask, scale,
                stride_slot, SIZE, SIZE_PAD, PAGE, TILE_M, BLOCK_N, TREE,
            )  # fmt: skip
            if PARTIAL:
                place = (row.to(tl.int64) * num_splits + split) * HEADS + head
                tl.store(peaks + place, p, mask=inside)
                tl.store(totals + place, t, mask=inside)
                tl.store(sums_out + place[:, None] * SIZE + d[None, :], s, mask=held)
            else:
                peak, total, sums = _merge(peak, total, sums, p, t, s)
        if not PARTIAL:
            mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # 0 where no row is
            tl.store(output + at, mean.to(output.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["window", "num_splits", "num_rows"])
def _merge_kernel(
    peaks, totals, sums_in, lasts, positions, output, window, num_splits, num_rows,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row, head = pair // HEADS, pair % HEADS
    last = tl.load(lasts + row, mask=row < num_rows, other=-1)
    inside = last >= 0
    begin = tl.zeros((PAIRS,), tl.int32)
    if window > 0:
        begin = tl.maximum(tl.load(positions + row, mask=inside, other=0) + 1 - window, 0)
    d = tl.arange(0, SIZE_PAD)
    held = inside[:, None] & (d[None, :] < SIZE)
    peak = tl.full((PAIRS,), float("-inf"), tl.float32)
    total = tl.zeros((PAIRS,), tl.float32)
    sums = tl.zeros((PAIRS, SIZE_PAD), tl.float32)
    first = tl.min(tl.where(inside, begin, 2147483647), axis=0)
    for split in range(first // SPLIT, tl.max(last, axis=0) // SPLIT + 1):
        found = inside & (begin // SPLIT <= split) & (split <= last // SPLIT)
        at = (row * num_splits + split) * HEADS + head
        p = tl.load(peaks + at, mask=found, other=float("-inf"))
        t = tl.load(totals + at, mask=found, other=0.0)
        there = found[:, None] & (d[None, :] < SIZE)
        s = tl.load(sums_in + at[:, None] * SIZE + d[None, :], mask=there, other=0.0)
        peak, total, sums = _merge(peak, total, sums, p, t, s)
    mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = output + pair[:, None] * SIZE + d[None, :]
    tl.store(to, mean.to(output.dtype.element_ty), mask=held)


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
    return int(tile // triton.next_power_of_2(heads // groups))


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
        count = queries.shape[0]
        _merge_kernel[(triton.cdiv(count * heads, _PAIRS),)](
            *found, rows.lasts, rows.positions, output, masks.window, num_splits, count,
            **shape, PAIRS=_PAIRS, SPLIT=masks.split, num_warps=4, **no_fusion,
        )  # fmt: skip


def split_size(max_model_len: int) -> int:
    """Positions of a split, for all rows of a model alike: a row's result depends on it."""
    return int(max(MIN_SPLIT, triton.next_power_of_2(-(-max_model_len // MOST_SPLITS))))
