"""A matrix product in which a row's result does not depend on the other rows.

Vendors' libraries choose tiles, and how they cut the sum, by the number of rows. Here both are
fixed: tiles of one size, and one accumulator that runs through the inputs in ascending order.
Rows that are missing to a whole tile are computed as zeros and thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, columns and inputs of a tile. Another size may give other bits on a GPU.

    64 rows are what a Hopper tensor core takes at a time, and even so a pass of few rows is bound
    by reading the weights; narrow columns make enough programs of a small matrix.
    """

    rows: int = 64
    columns: int = 32
    inputs: int = 128
    stages: int = 4


#: Wide where they are interpreted: there a program costs more than what it computes.
TILES = Tiles(columns=256) if knobs.runtime.interpret else Tiles()


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, bias, out, num_rows, num_columns, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # Tiles of the same columns run side by side, so that weights are read from memory once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + m.to(tl.int64)[:, None] * num_inputs + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * num_inputs + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        here = k < num_inputs - start
        a = tl.load(left + start, mask=(m[:, None] < num_rows) & here[None, :], other=0.0)
        b = tl.load(right + start, mask=(n[None, :] < num_columns) & here[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + n, mask=n < num_columns, other=0.0)[None, :]
    to = out + m.to(tl.int64)[:, None] * num_columns + n[None, :]
    held = (m[:, None] < num_rows) & (n[None, :] < num_columns)
    tl.store(to, sums.to(out.dtype.element_ty), mask=held)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles = TILES,
) -> None:
    """out = x @ weight.T + bias.

    Args:
        x: [T, K], contiguous.
        weight: [N, K], contiguous, of the same type.
        bias: [N] float32, or None.
        out: [T, N] of any floating type.
        tiles: see there.
    """
    rows, inputs = x.shape
    columns = weight.shape[0]
    grid = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    stages = tiles.stages if x.element_size() <= 2 else 2  # shared memory holds no more float32
    _linear_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, inputs,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.inputs, BIAS=bias is not None,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
