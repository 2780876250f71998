"""How much memory there is, and how many pages of KV cache fit into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.cache.store import CacheShape
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigurationError

#: Working copies of a row of logits while it is sampled: as it came, float32, processed.
_LOGITS_COPIES = 3


def available_memory(device: torch.device) -> int:
    """Bytes this process may still take on `device`, within its container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_memory(), _container_memory())


def logits_bytes(config: SchedulerConfig, max_draft: int, vocab_size: int) -> int:
    """Memory for the logits of the largest step: every sequence with a full draft, and as many
    prompt tokens whose log probabilities are wanted as a step may have."""
    prompt_rows = min(config.max_logprob_rows, config.max_batch_tokens)
    rows = config.max_sequences * (1 + max_draft) + prompt_rows
    return rows * vocab_size * 4 * _LOGITS_COPIES


def plan_pages(
    config: CacheConfig, shapes: Sequence[CacheShape], free_bytes: int, useful_tokens: int
) -> int:
    """How many pages to allocate, counting every store.

    Args:
        config: what the operator wants.
        shapes: what each store keeps per token.
        free_bytes: memory left after weights and logits.
        useful_tokens: tokens that all sequences together could ever hold; more is waste.

    Raises:
        ConfigurationError: not even one page fits, or the wish exceeds the memory.
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = sum(shape.bytes_per_token for shape in shapes) * config.page_size
    wish = config.memory_bytes
    if wish is not None and wish > free_bytes:
        raise ConfigurationError(
            f"kv_cache_memory is {wish / 2**20:.0f} MiB, but only {free_bytes / 2**20:.0f} MiB "
            "are free after weights and logits; lower it, max_sequences or max_batch_tokens."
        )
    budget = int(free_bytes * config.memory_share) if wish is None else wish
    pages = budget // page_bytes
    if wish is None:
        pages = min(pages, -(-useful_tokens // config.page_size))
    if pages < 1:
        raise ConfigurationError(
            f"kv_cache_memory is {budget / 2**20:.1f} MiB, less than one page "
            f"({page_bytes / 2**20:.1f} MiB); raise it or lower page_size."
        )
    return pages


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_memory() -> int:
    """What the control group leaves (version 2; version 1 under its usual mount)."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return 2**62
