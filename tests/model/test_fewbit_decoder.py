"""Decoders whose weights are in few bits: the dequantised model's numbers, rows as if alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.model.attention.cpu import CpuAttention
from engine.model.fewbit_linear import PLANES, PackedFewbitLinear
from engine.model.invariant import make_invariant
from engine.model.native_decoder import NativeDecoder, why_not_native
from engine.model.native_runner import NativeRunner
from engine.model.passes import Runner
from engine.model.probe import cache_shape, probe
from engine.model.quantized import QuantizedLinear
from engine.model.runner import ModelRunner
from tests.blocks import quantised
from tests.tiny_models import CONTEXT, VOCAB, make_model

TOKENS = [random.Random(3).randrange(VOCAB) for _ in range(90)]
DTYPES = [torch.float32, torch.bfloat16]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def mixed(name: str) -> str:
    """As files hold them: kinds differ between q, k and v, and here also between gate and up."""
    kinds = {"v_proj": "Q6_K", "down_proj": "Q8_0", "lm_head": "Q6_K", "up_proj": "Q5_K"}
    return kinds.get(name.rpartition(".")[2], "Q4_K")


def some(name: str) -> str | None:
    """Outputs that fill no block, kinds that differ all the same, and plain layers among them."""
    plain = name.endswith(("o_proj", "1.self_attn.k_proj", "0.mlp.down_proj", "1.mlp.gate_proj"))
    return None if plain else "Q5_0" if name.endswith("v_proj") else "Q4_0"


def all_of(kind: str) -> Callable[[str], str]:
    return lambda _name: kind


#: Family, changes to it, and kinds of its layers.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[str], str | None]]] = {
    "halves": ("llama", WIDE, all_of("Q4_1")),
    "mixed": ("llama", WIDE, mixed),
    "tied": ("smollm", {"hidden_size": 96, "num_attention_heads": 6}, all_of("Q4_1")),
    "biased": ("llama-biased", {}, all_of("Q8_0")),
    "one group": ("qwen2", WIDE, mixed),
    "normed heads": ("qwen3", {}, some),
}


def make(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, changes, kind_of = CASES[case]
    return quantised(make_model(family, dtype, **changes), kind_of)[0]


def decoder_of(model: PreTrainedModel, activations: str = "int16") -> NativeDecoder:
    assert why_not_native(model) is None
    return NativeDecoder(model, CONTEXT, [layer.window for layer in probe(model)], activations)


def native(case: str, activations: str, dtype: torch.dtype, page_size: int = 16) -> NativeRunner:
    return NativeRunner(decoder_of(make(case, dtype), activations), 400 // page_size, page_size)


def feed(runner: Runner, pool: PagePool, spans: list[Span]) -> torch.Tensor:
    batch = build_batch(spans, pool.page_size, pool.num_pages, min_rows=1)
    return runner.forward(batch).logits.clone()


def whole(runner: Runner, page_size: int = 16) -> torch.Tensor:
    pool = PagePool(400 // page_size, page_size)
    table = pool.new_table("")
    assert pool.reserve(table, len(TOKENS))
    return feed(runner, pool, [Span(TOKENS, 0, table, len(TOKENS))])


def dequantised(case: str) -> torch.Tensor:
    """transformers' own logits with the same weights in float32."""
    family, changes, kind_of = CASES[case]
    _, plain = quantised(make_model(family, **changes), kind_of)
    model = make_model(family, attention="eager", **changes)
    model.load_state_dict(plain, strict=False)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_model(case: str) -> None:
    truth = dequantised(case)
    scale = truth.abs().max().item()
    torch.testing.assert_close(
        whole(native(case, "int16", torch.float32)), truth, rtol=0, atol=3e-4 * scale
    )
    coarse = (whole(native(case, "int8", torch.float32)) - truth).abs().max().item()
    assert 1e-3 * scale < coarse < 8e-2 * scale


