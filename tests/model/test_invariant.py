"""transformers' own modules, made to compute every row as if it were alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.activations import ACT2FN

from engine.cache.pages import PagePool
from engine.config import ModelConfig
from engine.model import invariant
from engine.model.experts import PackedExperts
from engine.model.invariant import in_whole_pieces, make_invariant
from engine.model.linear import PackedLinear
from engine.model.loader import adopt_model
from engine.model.runner import ATTENTION
from engine.model.selftest import InvarianceReport, check_invariance

DTYPES = [torch.float32, torch.bfloat16]
VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 21}

#: Mixtures of experts with routers of several kinds, and a model whose layers are `Conv1D`.
MODELS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=5, num_experts_per_tok=2),
    "qwen2-moe": Qwen2MoeConfig(**_COMMON, **_MIXTURE, shared_expert_intermediate_size=19),
    "qwen3-moe": Qwen3MoeConfig(**_COMMON, **_MIXTURE, head_dim=18),
    "olmoe": OlmoeConfig(**_COMMON, num_experts=6, num_experts_per_tok=3),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=36, n_layer=2, n_head=2,
                       initializer_range=0.3, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def make(name: str, dtype: torch.dtype, attention: str = ATTENTION) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(MODELS[name]),
        attn_implementation=attention,
        experts_implementation="eager",  # the others refuse narrow experts
        dtype=torch.float32,
    )
    for parameter in model.parameters():  # experts and routers are not initialised otherwise
        parameter.data.normal_(0.0, 0.3)
    return model.to(dtype).eval().requires_grad_(False)


def report_of(name: str, dtype: torch.dtype) -> InvarianceReport:
    loaded = adopt_model(make(name, dtype), ModelConfig("tiny"))
    assert loaded.runner_name == "torch"
    runner, pool = loaded.make_runner(80, 16), PagePool(80, 16)
    assert runner.min_rows == 1
    return check_invariance(runner, pool, VOCAB, 128, seconds=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    report = report_of(name, dtype)
    assert report.invariant, str(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name: str, dtype: torch.dtype) -> None:
    mine, ids = make(name, dtype, "eager"), torch.randint(VOCAB, (1, 23))
    exact = make(name, dtype, "eager").float()(ids).logits
    usual = (make(name, dtype, "eager")(ids).logits.float() - exact).abs().mean()
    make_invariant(mine)
    error = (mine(ids).logits.float() - exact).abs().mean()
    scale = exact.abs().max()
    assert error < (1e-5 * scale if dtype is torch.float32 else 1.3 * usual + 2**-9 * scale)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_a_router_that_counts_rows_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(_self: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight) * (1 + 1e-6 * len(x))

    monkeypatch.setattr(invariant._Rows, "_linear", uneven)
    assert not report_of(name, torch.float32).invariant


def test_what_is_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "a": nn.Linear(4, 4),
            "deep": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ModuleList([nn.Linear(4, 2)])),
            "special": Special(4, 4),
            "embedding": nn.Embedding(4, 4),
        }
    ).requires_grad_(False)
    make_invariant(model)
    assert isinstance(model["a"], PackedLinear)
    assert type(model["special"]) is Special
    assert not any(type(m) is nn.Linear for m in model.modules())
    mixture = make("qwen2-moe", torch.float32)
    make_invariant(mixture)
    assert sum(isinstance(m, PackedExperts) for m in mixture.modules()) == 2
    names = [name for name, p in mixture.named_parameters() if p.dim() > 2]
    assert not names  # no second copy of the experts stays


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "sigmoid", "mish"]
)
def test_an_activation_does_not_know_where_a_number_stands(
    name: str, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(1)
    x = (2 * torch.randn(53, 1999)).to(dtype)
    act = ACT2FN[name]
    torch.set_num_threads(threads)
    try:
        full = in_whole_pieces(act, x)
        for start, end in ((0, 1), (7, 8), (3, 20), (0, 9), (0, 14), (1, 52), (16, 33)):
            assert torch.equal(in_whole_pieces(act, x[start:end]), full[start:end])
        halves = in_whole_pieces(act, x[:, :999])  # elements of a row apart from the next row's
        assert torch.equal(halves, full[:, :999])
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(full.float(), act(x).float(), rtol=1e-2, atol=1e-6)


def test_a_plain_activation_knows() -> None:
    """Or all this would be for nothing; if it fails, torch has changed."""
    x = 2 * torch.randn(999)
    assert not torch.equal(
        functional.gelu(x), torch.cat([functional.gelu(x[i : i + 1]) for i in range(999)])
    )
