"""Paged attention: right, and every row to the last bit what it would be alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from engine.cache.store import CacheShape, KVStore, round_heads, widen_heads
from engine.model.attention.base import AttentionBackend, AttentionCall
from engine.model.attention.cpu import CpuAttention
from engine.model.attention.reference import ReferenceAttention
from tests.model.paging import Pages, chunks

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Shape:
    """One layer's attention."""

    heads: int = 4
    groups: int = 2
    size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    kept: torch.dtype | None = None  # of the cache


@dataclass(frozen=True)
class Text:
    """Queries [N, H, D], keys and values [N, G, D] of one sequence."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_text(shape: Shape, length: int, seed: int = 0) -> Text:
    dice = torch.Generator().manual_seed(seed)

    def some(heads: int) -> torch.Tensor:
        return torch.randn(length, heads, shape.size, generator=dice).to(shape.dtype)

    return Text(some(shape.heads), some(shape.groups), some(shape.groups))


@functools.cache
def backend(name: str) -> AttentionBackend:
    return CpuAttention() if name == "cpu" else ReferenceAttention()


def attend(
    name: str, shape: Shape, texts: list[Text], size: int, page_size: int = 16
) -> list[torch.Tensor]:
    """All texts side by side, `size` tokens of each at a time; returns [N, H, D] of each."""
    lengths = [len(t.queries) for t in texts]
    pages = Pages(sum(-(-n // page_size) for n in lengths) + 3, page_size)
    tables = [pages.table(n) for n in lengths]
    kept = CacheShape(1, shape.groups, shape.size, shape.kept or shape.dtype)
    store = KVStore(kept, pages.num_pages, page_size, "cpu")
    for part in (store.keys, store.values):  # whoever reads what nobody wrote will show it
        part.view(torch.int8).fill_(-1)  # all bits: NaN as float32, as bfloat16, and as a scale
    results: list[list[torch.Tensor]] = [[] for _ in texts]
    for start, _ in chunks(max(lengths), size):
        alive = [i for i, n in enumerate(lengths) if start < n]
        parts = [(i, min(start + size, lengths[i])) for i in alive]
        batch = pages.batch([(tables[i], start, [0] * (end - start)) for i, end in parts])

        def packed(field: str, parts=parts, start=start) -> torch.Tensor:
            return torch.cat([getattr(texts[i], field)[start:end] for i, end in parts])

        call = AttentionCall(
            0, packed("queries"), packed("keys"), packed("values"), shape.size**-0.5, shape.window
        )
        out = backend(name).prepare(batch, store)(call)
        for (i, _), rows in zip(parts, out.split([end - start for _, end in parts]), strict=True):
            results[i].append(rows)
    return [torch.cat(rows) for rows in results]


def exact(shape: Shape, text: Text) -> torch.Tensor:
    """Attention in float64 over the same (rounded) numbers."""
    length, repeat = len(text.queries), shape.heads // shape.groups
    queries = text.queries.double().transpose(0, 1)
    keys, values = text.keys, text.values
    if shape.kept is torch.int8:
        keys, values = (widen_heads(round_heads(x)) for x in (keys, values))
    keys = keys.double().transpose(0, 1).repeat_interleave(repeat, 0)
    values = values.double().transpose(0, 1).repeat_interleave(repeat, 0)
    scores = queries @ keys.transpose(1, 2) * shape.size**-0.5 + mask(shape, length).double()
    return (scores.softmax(-1) @ values).transpose(0, 1)


def mask(shape: Shape, length: int) -> torch.Tensor:
    """0 where a row (first index) sees a position, else -inf."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & ((distance < shape.window) | (shape.window == 0))
    return torch.where(seen, 0.0, float("-inf"))


def transformers_eager(shape: Shape, text: Text) -> torch.Tensor:
    """What transformers computes for it, in the tensors' own type."""
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.groups, training=False)
    q, k, v = (t.transpose(0, 1)[None] for t in (text.queries, text.keys, text.values))
    seen = mask(shape, len(text.queries)).to(shape.dtype)[None, None]
    out, _ = eager_attention_forward(module, q, k, v, seen, scaling=shape.size**-0.5)
    return out[0]


