"""What is loaded, what is refused, and what the refusal says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    PhiConfig,
    PreTrainedConfig,
)

from engine.config import ModelConfig
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.choices import choose_device, choose_dtype, choose_kv_dtype
from engine.model.loader import adopt_model, load_model
from engine.model.runner import ATTENTION
from tests.tiny_models import CONTEXT, EOS, VOCAB, make_model

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**({"path": "tiny"} | changes))


def of(settings: PreTrainedConfig, attention: str = ATTENTION):
    return AutoModelForCausalLM.from_config(settings, attn_implementation=attention).float()


def test_facts() -> None:
    model = adopt_model(make_model("smollm", torch.bfloat16), config(max_model_len=100))
    assert model.vocab_size == VOCAB
    assert model.max_model_len == 100
    assert model.eos_token_ids == {EOS}
    assert (model.shape.num_layers, model.shape.num_heads, model.shape.head_size) == (2, 2, 8)
    assert model.shape.dtype is torch.bfloat16
    assert model.device.type == "cpu"
    assert adopt_model(make_model(), config()).max_model_len == CONTEXT


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [(5, 2, {5}), ([5, 6], 2, {5, 6}), (None, 2, {2}), (None, [2, 3], {2, 3}), (None, None, set())],
)
def test_tokens_that_end_a_text(generation: Any, own: Any, expected: set[int]) -> None:
    """The generation config knows best; the model's own config stands in."""
    model = make_model(eos_token_id=own)
    model.generation_config.eos_token_id = generation
    assert adopt_model(model, config()).eos_token_ids == expected


@pytest.mark.parametrize("runner", ["native", "torch", "reference"])
def test_a_saved_model_is_the_model(runner: str, tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    model = load_model(tmp_path, config(path=str(tmp_path), dtype="float32", runner=runner))
    assert model.runner_name == runner
    assert model.shape.dtype is torch.float32


# -- refusals --------------------------------------------------------------------------------


def test_softcapped_attention_is_refused() -> None:
    gemma = of(Gemma2Config(**SMALL, attn_logit_softcapping=50.0))
    with pytest.raises(ModelNotSupported, match="Gemma2Attention uses softcap"):
        adopt_model(gemma, config())


def test_attention_outside_transformers_interface_is_refused(tmp_path: Path) -> None:
    settings = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    of(settings, "eager").save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match="BloomForCausalLM does not route its attention"):
        load_model(tmp_path, config(dtype="float32"))


def test_attention_sinks_are_refused() -> None:
    """Their weights are no setting; the attention call itself notices them."""
    oss = of(GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(ModelNotSupported, match="GptOssAttention uses s_aux"):
        adopt_model(oss, config())


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"max_model_len is 257.*{CONTEXT} tokens; lower"):
        adopt_model(make_model(), config(max_model_len=CONTEXT + 1))


@pytest.mark.parametrize("name", ["float8", "fp32", "", "bf16"])
def test_unknown_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"dtype is '{name}'; choose one of auto"):
        choose_dtype(name, torch.device("cpu"))


def test_known_dtypes() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", cpu) is torch.float16
    assert choose_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    assert choose_kv_dtype("auto", torch.bfloat16, cpu) is torch.bfloat16
    with pytest.raises(ConfigurationError, match=r"kv_dtype is int8, but .* the device is cuda"):
        choose_kv_dtype("int8", torch.bfloat16, torch.device("cuda"))


def test_unknown_runners_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="runner is 'fast'; choose one of auto, native"):
        adopt_model(make_model(), config(runner="fast"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="no CUDA device; use cpu"):
        choose_device("cuda")


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelNotSupported, match="cannot be loaded"):
            load_model(path, config(dtype="float32"))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotSupported, match="safetensors"):
        load_model(tmp_path, config(dtype="float32"))


# -- fallbacks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"intermediate_size": 51}, "a layer's width is odd"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its rotary embedding is dynamic",
        ),
    ],
)
def test_what_is_not_native_runs_on_torch(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert adopt_model(make_model(**changes), config()).runner_name == "torch"
    assert reason in caplog.text
    with pytest.raises(ConfigurationError, match=f"runner is native, but {reason}; use auto"):
        adopt_model(make_model(**changes), config(runner="native"))


def test_more_heads_to_a_group_than_the_kernel_holds(caplog: pytest.LogCaptureFixture) -> None:
    wide = {"hidden_size": 34, "num_attention_heads": 34, "num_key_value_heads": 2, "head_dim": 8}
    assert adopt_model(make_model(**wide), config()).runner_name == "reference"
    assert "34 heads in 2 groups" in caplog.text
    with pytest.raises(ConfigurationError, match=r"runner is torch, but 34 heads.*use reference"):
        adopt_model(make_model(**wide), config(runner="torch"))


def test_an_odd_size_of_a_head_runs_on_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    """Where only a part of it is rotated; the kernel multiplies bfloat16 elements in pairs."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}
    sizes = {"hidden_size": 20, "intermediate_size": 32, "num_hidden_layers": 1}
    model = of(PhiConfig(vocab_size=VOCAB, num_attention_heads=4, rope_parameters=rope, **sizes))
    assert adopt_model(model, config()).runner_name == "reference"
    assert "the size of a head, 5, is odd" in caplog.text


def test_half_precision_runs_on_the_reference() -> None:
    assert adopt_model(make_model(dtype=torch.float16), config()).runner_name == "reference"
