"""Paged attention in plain torch: slow, readable, on any device. Tests take it as the truth."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.attention.base import Attend, AttentionCall


class ReferenceAttention:
    """Attends row by row, so that every matrix product has the same shape in any batch."""

    name = "reference"

    def move(self, store: KVStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeAttention.move`."""
        store.move(sources, targets)

    def prepare(self, batch: Batch, store: KVStore) -> Attend:
        """See `AttentionBackend.prepare`."""
        starts = batch.query_starts.tolist()
        contexts = batch.context_lengths.tolist()
        seen = _seen(batch)
        offsets = torch.arange(batch.page_size, device=batch.slots.device)
        slots = (batch.page_tables.long()[:, :, None] * batch.page_size + offsets).flatten(1)

        def attend(call: AttentionCall) -> torch.Tensor:
            store.write(call.layer, batch.slots, call.keys, call.values)
            out = torch.zeros_like(call.queries, memory_format=torch.contiguous_format)
            for s, context in enumerate(contexts):
                keys, values = store.read(call.layer, slots[s, :context])
                first = context - (starts[s + 1] - starts[s])
                for row in range(starts[s], starts[s + 1]):
                    own = seen.get(row, slice(first + row - starts[s] + 1))
                    own_keys, own_values = keys[own], values[own]
                    begin = max(0, len(own_keys) - call.window) if call.window else 0
                    query = call.queries[row].float()
                    out[row] = _attend_row(query, own_keys[begin:], own_values[begin:], call.scale)
            return out

        return attend


def _seen(batch: Batch) -> dict[int, list[int]]:
    """By row of a draft that branches: the tokens of its sequence that it sees, in order."""
    if batch.branches is None or batch.paths is None:
        return {}
    starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
    paths, found = batch.paths.tolist(), {}
    for s, begin, end, fed, read, path in batch.branches.tolist():
        if path < 0:
            continue
        first = contexts[s] - (starts[s + 1] - starts[s]) - read
        way = [*range(fed), *paths[path : path + end - fed]]
        for i in range(begin, end):
            found[starts[s] + way[i] - read] = [
                *range(first),
                *(first + token for token in way[: i + 1]),
            ]
    return found


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row's attention: query [H, D], keys and values [N, G, D] -> [H, D]."""
    num_heads, head_size = query.shape
    grouped = query.view(keys.shape[1], -1, head_size)  # [G, H/G, D]
    scores = torch.matmul(grouped * scale, keys.permute(1, 2, 0))  # [G, H/G, N]
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, values.transpose(0, 1)).reshape(num_heads, head_size)