@pytest.mark.parametrize("case", ["halves", "normed heads"])
def test_keys_and_values_in_bfloat16_are_all_that_is_rounded_then(case: str) -> None:
    """Where layers are in few bits, nothing else is: far closer than a model in bfloat16."""
    truth = dequantised(case)
    error = (whole(native(case, "int16", torch.bfloat16)) - truth).square().mean()
    family, changes, _ = CASES[case]
    weights = quantised(make_model(family, **changes), CASES[case][2])[1]
    plain = make_model(family, **changes)
    plain.load_state_dict(weights, strict=False)
    runner = NativeRunner(decoder_of(plain.to(torch.bfloat16)), 25, 16)
    assert error < 0.5 * (whole(runner) - truth).square().mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", PLANES)
@pytest.mark.parametrize("case", ["mixed", "tied", "normed heads"])
def test_rows_do_not_depend_on_chunks_pages_or_company(
    case: str, activations: str, dtype: torch.dtype
) -> None:
    expected = whole(native(case, activations, dtype))
    for page_size in (1, 16):
        runner = native(case, activations, dtype, page_size)
        pool = PagePool(400 // page_size, page_size)
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


@pytest.mark.parametrize("case", ["mixed", "tied", "normed heads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_the_files_own_numbers(case: str, dtype: torch.dtype) -> None:
    model = make(case, dtype)
    table = model.get_input_embeddings().weight.dequantize()
    ids = torch.tensor([[96, 0, 33], [31, 32, 64]])
    assert torch.equal(decoder_of(model).embed(ids), table[ids].to(dtype))


def test_rows_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    runner, results = native("mixed", "int16", torch.float32), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(whole(runner))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("case", ["mixed", "normed heads"])
def test_the_other_runner_says_the_same(case: str) -> None:
    """transformers' own modules, with layers in few bits replaced."""
    model = make(case)
    count = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    make_invariant(model)
    packed = [module for module in model.modules() if isinstance(module, PackedFewbitLinear)]
    assert len(packed) == count
    runner = ModelRunner(model, CpuAttention(), cache_shape(model, probe(model)), 25, 16)
    assert runner.min_rows == 1
    truth = dequantised(case)
    torch.testing.assert_close(whole(runner), truth, rtol=0, atol=3e-4 * truth.abs().max().item())


def test_kinds_that_no_kernel_knows_are_widened() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    from engine.model.quantized import QuantizedWeight

    blocks = torch.randint(0, 256, (512, 84), dtype=torch.uint8)
    blocks[:, 80:] = torch.tensor([0.002, 0.004], dtype=torch.float16).view(torch.uint8)
    weight = QuantizedWeight("Q2_K", 512, 256, blocks)
    plain = torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType.Q2_K))
    results = []
    for model in (make("halves"), make("halves")):
        model.model.layers[0].mlp.gate_proj = QuantizedLinear(weight)
        if not results:
            results.append(whole(NativeRunner(decoder_of(model), 25, 16)))
        else:
            make_invariant(model)
            shape = cache_shape(model, probe(model))
            results.append(whole(ModelRunner(model, CpuAttention(), shape, 25, 16)))
    model = make("halves")
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(256, 512, bias=False)
    model.model.layers[0].mlp.gate_proj.weight.data = plain
    with torch.inference_mode():
        truth = whole(NativeRunner(decoder_of(model), 25, 16))
    assert torch.equal(results[0], truth)
    torch.testing.assert_close(results[1], truth, rtol=0, atol=3e-4 * truth.abs().max().item())


def test_a_weight_is_kept_once() -> None:
    """Blocks are given back, and a tied table is the output layer's own."""
    model = make("tied")
    decoder = decoder_of(model)
    assert all(
        m.weight.data.numel() == 0 for m in model.modules() if isinstance(m, QuantizedLinear)
    )
    hidden, inner, table = 96, 96, 97
    layer = hidden * (hidden + 2 * 32) + hidden * hidden + 3 * hidden * inner
    weights = 2 * layer + -(-table // 32) * 32 * hidden
    norms_and_angles = 4 * (5 * hidden + 2 * CONTEXT * 16)
    assert decoder.num_bytes == weights * 5 // 8 + norms_and_angles
