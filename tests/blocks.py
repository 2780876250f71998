"""Weights in blocks of few bits with any bits at all, and models made of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn
from transformers import PreTrainedModel

from engine.model.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight

#: Scale and minimum (0: a kind without) that spread weights over about -0.3 to 0.3.
_SCALES = {
    "Q4_0": (0.04, 0.0),
    "Q4_1": (0.04, -0.3),
    "Q4_K": (0.0006, 0.0045),
    "Q5_0": (0.02, 0.0),
    "Q5_1": (0.02, -0.3),
    "Q5_K": (0.0003, 0.0045),
    "Q6_K": (0.00015, 0.0),
    "Q8_0": (0.0024, 0.0),
}
KINDS = tuple(_SCALES)


def block_size(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def random_weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    """Every bit of every block is drawn, so that no field of a format goes unseen; scales are
    sensible, of both signs, and differ from block to block."""
    block, size = block_size(kind)
    random = np.random.default_rng((seed, outputs, inputs))
    data = random.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    scale, minimum = _SCALES[kind]
    spread = random.uniform(0.5, 1.5, (2, outputs, inputs // block, 1))
    signs = np.sign(random.uniform(-1, 3, spread.shape[1:]))
    place = 208 if kind == "Q6_K" else 0
    data[:, :, place : place + 2] = (scale * signs * spread[0]).astype(np.float16).view(np.uint8)
    if minimum:
        low = (minimum * signs * spread[1]).astype(np.float16)
        data[:, :, 2:4] = low.view(np.uint8)
    return QuantizedWeight(kind, outputs, inputs, torch.from_numpy(data.reshape(outputs, -1)))


def quantised(
    model: PreTrainedModel, kind_of: Callable[[str], str | None]
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Gives a model's layers weights in blocks, in place.

    Args:
        model: any; a tied output layer gets the embedding's own blocks.
        kind_of: kind of a layer by its name, or None for one that stays as it is.

    Returns:
        The model, and what its new weights are in float32, by parameter.
    """
    tied, plain = model.config.tie_word_embeddings, {}
    embedding = model.get_input_embeddings()
    table: QuantizedWeight | None = None
    for number, (name, layer) in enumerate(list(model.named_modules())):
        kind = kind_of(name)
        if not isinstance(layer, (nn.Linear, nn.Embedding)) or kind is None:
            continue
        if tied and layer is model.get_output_embeddings():
            assert table is not None
            weight = table
        else:
            weight = random_weight(kind, *layer.weight.shape, seed=number)
        if layer is embedding:
            table = weight
            new: nn.Module = QuantizedEmbedding(weight, layer.weight.dtype)
        else:
            bias = layer.bias  # type: ignore[union-attr]
            new = QuantizedLinear(weight, None if bias is None else bias.detach())  # type: ignore[arg-type]
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
        plain[f"{name}.weight"] = weight.dequantize()
    return model, plain
