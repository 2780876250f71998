"""Paged attention for GPUs behind transformers' own layers: the kernels of the cuda runner."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.attention.base import Attend, AttentionCall
from engine.model.cuda.inputs import locate
from engine.model.cuda.kernels.attention import Masks, attend, rows_per_tile, split_size


class CudaAttention:
    """Attends in one launch per layer, without gathering or copying a page.

    Args:
        heads: query heads of a layer.
        max_model_len: most tokens of a sequence.
    """

    name = "cuda"

    def __init__(self, heads: int, max_model_len: int) -> None:
        self._heads = heads
        self._split = split_size(max_model_len)

    def prepare(self, batch: Batch, store: KVStore) -> Attend:
        """See `AttentionBackend.prepare`."""
        rows = locate(batch, rows_per_tile(self._heads, store.shape.num_heads))
        padding = batch.num_padding_rows

        def attend_layer(call: AttentionCall) -> torch.Tensor:
            store.write(call.layer, batch.slots, call.keys, call.values)
            cache = store.keys[call.layer], store.values[call.layer]
            queries = call.queries.contiguous()
            out = torch.empty_like(queries)
            if padding:
                out[-padding:] = 0
            attend(queries, cache, rows, out, Masks(call.scale, self._split, call.window))
            return out

        return attend_layer
