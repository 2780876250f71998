"""Reads and writes heads as the `speculators` library does: safetensors and a `config.json`.

::

    fc                              [hidden, taps * width]  fuses the target's features
    layers.0.input_layernorm        of the next token's embedding
    layers.0.hidden_norm            of the fused features
    layers.0.self_attn.{q,k,v}_proj [.., 2 hidden]  of both, the embedding first
    layers.0....                    the rest of a Llama or Qwen3 layer
    norm, lm_head                   to logits of the draft vocabulary
    d2t                             [draft vocab] what makes a draft id the target's, if it is added
    t2d                             [vocab] which of the target's tokens can be guessed
    embed_tokens                    only where it is not the target's own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.draft.heads.config import HeadConfig
from engine.errors import ModelNotSupported

#: The EAGLE-3 authors' name of the layer.
_THEIRS, _OURS = "midlayer.", "layers.0."

#: Parts of a training checkpoint that drafting has no use for.
_SPARE = ("verifier_lm_head.weight", "verifier_norm.weight")


def read_weights(directory: Path, config: HeadConfig) -> dict[str, Tensor]:
    """All tensors of a head by the names above, complete and of the right shapes.

    Raises:
        ModelNotSupported: one is missing, is there without a use, or has another shape.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelNotSupported(
            f"{directory} holds no safetensors; other formats can run code when they are read, "
            "so convert the head."
        )
    found: dict[str, Tensor] = {}
    try:
        for path in paths:
            found |= load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelNotSupported(f"{directory} cannot be read: {error}") from error
    weights = {_rename(name): tensor for name, tensor in found.items()}
    weights = {name: tensor for name, tensor in weights.items() if name not in _SPARE}
    _check(directory, config, weights)
    return weights


def _rename(name: str) -> str:
    return _OURS + name.removeprefix(_THEIRS) if name.startswith(_THEIRS) else name


def shapes(config: HeadConfig, fed: int) -> dict[str, tuple[int, ...]]:
    """The tensors that every head of such a configuration has.

    Args:
        fed: elements of all its features of a token together.
    """
    layer, hidden = config.layer, config.hidden
    heads = int(layer["num_attention_heads"])
    groups = int(layer.get("num_key_value_heads") or heads)
    size = int(layer.get("head_dim") or hidden // heads)
    inner = int(layer["intermediate_size"])
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fed),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab, hidden),
    }
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * size, 2 * hidden),
        "self_attn.k_proj": (groups * size, 2 * hidden),
        "self_attn.v_proj": (groups * size, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.family == "qwen3":
        parts |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    wanted |= {f"{_OURS}{name}.weight": shape for name, shape in parts.items()}
    if config.norm_before_fc:
        wanted["input_norm.weight"] = (fed,)
    if config.draft_vocab != config.vocab:
        wanted["d2t"] = (config.draft_vocab,)
    return wanted


def _check(directory: Path, config: HeadConfig, weights: Mapping[str, Tensor]) -> None:
    fused = weights.get("fc.weight")
    fed = int(fused.shape[-1]) if fused is not None else 0
    wanted = shapes(config, fed)
    may_be: dict[str, tuple[int, ...]] = {"t2d": (config.vocab,), "d2t": (config.draft_vocab,)}
    may_be["embed_tokens.weight"] = (config.vocab, config.hidden)
    for name in weights:
        if name.startswith(_OURS) and name.endswith("_proj.bias"):
            may_be[name] = wanted.get(name.replace(".bias", ".weight"), (0,))[:1]
        if config.fc_norm and name.startswith("fc_norm."):
            may_be[name] = tuple(weights[name].shape)
    for name, shape in wanted.items():
        if name not in weights:
            raise ModelNotSupported(f"{directory} lacks {name}; fetch or convert the head again.")
        if tuple(weights[name].shape) != shape:
            raise ModelNotSupported(
                f"{directory} holds {name} with shape {tuple(weights[name].shape)}, but its "
                f"configuration asks for {shape}; the two do not belong together."
            )
    for name, tensor in weights.items():
        if name not in wanted and may_be.get(name) != tuple(tensor.shape):
            raise ModelNotSupported(
                f"{directory} holds {name} with shape {tuple(tensor.shape)}, which a head of its "
                "configuration has no use for, so it would not be the head that was trained."
            )
    ids = draft_ids(config, weights)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab or len(set(ids.tolist())) < len(ids):
        raise ModelNotSupported(
            f"{directory} has a d2t that does not map {config.draft_vocab} draft tokens to as "
            f"many of {config.vocab}; fetch or convert the head again."
        )


def draft_ids(config: HeadConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """The target's id of every draft token, int64 [draft vocab]."""
    ids = torch.arange(config.draft_vocab)
    return ids if (offsets := weights.get("d2t")) is None else ids + offsets.long()


def vocabulary(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft vocabulary.

    Args:
        ids: int64 [draft vocab], ascending.
        vocab: tokens of the target.
    """
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write_head(
    directory: Path, config: HeadConfig, weights: Mapping[str, Tensor], verifier: Mapping[str, Any]
) -> None:
    """Writes a head so that this server and that library read it.

    Args:
        weights: by the names above.
        verifier: the target's `name_or_path` and `architectures`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    content = {
        "architectures": ["Eagle3DraftModel"],
        "dtype": dtype,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": dict(verifier),
        },
        "transformer_layer_config": dict(config.layer, num_hidden_layers=1),
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.taps) if config.taps else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
    }
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
