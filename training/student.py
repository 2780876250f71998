"""An EAGLE-3 head that can learn: the same pass as the drafter's, over whole texts at once.

Rounds are unrolled as they will be drafted: a later round's row goes on from the state that its
own row had in the round before, and attends to the true rows up to where the draft began and to
its own rows since. The tokens it is fed are the text's, since a draft goes on being looked at
only while its tokens are those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.draft.heads.checkpoint import shapes, vocabulary
from engine.draft.heads.config import HeadConfig
from engine.draft.heads.eagle_model import transformers_config

_LAYER = "layers.0."


class EagleStudent(nn.Module):
    """A head in training; float32.

    Args:
        config: of the head.
        embeddings: [vocab, hidden] of the target; they do not learn.
        ids: int64 [draft vocab] the target's ids that it may guess, ascending.
        width: elements of a row of features.
    """

    def __init__(self, config: HeadConfig, embeddings: Tensor, ids: Tensor, width: int) -> None:
        super().__init__()
        self.config = config
        layer = transformers_config(config)
        self.heads, self.groups = layer.num_attention_heads, layer.num_key_value_heads
        self.size = layer.head_dim
        self.epsilon = float(layer.rms_norm_eps)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("ids", ids)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.weights = nn.ParameterDict()
        for name, shape in shapes(config, width).items():
            if name != "d2t":
                noise = torch.randn(shape) * shape[-1] ** -0.5
                first = torch.ones(shape) if len(shape) == 1 else noise
                self.weights[_key(name)] = nn.Parameter(first)

    @torch.no_grad()
    def begin_as(self, target: Any) -> None:
        """Starts as the target's last layer and output layer, applied once more to the features of
        the last tap, deaf to the embedding.

        Args:
            target: transformers' model of a family that `HeadConfig` knows.
        """
        hidden, fused = self.config.hidden, self._get("fc.weight")
        fused.zero_()
        fused[:, -hidden:] = torch.eye(hidden)
        last = target.model.layers[-1]
        for name, weight in last.state_dict().items():
            key = _key(_LAYER + name)
            if key not in self.weights:
                continue
            mine = self.weights[key]
            if mine.shape == weight.shape:
                mine.copy_(weight)
            else:  # queries, keys and values also see the embedding, which comes first
                mine.zero_()
                mine[:, hidden:] = weight
        self._get(_LAYER + "hidden_norm.weight").copy_(last.input_layernorm.weight)
        self._get("norm.weight").copy_(target.model.norm.weight)
        self._get("lm_head.weight").copy_(target.lm_head.weight[self.ids])

    def state(self) -> dict[str, Tensor]:
        """Its tensors as a checkpoint names them."""
        found = {name.replace("/", "."): weight.detach() for name, weight in self.weights.items()}
        if self.config.draft_vocab < self.config.vocab:
            found |= vocabulary(self.ids, self.config.vocab)  # type: ignore[arg-type]
        return found

    def rounds(self, features: Tensor, tokens: Tensor, depth: int) -> Iterator[Tensor]:
        """The states [B, T, hidden] that the output layer sees, round by round.

        Args:
            features: [B, T, width] of texts, padded at their ends.
            tokens: [B, T] the token behind each row.
            depth: rounds.
        """
        states = F.linear(features, self._get("fc.weight"))
        positions = torch.arange(features.shape[1])
        known: list[tuple[Tensor, Tensor]] = []
        for _ in range(depth):
            states = self._layer(states, tokens, positions, known)
            normed = self._norm(states, "norm.weight")
            yield normed
            states = normed if self.config.norm_output else states
            tokens = F.pad(tokens[:, 1:], (0, 1))
            positions = positions + 1

    def logits(self, normed: Tensor) -> Tensor:
        """[..., hidden] of `rounds` -> [..., draft vocab]."""
        return F.linear(normed, self._get("lm_head.weight"))

    def _layer(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        known: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        normed = self._norm(states, _LAYER + "hidden_norm.weight")
        embedded = F.embedding(tokens, self.embeddings)  # type: ignore[arg-type]
        embedded = self._norm(embedded, _LAYER + "input_layernorm.weight")
        q, k, v = self._project(torch.cat([embedded, normed], -1), positions)
        known.append((k, v))
        residual = normed if self.config.norm_before_residual else states
        residual = residual + self._linear(self._attend(q, known), "self_attn.o_proj")
        x = self._norm(residual, _LAYER + "post_attention_layernorm.weight")
        x = F.silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj")
        return residual + self._linear(x, "mlp.down_proj")

    def _project(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Queries, keys and values [B, heads, T, size]; keys and values as often as queries."""
        cosines, sines = self.rotary(x, positions[None])
        found = []
        for part, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
            y = self._linear(x, f"self_attn.{part}_proj")
            y = y.view(*y.shape[:-1], heads, self.size)
            if _key(f"{_LAYER}self_attn.{part}_norm.weight") in self.weights:
                y = self._norm(y, f"{_LAYER}self_attn.{part}_norm.weight")
            y = y.transpose(1, 2)
            if part != "v":
                half = self.size // 2
                turned = torch.cat([-y[..., half:], y[..., :half]], -1)
                y = y * cosines[:, None] + turned * sines[:, None]
            found.append(y.repeat_interleave(self.heads // heads, 1))
        return found

    def _attend(self, q: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Over the true rows before, and over the own rows of the rounds since."""
        (first, values), rest = known[0], known[1:]
        length = q.shape[2]
        scores = q @ first.transpose(-1, -2)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        own = [(q * k).sum(-1, keepdim=True) for k, _ in rest]
        weights = (torch.cat([scores, *own], -1) * self.size**-0.5).softmax(-1)
        mixed = weights[..., :length] @ values
        for i, (_, v) in enumerate(rest):
            mixed = mixed + weights[..., length + i, None] * v
        joined: Tensor = mixed.transpose(1, 2).flatten(2)
        return joined

    def _get(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._get(f"{_LAYER}{name}.weight"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._get(name), self.epsilon)


def _key(name: str) -> str:
    """Parameters of a dictionary must not have dots in their names."""
    return name.replace(".", "/")
