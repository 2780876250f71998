"""A model in float32 for a while, so that what it computes is free of rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from engine.model.memory import available_memory
from engine.model.quantized import QuantizedEmbedding

#: Share of the memory at hand that weights may take for a while in float32.
_SHARE = 0.5


@contextlib.contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Makes float32 of a model's narrower tensors, where there is memory for it: they are exact
    when they are narrowed again. What is in blocks stays there, and is multiplied in float32."""
    dtype = model.dtype
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [t for t in tensors if t.is_floating_point() and t.element_size() < 4]
    tables = [m for m in model.modules() if isinstance(m, QuantizedEmbedding)]
    if sum(t.numel() for t in narrow) * 4 > _SHARE * available_memory(model.device):
        narrow, tables = [], []
    for tensor in narrow:
        tensor.data = tensor.data.float()
    for table in tables:
        table.dtype = torch.float32
    try:
        yield
    finally:
        for tensor in narrow:
            tensor.data = tensor.data.to(dtype)
        for table in tables:
            table.dtype = dtype
