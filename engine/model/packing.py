"""In which order the kernels want weights and activations: see `kernels/matmul.h`."""

from __future__ import annotations

import torch
from torch import nn

_LANES = 16
BLOCK = 2 * _LANES  #: outputs per block of packed weights (`kBlockOutputs`)


def num_blocks(width: int) -> int:
    """Blocks that so many inputs or outputs fill."""
    return -(-width // BLOCK)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> blocks of 32 outputs: float32 [N/32, K, 32], bfloat16 [N/32, K/2, 32, 2].

    An odd K is made even in bfloat16, with zeros.
    """
    weight = pad_rows(weight)
    outputs, inputs = weight.shape
    if weight.dtype is torch.float32:
        return weight.reshape(-1, BLOCK, inputs).transpose(1, 2).contiguous()
    if inputs % 2:
        weight, inputs = nn.functional.pad(weight, (0, 1)), inputs + 1
    return weight.reshape(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2).contiguous()


def alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[I, ...] and [I, ...] -> [2 I', ...]: sixteen outputs of one, then of the other."""
    parts = [pad_rows(t, _LANES) for t in (gate, up)]
    blocks = [t.view(-1, _LANES, *t.shape[1:]) for t in parts]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def alternate_halves(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """[H * head_size, ...]: in every head sixteen outputs of its first half, then their partners
    in the second, so that a block holds what rotation combines."""
    halves = heads.view(-1, 2, head_size // 2, *heads.shape[1:])
    return alternate(halves[:, 0].flatten(0, 1), halves[:, 1].flatten(0, 1))


def pad_rows(tensor: torch.Tensor, multiple: int = BLOCK) -> torch.Tensor:
    """Appends zero rows until their number is a multiple."""
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
