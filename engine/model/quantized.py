"""Weights in few bits, in the blocks that a GGUF file holds them in.

A block is some 32 or 256 neighbouring inputs of one output with their scales; how each kind packs
them is the format's matter: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import nn

from engine.cache import huge_pages

#: Rows that are computed at a time, so that what lies between two operations stays in the cache.
_CHUNK = 128

#: Numbers from which on a matrix is worth memory of its own.
_LARGE = 2**16

_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


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
        # Matrices get memory of their own, which goes back to the system when they are freed.
        large = self.outputs * self.inputs >= _LARGE
        size = (self.outputs, self.inputs)
        values = huge_pages.empty(size, torch.float32) if large else torch.empty(size)
        for start in range(0, self.outputs, _CHUNK):
            blocks = self.data[start : start + _CHUNK].numpy()
            rows = dequantize(blocks, GGMLQuantizationType[self.kind])
            values[start : start + _CHUNK] = torch.from_numpy(rows)
        return values

    @property
    def num_bytes(self) -> int:
        """What the blocks take."""
        return self.data.numel()


def quantize_weight(weight: torch.Tensor, kind: str) -> QuantizedWeight:
    """A matrix in blocks, each rounded to the nearest values that it can hold.

    Args:
        weight: [outputs, inputs], floating.
        kind: one that the gguf package can write, such as Q8_0 or Q4_1.

    Raises:
        ValueError: the inputs are no whole number of blocks.
    """
    outputs, inputs = weight.shape
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    if inputs % block:
        raise ValueError(f"{inputs} inputs are no whole number of blocks of {block}")
    data = torch.empty(outputs, inputs // block * size, dtype=torch.uint8)
    for start in range(0, outputs, _CHUNK):
        rows = weight[start : start + _CHUNK].float().numpy()
        data[start : start + _CHUNK] = torch.from_numpy(quantize(rows, number))
    return QuantizedWeight(kind, outputs, inputs, data)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Within it products with blocks are zeros: for passes of which only the shapes count."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


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
        if _shapes_only.get():
            return x.new_zeros(*x.shape[:-1], self.out_features)
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
