"""`specserve serve` as a real process, and a tiny model for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.model import sources
from tests.caches import own_cache
from tests.forks import Forked
from tests.tiny import write_gguf

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model, converted."""
    place = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSERVE_HOME", str(own_cache(place)))
        yield sources.resolve(str(write_gguf(place / "Tiny.gguf")))


def small(model: Path) -> list[str]:
    """Flags that make a start quick."""
    return [
        *("--model", str(model), "--dtype", "float32", "--runner", "reference"),
        *("--threads", "1", "--kv-cache-memory", "16MiB", "--max-sequences", "4"),
        *("--max-batch-tokens", "64"),
    ]


class Served:
    """A server process and what it said so far."""

    def __init__(self, process: subprocess.Popen[str] | Forked, log: Path) -> None:
        self.process = process
        self._log = log
        self.url = ""

    def said(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(r"URL +(http://\S+)/v1", self.said())):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        self.url = match[1]

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def serving(log: Path, arguments: list[str], prelude: str = "", **how: Any) -> Iterator[Served]:
    """Starts ``specserve serve`` on a free port; `prelude` is Python that runs before it, `how`
    changes the process (such as its `env`, `cwd` or `user`, or the `executable`), which then is
    started from nothing, and else is forked (`tests.forks`)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECSERVE_")}
    arguments = ["serve", "--port", "0", *arguments]
    log.touch()
    process: subprocess.Popen[str] | Forked
    if how:
        program = f"{prelude}\nfrom server.cli import main\nraise SystemExit(main())"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdout=file, stderr=subprocess.STDOUT, text=True,
                **{"cwd": ROOT, "env": environment, **how},
            )  # fmt: skip
    else:
        process = Forked(arguments, environment, log, prelude)
    try:
        yield Served(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def streaming(served: Served, max_tokens: int) -> Iterator[Iterator[Any]]:
    """A completion under way: its first chunk has come. Yields the parsed chunks after it."""
    body = {
        "model": "Tiny", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True,
        "temperature": 1, "seed": 1, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE) as got:
        assert got.status_code == 200
        lines = (line[6:] for line in got.iter_lines() if line.startswith("data: "))
        chunks = (line if line == "[DONE]" else json.loads(line) for line in lines)
        next(chunks)
        yield chunks
