"""Memory in large pages is memory like any other."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from engine.cache import huge_pages
from engine.cache.huge_pages import Arena


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [(), (1,), (3, 5, 7), (0, 4), (700, 1024)])
def test_it_holds_what_is_written(size: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_pages.empty(size, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (size, dtype)
    assert tensor.is_contiguous()
    wanted = torch.arange(tensor.numel()).view(size).to(dtype)
    tensor.copy_(wanted)
    assert torch.equal(tensor, wanted)


def test_an_arena_keeps_all_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_BLOCK", 1000)  # full every few tensors
    arena = Arena()
    given = [torch.randn(n, 3).to(d) for n in range(1, 90) for d in (torch.float32, torch.bfloat16)]
    given.append(torch.randn(4, 6).T)
    kept = [arena.keep(tensor) for tensor in given]
    gc.collect()
    for ours, theirs in zip(kept, given, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()
        assert ours.data_ptr() % 64 == 0


def resident() -> int:
    """Bytes of memory behind this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_can_be_had_beforehand() -> None:
    tensor = huge_pages.empty([2**27], torch.uint8)
    tensor[1000:2000] = 7
    before = resident()
    if not huge_pages.populate(tensor[: 2**26]):
        pytest.skip("this system backs memory only as it is touched")
    assert abs(resident() - before - 2**26) <= 2 * huge_pages.LARGE
    assert int(tensor[:3000].sum()) == 7000


def test_a_system_that_cannot_back_memory_beforehand_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huge_pages, "_POPULATE_WRITE", 12345)
    assert not huge_pages.populate(huge_pages.empty([8], torch.uint8))
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: object())
    assert not huge_pages.populate(huge_pages.empty([8], torch.uint8))


def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    before = resident()
    tensor = huge_pages.empty([2**28], torch.uint8)
    assert resident() - before < 2**26
    tensor[: 2**27] = 1
    assert 2**27 <= resident() - before + 2**22 < 2**28
    del tensor
    gc.collect()
    assert resident() - before < 2**26


def test_a_system_without_large_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert huge_pages.empty([8], torch.float32).fill_(1.0).sum() == 8
