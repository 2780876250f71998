"""What is done with a row besides products and attention: norms, rotation, activation.

All of it is computed in float32 and rounded once, when it is stored. A program takes one row, or
a block of one; interpreted, where programs are slow and loops are not, it takes several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

#: Rows of a program.
_ROWS = 16 if knobs.runtime.interpret else 1


@triton.jit(do_not_specialize=["num_rows"])
def _embed_kernel(
    ids, table, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row, mask=row < num_rows, other=0).to(tl.int64)
    held = (row[:, None] < num_rows) & (i[None, :] < WIDTH)
    found = tl.load(table + token[:, None] * WIDTH + i[None, :], mask=held, other=0.0)
    to = out + row.to(tl.int64)[:, None] * WIDTH + i[None, :]
    tl.store(to, found.to(tl.float32), mask=held)


def embed(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = table[ids[t]].

    Args:
        ids: [T] int32.
        table: [V, W]
        out: [T, W] float32.
    """
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    grid = triton.cdiv(ids.numel(), _ROWS), triton.cdiv(width, block)
    _embed_kernel[grid](ids, table, out, ids.numel(), WIDTH=width, BLOCK=block, ROWS=_ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    residual, delta, weight, out, picks, num_rows, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, PICK: tl.constexpr,
):  # fmt: skip
    to = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = to
    if PICK:
        row = tl.load(picks + to, mask=to < num_rows, other=0)
    i = tl.arange(0, BLOCK)
    inside = (to[:, None] < num_rows) & (i[None, :] < WIDTH)
    at = row.to(tl.int64)[:, None] * WIDTH + i[None, :]
    x = tl.load(residual + at, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            tl.store(residual + at, x, mask=inside)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)
    scale = tl.load(weight + i, mask=i < WIDTH, other=0.0)
    scaled = x * factor[:, None] * scale[None, :]
    at = to.to(tl.int64)[:, None] * WIDTH + i[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm: tuple[torch.Tensor, float],
    out: torch.Tensor,
    picks: torch.Tensor | None = None,
) -> None:
    """residual += delta, and out = RMS norm of the residual.

    Args:
        residual: [T, W] float32; changed, unless rows are picked.
        delta: [T, W] any type; None = nothing.
        norm: weights [W] in float32, and epsilon.
        out: [T, W], or [R, W] of the rows that are picked.
        picks: [R] int32 rows; None = all.
    """
    width = residual.shape[1]
    _norm_kernel[(triton.cdiv(out.shape[0], _ROWS),)](
        residual, residual if delta is None else delta, norm[0], out,
        residual if picks is None else picks, out.shape[0], norm[1],
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=_ROWS,
        ADD=delta is not None, KEEP=picks is None, PICK=picks is not None,
        num_warps=8 if width > 2048 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    qkv, cosines, sines, positions, slots, query_norm, key_norm, queries, key_cache, value_cache,
    num_rows, epsilon, stride_slot,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = place // (HEADS + 2 * GROUPS), place % (HEADS + 2 * GROUPS)
    i = tl.arange(0, HALF_PAD)
    held = (row[:, None] < num_rows) & (i[None, :] < HALF)
    low = tl.load(qkv + place[:, None] * (2 * HALF) + i[None, :], mask=held, other=0.0)
    high = tl.load(qkv + place[:, None] * (2 * HALF) + HALF + i[None, :], mask=held, other=0.0)
    is_query, is_value = head < HEADS, head >= HEADS + GROUPS
    x, y = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF) + epsilon)
        weights = i[None, :]
        own = is_query[:, None]
        x *= factor[:, None] * tl.where(
            own, tl.load(query_norm + weights, mask=i[None, :] < HALF, other=0.0),
            tl.load(key_norm + weights, mask=i[None, :] < HALF, other=0.0),
        )  # fmt: skip
        y *= factor[:, None] * tl.where(
            own, tl.load(query_norm + HALF + weights, mask=i[None, :] < HALF, other=0.0),
            tl.load(key_norm + HALF + weights, mask=i[None, :] < HALF, other=0.0),
        )  # fmt: skip
    position = tl.load(positions + row, mask=row < num_rows, other=0).to(tl.int64)
    angle = position[:, None] * HALF + i[None, :]
    cosine = tl.load(cosines + angle, mask=held, other=0.0)
    sine = tl.load(sines + angle, mask=held, other=0.0)
    turned_low = (x * cosine - y * sine).to(queries.dtype.element_ty)
    turned_high = (y * cosine + x * sine).to(queries.dtype.element_ty)
    to = queries + ((row * HEADS + head) * (2 * HALF))[:, None] + i[None, :]
    tl.store(to, turned_low, mask=held & is_query[:, None])
    tl.store(to + HALF, turned_high, mask=held & is_query[:, None])
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int64) * stride_slot
    is_key = (head >= HEADS) & (head < HEADS + GROUPS)
    at = (slot + (head - HEADS) * (2 * HALF))[:, None] + i[None, :]
    tl.store(key_cache + at, turned_low, mask=held & is_key[:, None])
    tl.store(key_cache + at + HALF, turned_high, mask=held & is_key[:, None])
    at = (slot + (head - HEADS - GROUPS) * (2 * HALF))[:, None] + i[None, :]
    tl.store(value_cache + at, low, mask=held & is_value[:, None])
    tl.store(value_cache + at + HALF, high, mask=held & is_value[:, None])


def rotate_and_store(
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Rotates queries and keys by their positions, and puts keys and values into the cache.

    Args:
        qkv: [T, (H + 2 G) * D] of the cache's type: query heads, key heads, value heads.
        tables: cosines and sines [P, D / 2] float32 by position.
        places: positions and slots [T] int32.
        cache: keys and values [slots, G, D] of one layer.
        queries: [T, H, D], written.
        norms: weights [D] float32 of an RMS norm of each query and of each key head before they
            are rotated, and its epsilon.
    """
    keys, values = cache
    heads, size = queries.shape[1:]
    groups, half = keys.shape[1], size // 2
    every = heads + 2 * groups
    pairs, block = qkv.shape[0] * every, 8 * _ROWS
    weights = norms[:2] if norms is not None else (queries, queries)
    _rotate_kernel[(triton.cdiv(pairs, block),)](
        qkv, *tables, *places, *weights, queries, keys, values,
        qkv.shape[0], norms[2] if norms is not None else 0.0, keys.stride(0),
        HEADS=heads, GROUPS=groups, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        BLOCK=block, NORM=norms is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    gate_up, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    held = (row < num_rows) & (i < WIDTH)
    at = gate_up + row * (2 * WIDTH) + i
    gate = tl.load(at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=held, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + i, gated.to(out.dtype.element_ty), mask=held)


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up: [T, 2 W]: gates, then what they let through.
        out: [T, W]
    """
    width = out.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    grid = triton.cdiv(out.shape[0], _ROWS), triton.cdiv(width, block)
    _gate_kernel[grid](gate_up, out, out.shape[0], WIDTH=width, BLOCK=block, ROWS=_ROWS)
