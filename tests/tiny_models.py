"""Random models of a few thousand weights, in the families that the engine runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.config import ModelConfig
from engine.model.loader import LoadedModel, adopt_model
from engine.model.runner import ATTENTION

VOCAB = 97
EOS = 2
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # spreads the logits, so that rounding cannot turn an argmax
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "smollm": (
        LlamaConfig,
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    # Heads of 32 and of 64 are packed by halves; see `engine.model.packing`.
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "qwen2": (Qwen2Config, {"hidden_size": 64, "num_key_value_heads": 1}),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 20}),
    "mistral": (MistralConfig, {"sliding_window": 8, "head_dim": 64}),
}
FAMILIES = tuple(_FAMILIES)


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A new configuration: transformers shares the object with every model made from it."""
    kind, own = _FAMILIES[family]
    return kind(**(_COMMON | own | changes))


def make_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    attention: str = ATTENTION,
    **changes: Any,
) -> PreTrainedModel:
    """A model with random weights, biases and norms; the same ones in every call.

    Args:
        attention: transformers' attention implementation; "eager" is the independent one.
        changes: to the family's configuration.
    """
    config = make_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() == 1:  # else every bias is 0 and every norm 1
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = EOS
    return model.to(dtype).eval()


@functools.cache
def load(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    runner: str = "auto",
    kv_dtype: str = "auto",
) -> LoadedModel:
    """A model ready for engines, which share its weights."""
    config = ModelConfig("tiny", runner=runner, kv_dtype=kv_dtype)
    return adopt_model(make_model(family, dtype), config)


@functools.cache
def eager(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights under transformers' own attention; callers need no gradient guard."""
    with torch.inference_mode(False):  # cached: must not depend on who asks first
        return make_model(family, dtype, "eager").requires_grad_(False)


@functools.cache
def generated(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """transformers' greedy continuation, `count` tokens whether or not one ends the text."""
    model = eager(family)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=[],
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())
