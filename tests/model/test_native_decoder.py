"""The native decoder: transformers' numbers, and every row as if it were alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.model import native_decoder
from engine.model.native import load_kernels
from engine.model.native_decoder import NativeDecoder, why_not_native
from engine.model.native_runner import NativeRunner
from engine.model.packing import alternate, alternate_halves, pack
from engine.model.probe import probe
from tests.tiny_models import CONTEXT, FAMILIES, VOCAB, eager, make_model

TOKENS = [random.Random(3).randrange(VOCAB) for _ in range(120)]
DTYPES = [torch.float32, torch.bfloat16]


def decoder_of(model: PreTrainedModel) -> NativeDecoder:
    return NativeDecoder(model, CONTEXT, [layer.window for layer in probe(model)])


def new_runner(
    family: str, dtype: torch.dtype, page_size: int = 16
) -> tuple[NativeRunner, PagePool]:
    pages = 400 // page_size
    decoder = decoder_of(make_model(family, dtype))
    return NativeRunner(decoder, pages, page_size), PagePool(pages, page_size)


def feed(runner: NativeRunner, pool: PagePool, spans: list[Span]) -> torch.Tensor:
    batch = build_batch(spans, pool.page_size, pool.num_pages, min_rows=1)
    return runner.forward(batch).logits.clone()


def whole(runner: NativeRunner, pool: PagePool) -> torch.Tensor:
    table = pool.new_table("")
    assert pool.reserve(table, len(TOKENS))
    return feed(runner, pool, [Span(TOKENS, 0, table, len(TOKENS))])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_transformers(family):
    runner, pool = new_runner(family, torch.float32)
    with torch.inference_mode():
        expected = eager(family)(torch.tensor([TOKENS])).logits[0]
    scale = expected.abs().max().item()
    torch.testing.assert_close(whole(runner, pool), expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_closer_to_float32_than_transformers(family):
    runner, pool = new_runner(family, torch.bfloat16)
    theirs, exact = (
        eager(family, torch.bfloat16),
        make_model(family, torch.bfloat16, "eager").float(),
    )
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        truth = exact(ids).logits[0]
        error = (theirs(ids).logits[0].float() - truth).square().mean()
    assert (whole(runner, pool) - truth).square().mean() < error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_chunks_pages_or_company(family, dtype):
    runner, pool = new_runner(family, dtype)
    expected = whole(runner, pool)
    for page_size in (1, 8, 16):
        runner, pool = new_runner(family, dtype, page_size)
        mine, other = pool.new_table(""), pool.new_table("")
        assert pool.reserve(mine, len(TOKENS))
        assert pool.reserve(other, 40)
        at, rows = 0, []
        for count in itertools.cycle((1, 2, 1, 3, 13, 5, 1, 30)):
            count = min(count, len(TOKENS) - at)
            spans = [Span(TOKENS[at : at + count], at, mine, count)]
            if count % 2:  # company before it, so that its place in the batch changes too
                spans.insert(0, Span(TOKENS[:40:3], 0, other, 2))
            rows.append(feed(runner, pool, spans)[-count:])
            at += count
            if at == len(TOKENS):
                break
        assert torch.equal(torch.cat(rows), expected)


def test_in_tiles_it_is_the_same_decoder(monkeypatch):
    plain = whole(*new_runner("qwen2", torch.bfloat16))
    kernels = load_kernels(emulate_tiles=True)
    monkeypatch.setattr(native_decoder, "load_kernels", lambda: kernels)
    assert not torch.equal(whole(*new_runner("qwen2", torch.bfloat16)), plain)  # it is in tiles
    test_bfloat16_logits_are_closer_to_float32_than_transformers("qwen2")
    test_rows_do_not_depend_on_chunks_pages_or_company("qwen2", torch.bfloat16)


def test_rows_do_not_depend_on_threads():
    runner, pool = new_runner("smollm", torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(whole(runner, pool))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_two_runners_of_one_decoder_keep_apart():
    decoder = decoder_of(make_model("llama"))
    pool = PagePool(25, 16)
    first, second = NativeRunner(decoder, 25, 16), NativeRunner(decoder, 25, 16)
    table = pool.new_table("")
    assert pool.reserve(table, 30)
    feed(first, pool, [Span(TOKENS[:20], 0, table, 1)])
    feed(second, pool, [Span(TOKENS[30:50], 0, table, 1)])
    alone = feed(first, pool, [Span(TOKENS[:21], 0, table, 1)])
    feed(second, pool, [Span(TOKENS[30:50], 0, table, 1)])
    assert torch.equal(feed(first, pool, [Span(TOKENS[20:21], 20, table, 1)]), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_is_a_permutation(dtype):
    weight = torch.arange(40 * 6, dtype=torch.float32).view(40, 6).to(dtype)
    packed = pack(weight)
    assert packed.shape[0] == 2  # 40 outputs fill two blocks of 32
    for n, k in itertools.product(range(40), range(6)):
        block, lane = divmod(n, 32)
        found = (
            packed[block, k, lane] if dtype is torch.float32 else packed[block, k // 2, lane, k % 2]
        )
        assert found == weight[n, k]


def test_gate_and_up_alternate_by_sixteen():
    gate, up = torch.arange(20.0)[:, None], 100 + torch.arange(20.0)[:, None]
    mixed = alternate(gate, up)[:, 0].tolist()
    assert mixed[:16] == list(range(16))
    assert mixed[16:32] == list(range(100, 116))
    assert mixed[32:36] == list(range(16, 20))


def test_both_halves_of_a_head_alternate_by_sixteen():
    heads = torch.arange(128.0)[:, None]
    mixed = alternate_halves(heads, 64)[:, 0].tolist()
    for at, first in ((0, 0), (16, 32), (32, 16), (48, 48), (64, 64), (80, 96)):
        assert mixed[at : at + 16] == list(range(first, first + 16))


def test_what_cannot_run_natively_says_why():
    assert why_not_native(make_model("llama")) is None
    assert "float16" in (why_not_native(make_model("llama", torch.float16)) or "")
    gelu = make_model("llama", hidden_act="gelu")
    assert "gelu" in (why_not_native(gelu) or "")


def test_matrices_that_are_not_plain_are_left_to_transformers():
    """Quantised layers keep what `weight` alone does not tell."""

    class ScaledLinear(torch.nn.Linear):
        pass

    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = ScaledLinear
    assert "ScaledLinear" in (why_not_native(model) or "")
