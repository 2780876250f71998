"""Shared by the load test's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loadtest.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake server; change its `script` to change its answers."""
    with FakeServer() as running:
        yield running
