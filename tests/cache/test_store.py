"""The tensors behind the pages."""

from __future__ import annotations

import pytest
import torch

from engine.cache.store import CacheShape, KVStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_token(dtype: torch.dtype) -> None:
    shape = CacheShape(num_layers=30, num_heads=3, head_size=64, dtype=dtype)
    assert shape.bytes_per_token == 2 * 30 * 3 * 64 * (4 if dtype is torch.float32 else 2)


def test_a_slot_holds_one_token_and_scratch_lies_behind_the_pages() -> None:
    shape = CacheShape(num_layers=2, num_heads=3, head_size=4, dtype=torch.float32)
    store = KVStore(shape, num_pages=5, page_size=8, device="cpu")
    assert store.keys.shape == store.values.shape == (2, 6 * 8, 3, 4)
    store.keys.zero_()
    store.values.zero_()
    slots = torch.tensor([3, 39, 40])  # in the first page, last of the pool, scratch
    keys, values = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    store.write(1, slots, keys, values)
    assert torch.equal(store.keys[1, slots], keys)
    assert torch.equal(store.values[1, slots], values)
    assert not store.keys[0].any()
    assert int(store.keys[1].any(-1).any(-1).sum()) == 3