SHAPES = [
    *(Shape(4, 2, size) for size in (8, 16, 20, 64, 80, 128)),
    *(Shape(groups * per_group, groups, 16) for groups, per_group in
      ((1, 1), (3, 1), (2, 3), (1, 5), (2, 7), (1, 8), (1, 15), (1, 16))),
    *(Shape(6, 2, 64, window=window) for window in (1, 2, 31, 32, 33, 50)),
    Shape(16, 1, 80, window=7),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_equals_transformers(name: str, shape: Shape, dtype: torch.dtype) -> None:
    """Within rounding, and nearer to the truth than transformers' own rounding."""
    shape = replace(shape, dtype=dtype)
    text = make_text(shape, 70)
    (mine,) = attend(name, shape, [text], size=70)
    truth, theirs = exact(shape, text), transformers_eager(shape, text)
    error = (mine.double() - truth).abs().max()
    if dtype is torch.float32:
        assert error < 1e-5
        assert torch.allclose(mine, theirs, atol=1e-5)
    else:
        scale = truth.abs().max()
        assert error <= 2**-7 * scale
        assert error <= 1.5 * (theirs.double() - truth).abs().max() + 2**-9 * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_eight_bits_are_read_as_they_were_rounded(
    name: str, shape: Shape, dtype: torch.dtype
) -> None:
    """All that is lost is lost in rounding keys and values, which is done in one way."""
    shape = replace(shape, dtype=dtype, kept=torch.int8)
    text = make_text(shape, 70)
    (mine,) = attend(name, shape, [text], size=70)
    truth = exact(shape, text)
    bound = 2e-5 if dtype is torch.float32 else 2**-8 * truth.abs().max()
    assert (mine.double() - truth).abs().max() <= bound


def test_eight_bits_lose_as_much_as_they_must() -> None:
    """Half a step of 1/127 of the largest element, which a scale rounded up makes 1/126."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, 64, generator=dice) * torch.logspace(-20, 20, 500)[:, None, None]
    most = x.abs().amax(-1, keepdim=True)
    stored = round_heads(x)
    assert stored.dtype is torch.int8
    assert stored.shape == (500, 3, 66)
    error = (widen_heads(stored) - x).abs() / most
    assert error.max() <= 0.5 / 126
    assert error.max() >= 0.45 / 127
    assert torch.equal(widen_heads(round_heads(torch.zeros(2, 8))), torch.zeros(2, 8))
    for odd in (torch.inf, -torch.inf, torch.nan):  # noticed later, where numbers must be finite
        assert not widen_heads(round_heads(torch.tensor([1.0, odd]))).isfinite().any()


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_what_is_no_number_stays_so_in_eight_bits(name: str, odd: float) -> None:
    shape = Shape(kept=torch.int8)
    text = make_text(shape, 5)
    text.values[3, 1, 2] = odd
    (mine,) = attend(name, shape, [text], size=5)
    assert mine[:3].isfinite().all()
    assert mine[:, :2].isfinite().all()
    assert not mine[3:, 2:].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [None, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(3, 1, 20), Shape(16, 1, 64), Shape(4, 4, 80, window=9), Shape(6, 2, 128)],
    ids=str,
)
def test_bit_equal_in_any_chunks_pages_company_and_threads(
    shape: Shape, kept: torch.dtype | None, dtype: torch.dtype
) -> None:
    shape = replace(shape, dtype=dtype, kept=kept)
    length = 75
    text = make_text(shape, length)
    others = [make_text(shape, n, seed=n) for n in (1, 2, 40, 90)]
    (truth,) = attend("cpu", shape, [text], size=length)
    assert torch.isfinite(truth).all()
    for page_size in (1, 3, 8, 16):
        for size in (1, 2, 5, 16, 33, length):
            (alone,) = attend("cpu", shape, [text], size, page_size)
            assert torch.equal(alone, truth), (page_size, size)
        together = attend("cpu", shape, [*others[:2], text, *others[2:]], 7, page_size)
        assert torch.equal(together[2], truth), page_size
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        try:
            together = attend("cpu", shape, [text, *others], 40)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(together[0], truth), threads


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_bit_equal_too(dtype: torch.dtype) -> None:
    for shape in (Shape(dtype=dtype), Shape(3, 1, 20, dtype, window=9)):
        text, other = make_text(shape, 40), make_text(shape, 23, seed=1)
        (truth,) = attend("reference", shape, [text], size=40)
        for size, page_size in ((1, 3), (7, 1), (16, 8)):
            together = attend("reference", shape, [other, text], size, page_size)
            assert torch.equal(together[1], truth)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_large_scores_do_not_overflow(name: str) -> None:
    """Scores of some hundreds: the softmax is one-hot, not NaN."""
    shape = Shape()
    text = make_text(shape, 50)
    text = replace(text, queries=text.queries * 300)
    (mine,) = attend(name, shape, [text], size=13)
    assert torch.allclose(mine.double(), exact(shape, text), atol=1e-4)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_padding_rows_are_zero_and_harm_nobody(name: str) -> None:
    shape = Shape()
    text = make_text(shape, 9)
    pages = Pages(4, 4)
    table = pages.table(9)
    store = KVStore(CacheShape(1, shape.groups, shape.size, shape.dtype), 4, 4, "cpu")
    store.keys.zero_()
    store.values.zero_()
    batch = pages.batch([(table, 0, [0] * 9)], min_rows=12)
    assert batch.num_padding_rows == 3

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, torch.full_like(rows[:3], 7.0)])

    call = AttentionCall(
        0, padded(text.queries), padded(text.keys), padded(text.values), shape.size**-0.5
    )
    out = backend(name).prepare(batch, store)(call)
    assert torch.allclose(out[:9].double(), exact(shape, text), atol=1e-5)
    assert not out[9:].any()
    token = shape.groups * shape.size  # elements
    for part in (store.keys, store.values):
        written = (part[0].view(5, -1) != 0).sum(-1)
        assert written[4] == token  # all padding writes to one slot of the scratch page
        assert written[:4].sum() == 9 * token


def test_strided_queries_keys_and_values() -> None:
    """As they come out of a fused projection."""
    shape = Shape(4, 2, 16)
    text = make_text(shape, 30)
    (truth,) = attend("cpu", shape, [text], size=30)
    fused = torch.cat([t.flatten(1) for t in (text.queries, text.keys, text.values)], 1)
    q, k, v = fused.split([64, 32, 32], 1)
    views = Text(q.view(30, 4, 16), k.view(30, 2, 16), v.view(30, 2, 16))
    pages = Pages(2, 16)
    store = KVStore(CacheShape(1, 2, 16, shape.dtype), 2, 16, "cpu")
    batch = pages.batch([(pages.table(30), 0, [0] * 30)])
    call = AttentionCall(0, views.queries, views.keys, views.values, 0.25)
    assert torch.equal(backend("cpu").prepare(batch, store)(call), truth)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in vars(views).values()]
    assert torch.equal(backend("cpu").prepare(batch, store)(AttentionCall(0, *turned, 0.25)), truth)
