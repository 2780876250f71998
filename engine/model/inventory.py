"""Which weights a model runs with: kinds, bits and bytes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from engine.model.quantized import QuantizedEmbedding, QuantizedLinear
from engine.types import WeightsInfo


def in_blocks(model: nn.Module) -> bool:
    """Whether some of a model's weights are in blocks of few bits."""
    return any(isinstance(m, QuantizedLinear | QuantizedEmbedding) for m in model.modules())


def describe_weights(model: nn.Module) -> WeightsInfo:
    """Counts a model's weights as they are before a runner arranges them, shared ones once."""
    sizes: Counter[str] = Counter()  # bytes of matrices by kind
    rest = count = 0
    seen: set[int] = set()
    for module in model.modules():
        own: list[torch.Tensor] = list(module.parameters(recurse=False))
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            bias = getattr(module, "bias", None)
            own += [bias] if isinstance(bias, torch.Tensor) else []
            weight = module.weight
            if id(weight) not in seen:
                seen.add(id(weight))
                sizes[weight.kind] += weight.num_bytes
                count += weight.outputs * weight.inputs
        for tensor in own:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            size = tensor.numel() * tensor.element_size()
            count += tensor.numel()
            if tensor.dim() > 1:
                sizes[str(tensor.dtype).removeprefix("torch.")] += size
            else:
                rest += size
    total = sizes.total() + rest
    kinds = ", ".join(kind for kind, _ in sizes.most_common())
    return WeightsInfo(kinds, total, 8 * total / max(count, 1))
