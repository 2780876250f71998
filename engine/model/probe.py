"""What a model's layers really ask of attention, and how far its positions reach.

A configuration may say things that the model's code never reads, and code may do things that no
configuration says. So two tokens are run through the model, and what its layers hand to the
attention is what counts.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.cache.store import CacheShape
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.attention.base import AttentionCall
from engine.model.quantized import shapes_only
from engine.model.weights import in_a_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    """What one layer asks of attention.

    Attributes:
        heads: query heads.
        groups: key/value heads.
        head_size: elements of a head.
        window: positions that a row sees at most, itself included; 0 = all.
    """

    heads: int
    groups: int
    head_size: int
    window: int


@torch.inference_mode()
@contextlib.contextmanager
def packed_rows_of(name: str) -> Iterator[None]:
    """Whatever a model of that name raises while it runs on packed rows becomes a refusal.

    Raises:
        ModelNotSupported: in its place.
    """
    try:
        yield
    except ModelNotSupported:
        raise
    except Exception as error:
        logger.debug("a pass failed", exc_info=True)
        raise ModelNotSupported(f"{name} cannot run on packed rows: {in_a_line(error)}") from error


def probe(model: PreTrainedModel) -> tuple[LayerNeeds, ...]:
    """The needs of every layer, in order.

    Args:
        model: with paged attention chosen.

    Raises:
        ModelNotSupported: a layer keeps its past elsewhere, or wants what the cache cannot hold.
    """
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return torch.zeros_like(call.queries, memory_format=torch.contiguous_format)

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    with shapes_only(), packed_rows_of(type(model).__name__):
        model(input_ids=ids, position_ids=positions, use_cache=False, paged_attend=attend)
    check_layers(model, [call.layer for call in calls])
    needs = tuple(
        LayerNeeds(call.queries.shape[1], call.keys.shape[1], call.keys.shape[2], call.window)
        for call in sorted(calls, key=lambda call: call.layer)
    )
    kept = {(layer.groups, layer.head_size) for layer in needs}
    if len(kept) > 1:
        listed = " and ".join(f"{groups} of {size}" for groups, size in sorted(kept))
        raise ModelNotSupported(
            f"{type(model).__name__} has layers with different key/value heads ({listed} "
            "elements); the paged cache holds one shape."
        )
    return needs


def check_layers(model: PreTrainedModel, called: Sequence[int]) -> None:
    """Refuses a pass in which not every layer used the paged attention, once.

    Args:
        called: index of the layer of every call.

    Raises:
        ModelNotSupported: naming the layers.
    """
    layers = range(model.config.get_text_config().num_hidden_layers)
    counts = Counter(called)
    if silent := [i for i in layers if not counts[i]]:
        raise ModelNotSupported(
            f"{type(model).__name__} has {len(silent)} of {len(layers)} layers that do not use "
            f"the paged attention (first: {silent[0]}); what they keep of earlier tokens would be "
            "lost between steps."
        )
    if odd := [i for i, count in counts.items() if count > 1 or i not in layers]:
        raise ModelNotSupported(
            f"{type(model).__name__} attends {counts[odd[0]]} times in layer {odd[0]} of "
            f"{len(layers)}; the paged cache holds one set of keys and values a layer."
        )


def cache_shape(model: PreTrainedModel, needs: Sequence[LayerNeeds]) -> CacheShape:
    """What `model` stores per token in a K/V cache, given its layers' needs."""
    return CacheShape(len(needs), needs[0].groups, needs[0].head_size, model.dtype)


def longest_sequence(model: PreTrainedModel, wanted: int | None) -> int:
    """Most tokens of a sequence: what is wanted, or as many as the model can be served with.

    Raises:
        ConfigurationError: more are wanted than that.
        ModelNotSupported: there is no room at all.
    """
    text = model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    most = 2**31 if most is None else most
    if most < 1:
        raise ModelNotSupported(f"max_position_embeddings is {most}, so no token has a place.")
    why = f"the model was made for {most} tokens"
    for length, reason in _turning_points(model):
        if length < most:
            most, why = length, f"{reason}; it is served up to {length} tokens"
    if wanted is not None and wanted > most:
        raise ConfigurationError(f"max_model_len is {wanted}, but {why}; lower it.")
    if wanted is None and not why.startswith("the model was made"):
        logger.warning("the context is cut: %s", why)
    return wanted or most


def _turning_points(model: PreTrainedModel) -> list[tuple[int, str]]:
    """Lengths from which on a row would depend on more than the tokens before it, and why.

    transformers chooses such rotary factors by the longest row of a pass, for all of its rows:
    a short sequence would change with its neighbours, and one that grows with its past.
    """
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for name, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind == "longrope" or "dynamic" in str(kind):
                parameters: Any = getattr(module, "config", model.config).rope_parameters
                parameters = parameters if name is None else parameters[name]
                length = parameters.get("original_max_position_embeddings")
                if length is None:
                    length = model.config.get_text_config().max_position_embeddings
                found.append(
                    (length, f"its {kind} rotary factors change for all rows beyond {length}")
                )
    text = model.config.get_text_config()
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        chunk = text.attention_chunk_size
        found.append((chunk, f"it forgets at every {chunk} tokens, which is not implemented"))
    return found
