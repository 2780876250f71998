"""The pass of an EAGLE-3 head: one decoder layer over hidden states of the target.

Row i holds the target's features f_i of the token at position i and the embedding of the token
behind it, at i + 1, and tells the token at i + 2. Its key and value depend on f_i and that
embedding alone, so those of committed text are computed without running the layer.

On a CPU the products and the attention are the engine's own kernels, elsewhere torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.batch import Batch
from engine.cache.store import CacheShape, KVStore
from engine.draft.heads.checkpoint import draft_ids
from engine.draft.heads.config import HeadConfig
from engine.errors import ModelNotSupported
from engine.model.attention.base import AttentionBackend, AttentionCall
from engine.model.attention.cpu import MAX_GROUP, CpuAttention
from engine.model.attention.reference import ReferenceAttention
from engine.model.linear import Packer, can_pack
from engine.model.native import NativeUnavailable

#: [n, inputs] -> [n, outputs], in the head's type.
Linear = Callable[[Tensor], Tensor]


class EagleModel:
    """Weights of a head, and what is computed with them.

    Args:
        config: of the head.
        weights: complete: see `engine.draft.heads.checkpoint`.
        dtype: they are turned into.
        device: they are brought to.
        kv_dtype: of keys and values; None = `dtype`.
    """

    def __init__(
        self,
        config: HeadConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        layer = self._layer = transformers_config(config)
        self.config = config
        self.device, self.dtype, self.kv_dtype = device, dtype, kv_dtype or dtype
        self.heads = int(layer.num_attention_heads)
        self.groups = int(layer.num_key_value_heads)
        self.head_size = int(layer.head_dim)
        self.inner = int(layer.intermediate_size)
        self.epsilon = float(layer.rms_norm_eps)
        self._weights = {
            name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for name, tensor in weights.items()
            if name != "t2d"
        }
        self.ids = draft_ids(config, self._weights).to(device)
        #: Elements of all features of a token together.
        self.width = int(self._weights["fc.weight"].shape[1])
        self.attention = _choose_attention(self)
        self._make_layers()
        self._own_embeddings = self._weights.get("embed_tokens.weight")
        self._weights = {name: w for name, w in self._weights.items() if w.dim() == 1}
        self.longest = int(layer.max_position_embeddings)
        self._embed: Linear | None = None
        self._make_tables()

    @property
    def shape(self) -> CacheShape:
        """What it stores per token in a K/V cache."""
        return CacheShape(1, self.groups, self.head_size, self.kv_dtype)

    def attach(self, embed: Linear | None, longest: int) -> None:
        """Tells it of its target.

        Args:
            embed: the target's embeddings, int64 [n] -> [n, hidden], used unless it has its own.
            longest: tokens of a text; positions have no limit of their own here.

        Raises:
            ModelNotSupported: it lacks embeddings, and the target's do not fit.
        """
        if self._own_embeddings is None:
            found = None if embed is None else embed(self.ids[:1]).shape[-1]
            if found != self.config.hidden:
                raise ModelNotSupported(
                    f"the head has no embeddings of its own and needs those of its target, "
                    f"{self.config.hidden} wide; this target has {found or 'none that it shows'}."
                )
        self._embed = embed
        if longest > self.longest:
            self.longest = longest
            self._make_tables()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [n, hidden] of the target's tokens."""
        if self._own_embeddings is not None:
            return F.embedding(tokens, self._own_embeddings)
        if self._embed is None:  # only its speed is asked for
            shape = len(tokens), self.config.hidden
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._embed(tokens).to(self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [n, width] as states [n, hidden] that the layer takes."""
        if "input_norm.weight" in self._weights:
            features = self._norm(features.to(self.dtype), "input_norm.weight")
        if self.config.fc_norm:
            parts = features.to(self.dtype).chunk(len(self.config.taps or (0, 0, 0)), dim=-1)
            normed = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self._fc(features.to(self.dtype))

    def remember(self, batch: Batch, states: Tensor, store: KVStore) -> None:
        """Writes the keys and values of a batch's rows, from their fused states [n, hidden]."""
        n, width = len(states), self.groups * self.head_size
        joined = self._kv(self._inputs(batch.input_ids, states)[0])
        keys = self._rotate(joined[:, :width].view(n, self.groups, -1), batch, "k_norm")
        values = joined[:, width:].view(n, self.groups, -1)
        writing = replace(
            batch,
            query_starts=batch.query_starts[:1],
            context_lengths=batch.context_lengths[:0],
            page_tables=batch.page_tables[:0],
        )
        queries = keys.new_empty(n, self.heads, self.head_size)
        call = AttentionCall(0, queries, keys, values, self.head_size**-0.5)
        self.attention.prepare(writing, store)(call)

    def run(self, batch: Batch, states: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """One round.

        Args:
            batch: one row a sequence, or more; all of them give logits.
            states: [n, hidden] fused features, or what the round before gave.
            store: of keys and values.

        Returns:
            Logits [n, draft vocab], and the states [n, hidden] of the next round.
        """
        n, size = len(states), self.head_size
        inputs, normed = self._inputs(batch.input_ids, states)
        residual = normed if self.config.norm_before_residual else states
        joined = self._qkv(inputs).view(n, -1, size)
        first = self.heads
        queries = self._rotate(joined[:, :first], batch, "q_norm")
        keys = self._rotate(joined[:, first : first + self.groups], batch, "k_norm")
        values = joined[:, first + self.groups :]
        call = AttentionCall(0, queries, keys, values, size**-0.5)
        attended = self.attention.prepare(batch, store)(call)
        residual = residual + self._o(attended.view(n, -1))
        both = self._gate_up(self._norm(residual, "layers.0.post_attention_layernorm.weight"))
        gate, up = both[:, : self.inner], both[:, self.inner :]
        states = residual + self._down(F.silu(gate) * up)
        normed = self._norm(states, "norm.weight")
        return self._head(normed), normed if self.config.norm_output else states

    def _inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are made of, and the normed states."""
        normed = self._norm(states, "layers.0.hidden_norm.weight")
        embedded = self._norm(self.embed(tokens), "layers.0.input_layernorm.weight")
        return torch.cat([embedded, normed], dim=-1), normed

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        return F.rms_norm(x, (x.shape[-1],), weight, self.epsilon)

    def _rotate(self, x: Tensor, batch: Batch, norm: str) -> Tensor:
        """Queries or keys [n, heads, size], normed if the family does so, then rotated."""
        name = f"layers.0.self_attn.{norm}.weight"
        if name in self._weights:
            x = self._norm(x, name)
        cosines, sines = self._cosines[batch.positions], self._sines[batch.positions]
        half = self.head_size // 2
        turned = torch.cat([x[..., half:], x[..., :half]], dim=-1)  # the sign is in the table
        rotated: Tensor = x * cosines + turned * sines
        return rotated

    # -- construction --------------------------------------------------------------------

    def _make_layers(self) -> None:
        packer = _packer(self.dtype, self.device)

        def linear(*names: str) -> Linear:
            weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
            biases = [self._weights.get(f"{name}.bias") for name in names]
            bias = None
            if any(b is not None for b in biases):
                sizes = [len(self._weights[f"{name}.weight"]) for name in names]
                given = zip(biases, sizes, strict=True)
                bias = torch.cat([weight.new_zeros(n) if b is None else b for b, n in given])
            if packer is not None:
                return packer.linear(weight, bias)
            return lambda x: F.linear(x, weight, bias)

        attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        self._fc = linear("fc")
        self._qkv, self._kv = linear(*qkv), linear(*qkv[1:])
        self._o = linear(f"{attention}o_proj")
        self._gate_up = linear(f"{mlp}gate_proj", f"{mlp}up_proj")
        self._down = linear(f"{mlp}down_proj")
        self._head = linear("lm_head")

    def _make_tables(self) -> None:
        positions = torch.arange(self.longest).unsqueeze(0)
        cosines, sines = LlamaRotaryEmbedding(self._layer)(torch.zeros(1), positions)
        sign = torch.ones(self.head_size)
        sign[: self.head_size // 2] = -1
        tables = (cosines[0, :, None], sines[0, :, None] * sign)
        self._cosines, self._sines = (table.to(self.device, self.dtype) for table in tables)


def transformers_config(config: HeadConfig) -> Any:
    """The configuration of the head's layer, by transformers' own class: it knows all defaults."""
    kind = Qwen3Config if config.family == "qwen3" else LlamaConfig
    return kind(**{k: v for k, v in config.layer.items() if k != "model_type"})


def _packer(dtype: torch.dtype, device: torch.device) -> Packer | None:
    if not can_pack(dtype, device):
        return None
    try:
        return Packer()
    except NativeUnavailable:
        return None


def _choose_attention(model: EagleModel) -> AttentionBackend:
    narrow = model.heads // model.groups <= MAX_GROUP and model.head_size % 2 == 0
    if can_pack(model.dtype, model.device) and narrow:
        try:
            return CpuAttention()
        except NativeUnavailable:
            pass
    return ReferenceAttention()
