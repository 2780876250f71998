"""EAGLE-3 in plain torch, from the paper's description: one text, everything anew each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import ModelConfig
from engine.draft.heads.checkpoint import shapes, vocabulary
from engine.draft.heads.config import HeadConfig
from engine.draft.heads.runner import adopt_head
from engine.model.loader import LoadedModel
from tests.tiny_models import CONTEXT, eager


@dataclass(frozen=True)
class PlainHead:
    """A head's configuration and weights, float32, and its target's embeddings [V, hidden]."""

    config: HeadConfig
    weights: dict[str, Tensor]
    embeddings: Tensor

    @property
    def ids(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        rest = self.weights.get("d2t")
        numbers = torch.arange(self.config.draft_vocab)
        return numbers if rest is None else numbers + rest

    def loaded(self, dtype: str = "float32", kv_dtype: str = "auto") -> LoadedModel:
        """The same for an engine."""
        config = ModelConfig("head", dtype=dtype, kv_dtype=kv_dtype)
        return adopt_head(self.config, self.weights, config)

    def rounds(self, features: Tensor, tokens: list[int], behind: list[int]) -> Tensor:
        """Logits [1 + len(behind), draft vocab] of a draft's rounds.

        Args:
            features: [N, width] of a text's tokens but the last.
            tokens: [N] tokens behind each of those.
            behind: draft tokens that the later rounds are fed.
        """
        states = self._fuse(features)
        inputs = list(tokens)
        found, out = [], states
        for depth in range(1 + len(behind)):
            if depth:
                inputs.append(behind[depth - 1])
                states = torch.cat([states, out[-1:]])
            out, logits = self._layer(states, torch.tensor(inputs))
            found.append(logits[-1])
        return torch.stack(found)

    def draft(self, features: Tensor, tokens: list[int], length: int) -> list[int]:
        """Its greedy draft after a text."""
        said: list[int] = []
        for _ in range(length):
            said.append(int(self.ids[self.rounds(features, tokens, said)[-1].argmax()]))
        return said

    def _norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = self.config.layer["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * self.weights[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _fuse(self, features: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            features = self._norm(features, "input_norm.weight")
        if self.config.fc_norm:
            parts = features.chunk(len(self.config.taps or ()), -1)
            normed = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = torch.cat(normed, -1)
        return self._linear(features, "fc")

    def _layer(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All rows at once: what the next round is fed, and logits."""
        place, layer, n = "layers.0.", self.config.layer, len(states)
        heads, groups = layer["num_attention_heads"], layer["num_key_value_heads"]
        size = layer.get("head_dim") or self.config.hidden // heads
        normed = self._norm(states, place + "hidden_norm.weight")
        embedded = self._norm(self.embeddings[tokens], place + "input_layernorm.weight")
        both = torch.cat([embedded, normed], -1)
        q, k, v = (
            self._linear(both, f"{place}self_attn.{x}_proj").view(n, -1, size) for x in "qkv"
        )
        if self.config.family == "qwen3":
            q = self._norm(q, place + "self_attn.q_norm.weight")
            k = self._norm(k, place + "self_attn.k_norm.weight")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)
        residual = normed if self.config.norm_before_residual else states
        residual = residual + self._linear(mixed, place + "self_attn.o_proj")
        x = self._norm(residual, place + "post_attention_layernorm.weight")
        gate = F.silu(self._linear(x, place + "mlp.gate_proj"))
        x = gate * self._linear(x, place + "mlp.up_proj")
        out = residual + self._linear(x, place + "mlp.down_proj")
        normed = self._norm(out, "norm.weight")
        return (normed if self.config.norm_output else out), self._linear(normed, "lm_head")

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        base = self.config.layer.get("rope_theta", 10_000.0)
        angles = torch.outer(torch.arange(len(x)), base ** (-torch.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def random_head(
    target: str | PreTrainedModel = "llama",
    *,
    family: str = "llama",
    draft_vocab: int = 50,
    **flags: Any,
) -> PlainHead:
    """A head with random weights for a tiny target, which reads its first layers."""
    model = eager(target) if isinstance(target, str) else target
    embeddings = model.get_input_embeddings().weight.detach()
    vocab, hidden = embeddings.shape
    taps = tuple(range(min(3, 1 + model.config.num_hidden_layers)))
    layer = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT,
    }
    config = HeadConfig(layer, draft_vocab, taps, **flags)
    dice = torch.Generator().manual_seed(3)
    wanted = shapes(config, len(taps) * hidden)
    if config.fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (hidden,) for i in taps}
    weights = {}
    for name, shape in wanted.items():
        noise = torch.randn(shape, generator=dice)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=dice)[:draft_vocab].sort().values
        weights |= vocabulary(ids, vocab)
    return PlainHead(config, weights, embeddings)
