"""Blocks of few bits: shapes, and values by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import nn

from engine.model.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight


def test_a_block_by_hand() -> None:
    # Q4_1: float16 scale, float16 minimum, 16 bytes whose low nibbles are the first 16 inputs.
    head = np.array([0.5, -1.0], dtype=np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (15 - np.arange(16, dtype=np.uint8)) << 4
    data = torch.from_numpy(np.concatenate([head, nibbles]))[None]
    values = QuantizedWeight("Q4_1", 1, 32, data).dequantize()
    wanted = torch.cat([torch.arange(16), 15 - torch.arange(16)]) * 0.5 - 1
    assert torch.equal(values[0], wanted)


@pytest.mark.parametrize(
    ("kind", "inputs", "width"), [("Q4_9", 32, 20), ("Q4_1", 48, 30), ("Q4_1", 32, 18)]
)
def test_what_does_not_fit_is_refused(kind: str, inputs: int, width: int) -> None:
    with pytest.raises(ValueError, match=kind):
        QuantizedWeight(kind, 1, inputs, torch.zeros(1, width, dtype=torch.uint8))


def test_modules_are_those_of_the_dequantised_matrix() -> None:
    weight = random_weight("Q4_1", 7, 64)
    plain, bias = weight.dequantize(), torch.randn(7)
    x, ids = torch.randn(2, 3, 64), torch.tensor([[6, 0, 3], [1, 1, 5]])
    assert torch.equal(QuantizedLinear(weight, bias)(x), nn.functional.linear(x, plain, bias))
    rows = QuantizedEmbedding(weight, torch.bfloat16)(ids)
    assert torch.equal(rows, nn.functional.embedding(ids, plain).bfloat16())


def random_weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Random values, quantised by the gguf package."""
    values = np.random.default_rng(0).standard_normal((outputs, inputs), dtype=np.float32)
    blocks = quantize(values, GGMLQuantizationType[kind])
    return QuantizedWeight(kind, outputs, inputs, torch.from_numpy(blocks))
