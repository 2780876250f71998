"""A mixture's experts, computed by the same matrix kernel as every linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.model.linear import Packer

#: What transformers tells of experts whose implementation may be chosen.
_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate")


def is_experts(module: nn.Module) -> bool:
    """Whether `PackedExperts` computes what this module does."""
    return all(hasattr(module, name) for name in (*_MARKS, "num_experts", "down_proj"))


class PackedExperts(nn.Module):
    """Each row goes through the experts that its router chose, and their outputs are added in the
    order of its choice: what other rows chose does not matter.

    Args:
        experts: one that `is_experts` accepts; its weights are taken out of it.
        packer: makes a layer of each expert's weights.
    """

    def __init__(self, experts: Any, packer: Packer) -> None:
        super().__init__()
        self._experts = experts
        self._up = self._pack("gate_up_proj" if experts.has_gate else "up_proj", packer)
        self._down = self._pack("down_proj", packer)

    def forward(
        self, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: [T, hidden]
            chosen: [T, k] experts of each row.
            shares: [T, k] by what their outputs are multiplied.

        Returns:
            [T, hidden]
        """
        per_row, experts = chosen.shape[-1], self._experts
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self._up)).tolist()
        parts = hidden_states[order // per_row].split(counts)  # type: ignore[no-untyped-call]
        outputs = torch.cat(
            [self._run(i, part) for i, part in enumerate(parts) if len(part)]
        )  # [T * k, hidden], by expert
        if experts.has_post_expert_norm:
            outputs = experts.post_expert_norm(outputs)
        outputs = outputs * shares.reshape(-1)[order].unsqueeze(-1)
        by_row = torch.empty_like(outputs)
        by_row[order] = outputs
        by_row = by_row.view(-1, per_row, outputs.shape[-1])
        total = by_row[:, 0]
        for i in range(1, per_row):
            total = total + by_row[:, i]
        return total.to(hidden_states.dtype)

    def _run(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        experts, inner = self._experts, self._up[expert](rows)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out: torch.Tensor = self._down[expert](inner)
        return out

    def _pack(self, name: str, packer: Packer) -> nn.ModuleList:
        """One layer an expert, [E, N, K]; what they are made from is given back."""
        experts = self._experts
        weights = getattr(experts, name).detach()
        biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
        layers = nn.ModuleList()
        for i, weight in enumerate(weights):
            bias = None if biases is None else biases[i]
            layers.append(packer.linear(weight.T if experts.is_transposed else weight, bias))
        delattr(experts, name)
        return layers
