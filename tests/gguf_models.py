"""GGUF files of transformers' models: what llama.cpp's converter would write, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import PreTrainedModel

from engine.model.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from tests.tiny import SPECIALS, write_tokenizer
from tests.tiny_models import make_model

#: Tokens of `write_tokenizer`'s vocabulary.
TOKENS = len(SPECIALS) + 256 + 3

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
#: Kinds that gguf can read but not write, and where in their blocks half-precision scales lie.
_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}

#: Says the kind of a matrix by its name in the file.
Kinds = Callable[[str], str]


def make_source(family: str = "llama", width: int = 64, **changes: object) -> PreTrainedModel:
    """A model whose rows are whole blocks, with `write_tokenizer`'s vocabulary."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model(family, vocab_size=TOKENS, **{**sizes, **changes})


def write_model(
    path: Path,
    model: PreTrainedModel,
    kinds: Kinds,
    tables: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a model.

    Args:
        kinds: of its matrices.
        tables: more tensors, by name.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    assert write_tokenizer(writer) == config.vocab_size
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, last = name.rpartition(".")
        own = f"{names.get_name(stem)}.{last}"
        values = tensor.float()
        if architecture == "llama":
            values = _interleave(name, values, config.num_attention_heads)
            values = _interleave(name, values, config.num_key_value_heads, "k_proj")
        if values.dim() == 1:
            writer.add_tensor(own, values.numpy())
        else:
            _add(writer, own, values.numpy(), kinds(own))
    for name, table in (tables or {}).items():
        writer.add_tensor(name, table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(name: str, rows: torch.Tensor, heads: int, which: str = "q_proj") -> torch.Tensor:
    """Rows of queries or keys in the order of the format: pairs that are rotated together."""
    if f".{which}." not in name:
        return rows
    halves = rows.view(heads, 2, len(rows) // heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        blocks = random_blocks(values.shape, kind, name) if kind in _SCALES else None
        blocks = gguf.quants.quantize(values, number) if blocks is None else blocks
        writer.add_tensor(name, blocks, raw_dtype=number)


def random_blocks(shape: tuple[int, ...], kind: str, seed: str) -> np.ndarray:
    """Blocks [outputs, bytes] of any kind: random, but for scales that keep numbers small."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(list(seed.encode()))
    data = random.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for place in _SCALES[kind]:
        scales = random.normal(0, 2e-4, data.shape[:2]).astype(np.float16)
        data[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def dequantized(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """The numbers of a weight, whatever it is kept in."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All numbers of a model, by name."""
    found = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found[f"{path}.weight"] = dequantized(module.weight)
            if getattr(module, "bias", None) is not None:
                found[f"{path}.bias"] = module.bias
    return found


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Both have the same numbers under the same names."""
    found, wanted = weights_of(model), weights_of(expected)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
