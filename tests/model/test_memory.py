"""How many pages fit, counting everything that needs memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine.cache.store import CacheShape
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigurationError
from engine.model import memory
from engine.model.memory import available_memory, logits_bytes, plan_pages

TARGET = CacheShape(num_layers=4, num_heads=2, head_size=64, dtype=torch.bfloat16)
DRAFT = CacheShape(num_layers=2, num_heads=2, head_size=64, dtype=torch.bfloat16)
PAGE = TARGET.bytes_per_token * 16


def test_an_exact_number_beats_everything() -> None:
    assert plan_pages(CacheConfig(num_pages=7, memory_bytes=1), [TARGET], 0, 0) == 7


def test_bytes_are_spent_on_every_store() -> None:
    wish = CacheConfig(memory_bytes=100 * PAGE)
    assert plan_pages(wish, [TARGET], 10**12, 10**9) == 100
    assert plan_pages(wish, [TARGET, DRAFT], 10**12, 10**9) == 66
    assert plan_pages(CacheConfig(memory_bytes=100 * PAGE, page_size=32), [TARGET], 10**12, 0) == 50


def test_a_share_of_what_is_free_and_no_more_than_is_useful() -> None:
    share = CacheConfig(memory_share=0.5)
    assert plan_pages(share, [TARGET], 100 * PAGE, 10**9) == 50
    assert plan_pages(share, [TARGET], 100 * PAGE, 16 * 20 + 1) == 21


def test_a_wish_above_what_is_free_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"kv_cache_memory is 2 MiB, but only 1 MiB"):
        plan_pages(CacheConfig(memory_bytes=2 << 20), [TARGET], 1 << 20, 10**9)


@pytest.mark.parametrize("free", [PAGE, 0, -PAGE])
def test_less_than_a_page_is_refused(free: int) -> None:
    with pytest.raises(ConfigurationError, match="less than one page"):
        plan_pages(CacheConfig(memory_share=0.5), [TARGET], free, 10**9)


def test_logits_of_the_largest_step_are_counted() -> None:
    """(k + 1) rows of every sequence, and the prompt tokens whose log probabilities are wanted."""
    config = SchedulerConfig(max_batch_tokens=64, max_sequences=32)
    plain = logits_bytes(config, 0, 1000)
    assert plain >= 64 * 1000 * 4
    assert logits_bytes(config, 7, 1000) == plain * (32 * 8 + 64) // (32 + 64)
    assert logits_bytes(config, 7, 2000) == 2 * logits_bytes(config, 7, 1000)


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1000 kB\n",
        "/sys/fs/cgroup/memory.max": "700000\n",
        "/sys/fs/cgroup/memory.current": "100000\n",
    }

    def read(path: Path, *_: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(memory.Path, "read_text", read)
    cpu = torch.device("cpu")
    assert available_memory(cpu) == 600_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory(cpu) == 1_024_000
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "500000"
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "600000"
    assert available_memory(cpu) == 0
    for name in [name for name in files if "cgroup" in name]:
        del files[name]
    assert available_memory(cpu) == 1_024_000


@pytest.mark.parametrize("change", [{"page_size": 0}, {"memory_share": 0.0}, {"memory_share": 1.0}])
def test_impossible_caches_are_refused(change: dict[str, float]) -> None:
    (value,) = change.values()
    with pytest.raises(ConfigurationError, match=re.escape(str(value))):
        CacheConfig(**change)  # type: ignore[arg-type]
