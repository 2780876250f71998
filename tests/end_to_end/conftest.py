"""Servers that tests share. Each test leaves its server idle and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest

from tests.end_to_end.serving import Server, serving, serving_tiny

#: Drafts at every step, whether they pay or not: these tests are about what comes of drafts.
ALWAYS = ("--speculation", "fixed")

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve_tiny(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers of a tiny model; takes flags."""
    return partial(serving_tiny, tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def tiny_float32(serve_tiny: Serve) -> Iterator[Server]:
    with serve_tiny(*ALWAYS, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_bfloat16(serve_tiny: Serve) -> Iterator[Server]:
    with serve_tiny(*ALWAYS, "--dtype", "bfloat16") as server:
        yield server


@pytest.fixture
def tiny(tiny_float32: Server) -> Iterator[Server]:
    """The float32 server; whatever a test asked of it has ended and let its pages go."""
    yield tiny_float32
    metrics = tiny_float32.wait_until_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics["specserve_engine_up"] == 1


@pytest.fixture(scope="session")
def serve_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers of the default model; takes flags."""
    return partial(serving, tmp_path_factory.mktemp("smollm2"), "--threads", "1")


@pytest.fixture(scope="session")
def smollm2_float32(serve_smollm2: Serve) -> Iterator[Server]:
    with serve_smollm2(*ALWAYS, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_bfloat16(serve_smollm2: Serve) -> Iterator[Server]:
    with serve_smollm2(*ALWAYS, "--dtype", "bfloat16") as server:
        yield server
