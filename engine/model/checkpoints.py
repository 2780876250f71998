"""Where weights come from, one tensor at a time: GGUF and safetensors files under one protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from engine.model.fill import wanted
from engine.model.gguf_file import GgufFile
from engine.model.quantized import QuantizedWeight

#: Architectures of GGUF files whose tensors are a model's own but for their names, and, in
#: "llama", for the order of the rows of queries and keys.
GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

#: Divides the frequencies of the rotary embedding; a table, no weight.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufTensors:
    """The tensors of a GGUF file, under the names of a model; see `Tensors`."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        config = model.config
        names = gguf.get_tensor_name_map(
            GGUF_ARCHITECTURES[file.architecture], config.num_hidden_layers
        )
        self._file = file
        self._own = {}
        for name in wanted(model):
            stem, _, last = name.rpartition(".")
            self._own[name] = f"{names.get_name(stem)}.{last}"
        known = {own: name for name, own in self._own.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            known.get(own, own): stored.shape
            for own, stored in file.tensors.items()
            if own != _ROPE_FACTORS
        }
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        paired = {"q_proj": heads, "k_proj": groups} if file.architecture == "llama" else {}
        self._heads: dict[str, int] = paired

    def values(self, name: str) -> torch.Tensor:
        """See `Tensors`."""
        blocks = self.blocks(name)
        if blocks is not None:
            return blocks.dequantize()
        return self._in_order(name, self._file.values(self._own[name]))

    def blocks(self, name: str) -> QuantizedWeight | None:
        """See `Tensors`. Blocks lie along a row, so that rows can change places."""
        found = self._file.blocks(self._own[name])
        if found is None:
            return None
        data = self._in_order(name, found.data)
        return QuantizedWeight(found.kind, found.outputs, found.inputs, data)

    def finish(self, model: PreTrainedModel) -> None:
        """What is computed once from other things in the file than weights."""
        if _ROPE_FACTORS in self._file.tensors:
            rotary = model.get_decoder().rotary_emb
            rotary.inv_freq /= self._file.values(_ROPE_FACTORS)

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows as transformers has them: the format has the two that rotation combines side by
        side, transformers has all first ones of a head before all second ones."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return rows
        pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


class SafeTensors:
    """The tensors of a directory of safetensors; see `Tensors`."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        opened: list[Any] = [safe_open(directory / file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()
        }

    def values(self, name: str) -> torch.Tensor:
        """See `Tensors`."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def blocks(self, _name: str) -> QuantizedWeight | None:
        """See `Tensors`; there are none."""
        return None
