"""Servers that tests share. Each test leaves its server idle and whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from engine.model.paths import cache_directory
from tests.end_to_end.serving import Server, serving
from tests.tiny import write_gguf

#: Threads wait for each other in every layer, so a second one is no help on a busy machine.
ONE_THREAD = ("--threads", "1")

#: Drafts at every step, whether they pay or not: these tests are about what comes of drafts.
ALWAYS = ("--speculation", "fixed")

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve_tiny(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts servers of a tiny model, with a cache of their own but the user's kernels."""
    directory = tmp_path_factory.mktemp("servers")
    kernels = cache_directory() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    (directory / "native").symlink_to(kernels)
    model = str(write_gguf(directory / "tiny.gguf"))

    @contextlib.contextmanager
    def serve(
        *flags: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[Server]:
        own = {"SPECSERVE_HOME": str(directory), **(environment or {})}
        flags = ("--model", model, *ONE_THREAD, *flags)
        with serving(directory, *flags, environment=own, **options) as server:
            yield server

    return serve


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
    """Starts servers of the default model."""
    return partial(serving, tmp_path_factory.mktemp("smollm2"), *ONE_THREAD)


@pytest.fixture(scope="session")
def smollm2_float32(serve_smollm2: Serve) -> Iterator[Server]:
    with serve_smollm2(*ALWAYS, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_bfloat16(serve_smollm2: Serve) -> Iterator[Server]:
    with serve_smollm2(*ALWAYS, "--dtype", "bfloat16") as server:
        yield server
