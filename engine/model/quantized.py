"""Weights in few bits, in the blocks that a GGUF file holds them in.

A block is some 32 or 256 neighbouring inputs of one output with their scales; how each kind packs
them is the format's matter: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [outputs, inputs] in blocks.

    Raises:
        ValueError: the kind is unknown, or the bytes do not fit the shape.
    """

    kind: str  #: the format's name: Q4_0, Q4_1, Q8_0, Q4_K, Q6_K ...
    outputs: int
    inputs: int
    data: torch.Tensor  #: uint8 [outputs, bytes of a row]

    def __post_init__(self) -> None:
        if self.kind not in GGMLQuantizationType.__members__:
            raise ValueError(f"{self.kind} is no kind of blocks that gguf knows")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        shape = (self.outputs, self.inputs // block * size)
        if self.inputs % block or self.data.dtype is not torch.uint8 or self.data.shape != shape:
            raise ValueError(
                f"{self.outputs} outputs of {self.inputs} inputs in {self.kind} are "
                f"{list(shape)} bytes in blocks of {block} inputs, not {list(self.data.shape)} "
                f"of {self.data.dtype}"
            )

    def dequantize(self) -> torch.Tensor:
        """float32 [outputs, inputs], as the gguf package computes it."""
        values = dequantize(self.data.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


class QuantizedLinear(nn.Module):
    """`y = x W^T + b` with W in blocks: the plain form, which kernels are compared with and take
    the place of. It computes the whole matrix anew in each call.

    Args:
        weight: [out_features, in_features].
        bias: [out_features], or none.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.outputs, weight.inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], both in the dtype of x."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.dequantize().to(x.dtype), bias)


class QuantizedEmbedding(nn.Module):
    """Rows of a table in blocks, by id.

    Args:
        weight: [num_embeddings, embedding_dim].
        dtype: of the rows that are given out.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype
        self.num_embeddings, self.embedding_dim = weight.outputs, weight.inputs

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., embedding_dim]."""
        blocks = self.weight.data[ids.flatten()].contiguous()
        rows = QuantizedWeight(self.weight.kind, len(blocks), self.embedding_dim, blocks)
        return rows.dequantize().to(self.dtype).view(*ids.shape, self.embedding_dim)
