"""A hanging engine, in real processes: its clients know, and the process ends so that it can be
started anew."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.server.processes import PATIENCE, model, serving, small, streaming

__all__ = ["model"]  # a fixture

HANG = """
from engine.core import Engine
import itertools, threading
step, count = Engine.step, itertools.count()
def hanging(self):
    if any(True for _ in self.parts.scheduler.running) and next(count) > 40:
        threading.Event().wait()
    return step(self)
Engine.step = hanging
"""

#: Holds the interpreter's lock, so that not even the event loop runs.
FREEZE = """
import ctypes, faulthandler, itertools
from engine.core import Engine
step, count = Engine.step, itertools.count()
def frozen(self):
    if any(True for _ in self.parts.scheduler.running) and next(count) > 40:
        ctypes.PyDLL(None).sleep(1000)
    return step(self)
Engine.step = frozen
"""


@pytest.mark.bad_input(55)
def test_a_hanging_step_is_noticed_and_told(model: Path, tmp_path: Path) -> None:
    flags = [*small(model), "--stuck-after-seconds", "1", "--log-format", "json"]
    with serving(tmp_path / "log", flags, HANG) as served:
        served.wait_until_ready()
        with streaming(served, 1000) as chunks:
            received = list(chunks)
        assert received[-1] == "[DONE]"
        assert received[-2]["error"]["code"] == "engine_unavailable"
        assert served.exit_code() == 1
    said = served.said()
    assert "a step has been running for 1 s (stuck_after_seconds is 1)" in said
    assert "in hanging" in said  # where it hangs
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert any("is ready" in line["message"] for line in lines)
    [request] = [line for line in lines if line["message"] == "request"]
    assert (request["error"], request["stream"]) == ("engine_unavailable", True)


@pytest.mark.bad_input(55)
def test_a_process_that_stands_still_ends_itself(model: Path, tmp_path: Path) -> None:
    flags = [*small(model), "--stuck-after-seconds", "1"]
    with serving(tmp_path / "log", flags, FREEZE) as served:
        served.wait_until_ready()
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE)
        assert served.exit_code() == 1
    assert "Timeout" in served.said()


def test_a_hang_while_draining_ends_too(model: Path, tmp_path: Path) -> None:
    flags = [*small(model), "--stuck-after-seconds", "1"]
    with serving(tmp_path / "log", flags, HANG) as served:
        served.wait_until_ready()
        with streaming(served, 1000) as chunks:
            served.process.send_signal(signal.SIGTERM)
            received = list(chunks)
        assert received[-1] == "[DONE]"
        assert "error" in received[-2]
        assert served.exit_code() == 1
