"""Runs a transformer over a packed batch with paged K/V. One class for target and draft models.

The model's own code stays untouched: it is loaded with an attention implementation registered
in transformers' attention interface, which finds the step's batch in the keyword arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.batch import Batch
from engine.cache.store import CacheShape, KVStore
from engine.errors import ModelNotSupported
from engine.model.attention.base import Attend, AttentionBackend, AttentionCall
from engine.model.linear import PackedLinear

#: Name under which paged attention is registered with transformers.
ATTENTION = "specserve_paged"

#: Arguments of the attention interface that change the result and are not implemented.
_REFUSED = ("softcap", "s_aux", "position_bias")


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, G, T, D]."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ModelNotSupported(
                f"{type(module).__name__} uses {name}, which paged attention does not implement."
            )
    attend: Attend = kwargs["paged_attend"]
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        scale=kwargs["scaling"],
        window=kwargs.get("sliding_window") or 0,
    )
    return attend(call).unsqueeze(0), None


AttentionInterface.register(ATTENTION, _paged_attention)
AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)


class ModelRunner:
    """A causal language model, its K/V store and an attention backend.

    Args:
        model: loaded with `attn_implementation=ATTENTION`.
        backend: how to attend.
        num_pages: pages of the pool; the store is allocated here.
        page_size: tokens per page.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend, num_pages: int, page_size: int
    ) -> None:
        self.model = model
        self.backend = backend
        self.device: torch.device = model.device
        self.store = KVStore(cache_shape(model), num_pages, page_size, self.device)
        #: Where layers are torch's own, a single row takes another path and is rounded otherwise.
        self.min_rows = 1 if any(isinstance(m, PackedLinear) for m in model.modules()) else 2

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """One packed pass: writes K/V, returns logits [num_logits, V] in the model's dtype."""
        output = self.model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged_attend=self.backend.prepare(batch, self.store),
        )
        logits: torch.Tensor = output.logits[0, : batch.num_logits]
        return logits


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """What `model` stores per token in a K/V cache."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return CacheShape(
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )
