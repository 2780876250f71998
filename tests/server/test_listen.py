"""What the process needs of the system before it listens."""

from __future__ import annotations

import logging
import resource

import pytest

from server.cli.listen import allow_files


def test_the_limit_of_open_files_follows_the_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    with caplog.at_level(logging.WARNING):
        allow_files(100)
        assert limits == [(1024, 4096)]
        allow_files(1024)
        assert limits[-1] == (1536, 4096)
        assert not caplog.records
        allow_files(10_000)
    assert limits[-1] == (4096, 4096)
    assert "max_connections is 10000" in caplog.text
    assert "only 4096 files; lower it to 3584" in caplog.text
    limits.append((1024, resource.RLIM_INFINITY))
    allow_files(10_000)
    assert limits[-1] == (10_512, resource.RLIM_INFINITY)
