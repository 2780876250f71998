"""The GPU's kernels: right, and every row to the last bit what it would be alone.

Where there is no GPU they run in Triton's interpreter, on small shapes.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("engine.model.cuda.kernels")

from engine.model.cuda.kernels.attention import split_size
from engine.model.cuda.kernels.matmul import Tiles, linear
from engine.model.cuda.kernels.rows import add_norm, embed, rotate_and_store, silu_gate
from tests.model.cuda.scenes import DEVICE, Part, Shape, exact, paged, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Largest error of numbers around 1 that rounding explains.
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SMALL = Tiles(rows=16, columns=16, inputs=16)


def some(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def near(found: torch.Tensor, true: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double().cpu() - true.double().cpu()).abs().max()
    assert error <= ERRORS[dtype] * max(1.0, float(true.abs().max())), error


# -- attention -------------------------------------------------------------------------------

SHAPES = [
    *(Shape(per_group * groups, groups) for per_group, groups in ((1, 1), (3, 2), (8, 1), (16, 1))),
    *(Shape(4, 2, size) for size in (20, 64)),
    *(Shape(4, 2, window=window) for window in (1, 33, 64, 100)),
    Shape(6, 2, page_size=1, split=128),
    Shape(4, 1, page_size=8, tile=64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right(shape: Shape) -> None:
    """A prompt's chunk, a verify pass and a decode side by side. Types, and how many splits are
    computed at a time, take turns: each meets some of every kind of shape."""
    parts = [Part(30, 9, 1), Part(70, 5, 2), Part(131, 1, 3), Part(1, 1, 4)]
    turn = SHAPES.index(shape)
    for parallel, dtype in [((turn // 3 + turn) % 3, DTYPES[turn % 3])]:
        at = paged(shape, dtype=dtype)
        for part, found in zip(parts, run(at, parts, parallel=parallel), strict=True):
            near(found, exact(at, part), dtype)


@pytest.mark.parametrize("trial", range(5))
def test_attention_is_right_on_ragged_batches(trial: int) -> None:
    """Up to 40 rows and 64 pages of a sequence, groups of 1 to 16, windows."""
    dice = random.Random(trial)
    groups = dice.choice((1, 2))
    shape = Shape(
        heads=groups * dice.choice((1, 2, 4, 7, 16)),
        groups=groups,
        window=dice.choice((0, 0, dice.randrange(1, 200))),
        page_size=dice.choice((1, 4, 16)),
        split=64,
    )
    parts = []
    for seed, most in enumerate((4, 40)):
        rows = dice.randrange(1, most + 1)
        longest = min(200, 64 * shape.page_size)
        parts.append(Part(dice.randrange(rows, longest + 1), rows, seed))
    for part, found in zip(parts, run(shape, parts, parallel=dice.choice((0, 1, 3))), strict=True):
        near(found, exact(shape, part), torch.float32)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(4, 2, dtype=torch.bfloat16),
        Shape(3, 1, dtype=torch.bfloat16),
        Shape(16, 1),
        Shape(4, 2, window=40),
    ],
    ids=str,
)
def test_rows_of_attention_are_bit_equal(shape: Shape) -> None:
    """Alone or among others, whatever the pages, and however splits are shared out."""
    (truth,) = run(shape, [Part(140, 9, 5)])
    others = [Part(150, 2, 6), Part(1, 1, 7)]
    for rows, parallel, page_size in ((1, 0, 16), (1, 2, 4), (4, 1, 1), (9, 0, 5)):
        parts = [others[0], Part(140, rows, 5), others[1]]
        at = paged(shape, page_size=page_size)
        found = run(at, parts, parallel=parallel, seed=rows)[1]
        assert torch.equal(found, truth[-rows:]), (rows, parallel, page_size)
    for length in (132, 139):  # the same row as the last one of a shorter text
        (found,) = run(shape, [Part(length, 1, 5)], parallel=2)
        assert torch.equal(found[0], truth[length - 132])


def test_trees_see_their_ancestors_alone() -> None:
    """Two branches of a draft, in one pass, are what each is as a chain."""
    shape = Shape(split=64)
    #       0 is the last token; 1 and 2 follow it, 3 follows 1, 4 follows 2
    masks, depths = (0b1, 0b11, 0b101, 0b1011, 0b10101), (0, 1, 1, 2, 2)
    for window in (0, 80):
        part = Part(70, 5, 9, masks, depths)
        at = paged(shape, window=window)
        plain = Part(100, 4, 3)
        for parallel in (0, 2):
            tree, other = run(at, [part, plain], parallel=parallel)
            near(tree, exact(at, part), torch.float32)
            near(other, exact(at, plain), torch.float32)
            (chain,) = run(at, [Part(67, 2, 9)])
            assert torch.equal(tree[:2], chain)


def test_a_wrong_page_would_be_seen() -> None:
    """What nobody wrote is not a number: the cache of `run` shows who reads it."""
    shape = Shape()
    (found,) = run(shape, [Part(17, 17)])
    assert bool(torch.isfinite(found).all())


def test_splits_cover_the_longest_text() -> None:
    assert split_size(1) == split_size(256 * 128) == 256
    assert split_size(256 * 128 + 1) == 512
    for longest in (4096, 131_072, 1_000_000):
        assert -(-longest // split_size(longest)) <= 128


# -- matrix products -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 16, 16), (5, 33, 70), (17, 20, 40)])
def test_products_are_right(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, inputs = size
    x, weight = some(rows, inputs, dtype=dtype), some(columns, inputs, seed=1, dtype=dtype)
    bias = some(columns, seed=2)
    for out_dtype in (dtype, torch.float32):
        out = torch.empty(rows, columns, dtype=out_dtype, device=DEVICE)
        linear(x, weight, bias, out, SMALL)
        near(out / inputs**0.5, (x.double() @ weight.double().T + bias) / inputs**0.5, out_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_products_are_bit_equal(dtype: torch.dtype) -> None:
    x, weight = some(40, 50, dtype=dtype), some(24, 50, seed=1, dtype=dtype)
    truth = torch.empty(40, 24, device=DEVICE)
    linear(x, weight, None, truth, SMALL)
    for start, count in ((0, 1), (39, 1), (3, 8), (7, 16), (5, 33)):
        out = torch.empty(count, 24, device=DEVICE)
        linear(x[start : start + count].contiguous(), weight, None, out, SMALL)
        assert torch.equal(out, truth[start : start + count]), (start, count)


# -- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_add_and_pick(dtype: torch.dtype) -> None:
    residual, delta, weight = some(5, 50), some(5, 50, seed=1, dtype=dtype), some(50, seed=2)
    wanted = residual + delta.float()

    def norm(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    before = residual.clone()
    picks = torch.tensor([4, 0, 4], dtype=torch.int32, device=DEVICE)
    picked = torch.empty(3, 50, dtype=dtype, device=DEVICE)
    add_norm(residual, delta, (weight, 1e-5), picked, picks)
    near(picked, norm(wanted[[4, 0, 4]]), dtype)
    assert torch.equal(residual, before)  # who picks rows leaves them as they are
    out = torch.empty(5, 50, dtype=dtype, device=DEVICE)
    add_norm(residual, delta, (weight, 1e-5), out)
    assert torch.equal(residual, wanted)
    near(out, norm(wanted), dtype)
    assert torch.equal(out[[4, 0, 4]], picked)
    add_norm(residual, None, (weight, 1e-5), out)
    assert torch.equal(residual, wanted)
    near(out, norm(wanted), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_fills_the_cache(dtype: torch.dtype, normed: bool) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads, groups, size, rows = 5, 2, 20, 3
    qkv = some(rows, (heads + 2 * groups) * size, dtype=dtype)
    angles = some(50, size // 2, seed=3)
    positions = torch.tensor([7, 0, 49], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([11, 3, 4], dtype=torch.int32, device=DEVICE)
    keys, values = (torch.full((12, groups, size), 9.0, dtype=dtype, device=DEVICE) for _ in "kv")
    queries = torch.empty(rows, heads, size, dtype=dtype, device=DEVICE)
    weights = some(size, seed=4), some(size, seed=5)
    tables = angles.cos(), angles.sin()
    rotate_and_store(
        qkv, tables, (positions, slots), (keys, values), queries,
        (*weights, 1e-6) if normed else None,
    )  # fmt: skip
    q, k, v = qkv.view(rows, -1, size).double().split([heads, groups, groups], dim=1)
    if normed:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
            for x, w in zip((q, k), weights, strict=True)
        )
    cosine, sine = (torch.cat([t, t], -1)[positions.long()].double() for t in tables)
    q, k = apply_rotary_pos_emb(q, k, cosine, sine, unsqueeze_dim=1)
    near(queries, q, dtype)
    near(keys[slots.long()], k, dtype)
    assert torch.equal(values[slots.long()], v.to(dtype))
    assert bool((keys[:3] == 9.0).all() and (values[5:11] == 9.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_embeddings(dtype: torch.dtype) -> None:
    gate_up = some(3, 2 * 70, dtype=dtype)
    out = torch.empty(3, 70, dtype=dtype, device=DEVICE)
    silu_gate(gate_up, out)
    gate, up = gate_up.double().split(70, -1)
    near(out, torch.nn.functional.silu(gate) * up, dtype)
    table = some(9, 70, dtype=dtype)
    rows = torch.empty(4, 70, device=DEVICE)
    embed(torch.tensor([8, 0, 8, 3], dtype=torch.int32, device=DEVICE), table, rows)
    assert torch.equal(rows, table[[8, 0, 8, 3]].float())
