"""A decoder's weights on their device, joined where one product can serve several."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.cache.store import CacheShape
from engine.model.linear import give_back
from engine.model.native_decoder import ARCHITECTURES

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_GROUP = 16  # query heads of a key/value head: a row of theirs has to fit into a tile


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: weight [N, K], and a bias [N] in float32, if it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        input_norm, post_norm: [W] float32.
        qkv: queries, keys and values, one below the other.
        output, down: back into the residual stream.
        gate_up: gates, and below them what they let through.
        head_norms: [D] float32 each, of single query and key heads, if it has such.
        window: positions that a row sees at most; 0 = all.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int


def why_not_cuda(model: PreTrainedModel) -> str | None:
    """Why this model cannot run on the GPU's own kernels, or None if it can."""
    name, config = type(model).__name__, model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if name not in ARCHITECTURES:
        return f"{name} is none of {', '.join(ARCHITECTURES)}"
    if model.dtype not in _DTYPES:
        return f"the kernels have no {model.dtype}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if rope not in _STATIC_ROPE:
        return f"its rotary embedding is {rope}"
    matrices = {type(m).__name__ for m in model.modules() if hasattr(m, "in_features")}
    if matrices != {"Linear"}:
        return f"its matrices are {', '.join(sorted(matrices))}"
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.num_attention_heads // groups > MAX_GROUP:
        return f"it has more than {MAX_GROUP} query heads to a key/value head"
    if model.model.layers[0].self_attn.head_dim % 2:
        return "the size of its heads is odd"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'specserve[gpu]')"
    return None


class CudaDecoder:
    """The weights of a decoder that `why_not_cuda` accepts.

    Args:
        model: its weights are taken out of it, layer by layer, so that there is never a second
            copy of them.
        max_model_len: positions to prepare rotary tables for.
        windows: of each layer, how many positions a row sees at most; 0 = all.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int, windows: Sequence[int]) -> None:
        body, config = model.model, model.config
        attention = body.layers[0].self_attn
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = max_model_len
        self.heads = config.num_attention_heads
        self.groups: int = attention.k_proj.out_features // attention.head_dim
        self.head_size = attention.head_dim
        self.hidden, self.intermediate = config.hidden_size, config.intermediate_size
        self.vocab = model.lm_head.out_features
        self.scale, self.epsilon = attention.scaling, body.norm.variance_epsilon
        positions = torch.arange(max_model_len, device=self.device).unsqueeze(0)
        any_state = torch.zeros(1, dtype=torch.float32, device=self.device)
        # Both halves of a head turn by the same angles.
        self.tables = tuple(
            table[0, :, : self.head_size // 2].float().contiguous()
            for table in body.rotary_emb(any_state, positions)
        )
        self.embedding = body.embed_tokens.weight.detach()
        self.final_norm = body.norm.weight.detach().float()
        self.head = Matrix(model.lm_head.weight.detach().contiguous(), None)
        self.layers = tuple(map(_take_layer, body.layers, windows))
        give_back(model)

    @property
    def shape(self) -> CacheShape:
        """What it stores per token in a K/V cache."""
        return CacheShape(len(self.layers), self.groups, self.head_size, self.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of int64 ids [...]: [..., hidden] in the weights' type."""
        return torch.nn.functional.embedding(ids.to(self.device), self.embedding)


def _take_layer(layer: Any, window: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (_wide(attention.q_norm.weight), _wide(attention.k_norm.weight))
    taken = Layer(
        input_norm=_wide(layer.input_layernorm.weight),
        post_norm=_wide(layer.post_attention_layernorm.weight),
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_join(attention.o_proj),
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=_join(mlp.down_proj),
        head_norms=norms,
        window=window,
    )
    give_back(layer)
    return taken


def _wide(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to(torch.float32, copy=True)


def _join(*layers: nn.Linear) -> Matrix:
    """Layers with the same inputs as one; a bias that one of them lacks is 0."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return Matrix(torch.cat(weights), None)
    wide = [
        weight.new_zeros(len(weight), dtype=torch.float32) if bias is None else _wide(bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return Matrix(torch.cat(weights), torch.cat(wide))
