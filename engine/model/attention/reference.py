"""Paged attention in plain torch: slow, readable, on any device. Tests take it as the truth."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.attention.base import Attend, AttentionCall


class ReferenceAttention:
    """Attends row by row, so that every matrix product has the same shape in any batch."""

    name = "reference"

    def prepare(self, batch: Batch, store: KVStore) -> Attend:
        """See `AttentionBackend.prepare`."""
        starts = batch.query_starts.tolist()
        contexts = batch.context_lengths.tolist()
        offsets = torch.arange(batch.page_size, device=batch.slots.device)
        slots = (batch.page_tables.long()[:, :, None] * batch.page_size + offsets).flatten(1)

        def attend(call: AttentionCall) -> torch.Tensor:
            store.write(call.layer, batch.slots, call.keys, call.values)
            out = torch.zeros_like(call.queries, memory_format=torch.contiguous_format)
            for s, context in enumerate(contexts):
                keys = store.keys[call.layer][slots[s, :context]].float()
                values = store.values[call.layer][slots[s, :context]].float()
                first = context - (starts[s + 1] - starts[s])
                for row in range(starts[s], starts[s + 1]):
                    last = first + row - starts[s] + 1
                    begin = max(0, last - call.window) if call.window else 0
                    out[row] = _attend_row(
                        call.queries[row].float(),
                        keys[begin:last],
                        values[begin:last],
                        call.scale,
                    )
            return out

        return attend


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row's attention: query [H, D], keys and values [N, G, D] -> [H, D]."""
    num_heads, head_size = query.shape
    grouped = query.view(keys.shape[1], -1, head_size)  # [G, H/G, D]
    scores = torch.matmul(grouped * scale, keys.permute(1, 2, 0))  # [G, H/G, N]
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, values.transpose(0, 1)).reshape(num_heads, head_size)
