"""Ragged batches over scattered pages, and what attention over them is in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from engine.model.cuda.kernels.attention import (
    Masks,
    Rows,
    Workspace,
    attend,
    rows_per_tile,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    """One layer's attention; `split` is small, so that short texts have several."""

    heads: int = 4
    groups: int = 2
    size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    split: int = 64
    page_size: int = 16
    tile: int = 16


@dataclass(frozen=True)
class Part:
    """The last `rows` of a sequence of `length`; a tree's masks by row, of as many last places."""

    length: int
    rows: int
    seed: int = 0
    masks: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(default=())


def tensors(shape: Shape, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, H, D], keys and values [N, G, D] of a whole text: its seed decides them."""
    dice = torch.Generator().manual_seed(part.seed)

    def some(heads: int) -> torch.Tensor:
        # By position, so that a longer text of the same seed begins with the shorter one.
        return torch.randn(part.length, heads * shape.size, generator=dice)

    every = some(shape.heads + 2 * shape.groups).view(part.length, -1, shape.size)
    every = every.to(shape.dtype)
    return every.split([shape.heads, shape.groups, shape.groups], dim=1)  # type: ignore[return-value]


def run(shape: Shape, parts: list[Part], *, parallel: int = 0, seed: int = 0) -> list[torch.Tensor]:
    """[rows, H, D] of every part, all in one pass.

    Args:
        parallel: splits that are computed at the same time; 0 = one after the other.
        seed: of the order of pages.
    """
    size, per_tile = shape.page_size, rows_per_tile(shape.heads, shape.groups, shape.tile)
    needed = [-(-part.length // size) for part in parts]
    free = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(free)
    store = [torch.full(((len(free)) * size, shape.groups, shape.size), float("nan")).to(
        shape.dtype) for _ in range(2)]  # fmt: skip
    queries, lasts, positions, starts, masks = [], [], [], [], []
    pages: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for part, count in zip(parts, needed, strict=True):
        own, first = [free.pop() for _ in range(count)], part.length - part.rows
        q, k, v = tensors(shape, part)
        slots = torch.tensor([own[i // size] * size + i % size for i in range(part.length)])
        store[0][slots], store[1][slots] = k, v
        row = len(lasts)
        tiles += [(row + i, min(per_tile, part.rows - i), len(pages))
                  for i in range(0, part.rows, per_tile)]  # fmt: skip
        pages += own
        queries.append(q[first:])
        lasts += range(first, part.length)
        positions += [first + d for d in part.depths] or range(first, part.length)
        starts += [first if part.masks else part.length] * part.rows
        masks += part.masks or [0] * part.rows
    lasts, positions = [*lasts, -1], [*positions, 0]  # a row of padding, and a tile without rows
    tiles.append((0, 0, 0))
    queries.append(torch.zeros(1, shape.heads, shape.size, dtype=shape.dtype))

    def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    has_trees = any(part.masks for part in parts)
    rows = Rows(
        integers(lasts), integers(positions), *map(integers, map(list, zip(*tiles, strict=True))),
        integers(pages), size,
        integers([*starts, 0]) if has_trees else None,
        integers([*masks, 0], torch.int64) if has_trees else None,
    )  # fmt: skip
    packed = torch.cat(queries).to(DEVICE)
    out = torch.full_like(packed, 7.0)
    keys, values = (t.to(DEVICE) for t in store)
    workspace = None
    if parallel:
        splits = -(-max(part.length for part in parts) // shape.split)
        outer = (len(lasts), splits, shape.heads)
        found = torch.full((*outer, shape.size + 2), float("nan"), device=DEVICE)
        workspace = Workspace(found[..., 0].contiguous(), found[..., 1].contiguous(),
                              found[..., 2:].contiguous(), parallel)  # fmt: skip
    masked = Masks(shape.size**-0.5, shape.split, shape.window, shape.tile)
    attend(packed, (keys, values), rows, out, masked, workspace)
    assert bool((out[-1] == 7.0).all()), "a row of padding was written"
    return list(out[:-1].cpu().split([part.rows for part in parts]))


def exact(shape: Shape, part: Part) -> torch.Tensor:
    """[rows, H, D] in float64, of the same rounded numbers."""
    q, k, v = (t.double().transpose(0, 1) for t in tensors(shape, part))
    repeat, first = shape.heads // shape.groups, part.length - part.rows
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q[:, first:] @ k.transpose(1, 2) * shape.size**-0.5
    place = torch.arange(part.length)
    own = place[first:, None]
    seen = place[None] <= own
    depth = own if not part.depths else first + torch.tensor(part.depths)[:, None]
    if shape.window:
        seen &= place[None] > depth - shape.window
    if part.masks:
        for row, mask in enumerate(part.masks):
            seen[row, first:] = torch.tensor([bool(mask >> i & 1) for i in range(part.rows)])
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def paged(shape: Shape, **changes: object) -> Shape:
    """`shape` with changes."""
    return replace(shape, **changes)  # type: ignore[arg-type]
