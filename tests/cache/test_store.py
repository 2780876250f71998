"""The tensors behind the pages."""

from __future__ import annotations

import pytest
import torch

from engine.cache import huge_pages
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


@pytest.mark.parametrize("works", [True, False])
def test_pages_are_backed_in_the_order_in_which_they_are_used(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def populate(tensor: torch.Tensor) -> bool:
        asked.append((tensor.data_ptr(), tensor.nbytes))
        return works

    monkeypatch.setattr(huge_pages, "populate", populate)
    monkeypatch.setattr(huge_pages, "LARGE", 1024)  # 64 tokens of a layer
    shape = CacheShape(num_layers=3, num_heads=1, head_size=4, dtype=torch.float32)
    store = KVStore(shape, num_pages=19, page_size=8, device="cpu")
    assert store.populate(-1.0) == 0
    assert not asked
    assert store.populate(60.0) == (160 if works else 0)
    columns = [
        (part[layer, first : first + 64].data_ptr(), part[layer, first : first + 64].nbytes)
        for first in (0, 64, 128)
        for part in (store.keys, store.values)
        for layer in range(3)
    ]
    assert asked == (columns if works else columns[:1])
