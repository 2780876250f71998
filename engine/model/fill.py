"""Builds a model from its configuration, and puts in its weights one tensor after the other.

What is read from a file stays in the file's memory map where it can be used as it is; all else
is made into what the model keeps and let go of, before the next tensor is touched. So there is
never a second copy of the weights, and none in floats of those that are kept in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from engine.cache import huge_pages
from engine.model.fewbit import FORMS
from engine.model.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedWeight,
    quantize_weight,
)

#: Kinds of blocks that are multiplied as they are. Others become floats when they are read.
KEPT = frozenset(FORMS)

#: What weights are rounded to, by the setting: (linear layers, embedding and output layer). The
#: latter two decide every token alone, and take few operations for what they hold.
ROUNDED = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}

_BLOCK = 32  # inputs of a block of the kinds in `ROUNDED`


class Tensors(Protocol):
    """The tensors of a checkpoint, read when they are asked for."""

    #: By the model's names; what it has no name for is called what the checkpoint calls it.
    shapes: Mapping[str, tuple[int, ...]]

    def values(self, name: str) -> torch.Tensor:
        """A tensor in floats of any type; it may lie in the file's memory map."""
        ...

    def blocks(self, name: str) -> QuantizedWeight | None:
        """A matrix in blocks, if it is stored so."""
        ...


def make_empty(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a directory's configuration, without memory for its weights."""
    config = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, dtype=dtype
    )
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model


def wanted(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that an empty model waits for, by name; tied ones once."""
    tied = _tied(model)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if name not in tied}


def compare(model: PreTrainedModel, tensors: Tensors) -> dict[str, Any]:
    """What does not fit together, in the form of transformers' loading info."""
    asked, found = wanted(model), tensors.shapes
    return {
        "missing_keys": set(asked) - set(found),
        "unexpected_keys": set(found) - set(asked) - set(_tied(model)),
        "mismatched_keys": [
            (name, found[name], shape)
            for name, shape in asked.items()
            if name in found and found[name] != shape
        ],
    }


def fill(model: PreTrainedModel, tensors: Tensors, dtype: torch.dtype, keep: str) -> None:
    """Puts the weights into an empty model that they fit.

    Args:
        model: of `make_empty`.
        tensors: with all that it waits for.
        dtype: of the weights that are not in blocks.
        keep: "file" keeps blocks of the kinds in `KEPT`, "int8" and "int4" round all matrices,
            "float" keeps no blocks.
    """
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for path, module in list(model.named_modules()):
        names = [f"{path}.{own}" for own, _ in module.named_parameters(recurse=False)]
        if f"{path}.weight" in _tied(model):
            continue
        weight = None
        if type(module) in (nn.Linear, nn.Embedding):
            weight = _blocks(tensors, f"{path}.weight", keep, id(module) in ends)
        if weight is not None:
            _replace(model, path, module, weight, tensors, dtype)
            continue
        for name in names:
            values = _in_dtype(tensors.values(name), dtype)
            _set(model, name, nn.Parameter(values, requires_grad=False))
    for name, source in _tied(model).items():
        _tie(model, name.removesuffix(".weight"), source.removesuffix(".weight"))


def _in_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in `dtype`, in memory of their own if they have to be made: what lies in the heap
    stays the process's when it is freed, and weights are freed as they are packed."""
    if values.dtype is dtype:
        return values
    return huge_pages.empty(values.shape, dtype).copy_(values)


def _blocks(tensors: Tensors, name: str, keep: str, end: bool) -> QuantizedWeight | None:
    if keep == "file":
        blocks = tensors.blocks(name)
        return blocks if blocks is not None and blocks.kind in KEPT else None
    if keep in ROUNDED and tensors.shapes[name][1] % _BLOCK == 0:
        return quantize_weight(tensors.values(name), ROUNDED[keep][end])
    return None


def _replace(
    model: PreTrainedModel,
    path: str,
    module: nn.Module,
    weight: QuantizedWeight,
    tensors: Tensors,
    dtype: torch.dtype,
) -> None:
    if type(module) is nn.Embedding:
        model.set_submodule(path, QuantizedEmbedding(weight, dtype))
        return
    bias = None if module.bias is None else tensors.values(f"{path}.bias").float()
    model.set_submodule(path, QuantizedLinear(weight, bias))


def _set(model: PreTrainedModel, name: str, parameter: nn.Parameter) -> None:
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, parameter)


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Names of weights that are others', by name."""
    tied: dict[str, str] = getattr(model, "_tied_weights_keys", None) or {}
    return tied if model.config.get_text_config().tie_word_embeddings else {}


def _tie(model: PreTrainedModel, path: str, source: str) -> None:
    """Gives the layer at `path` the weight of the one at `source`; there is no second copy."""
    embedding = model.get_submodule(source)
    if isinstance(embedding, QuantizedEmbedding):
        model.set_submodule(path, QuantizedLinear(embedding.weight))
    else:
        model.get_submodule(path).weight = embedding.weight
