"""Processes of the command line that start in no time.

Most of a server's start is importing torch and transformers. Here one process does that once, and
forks whenever a test wants a server: a process of its own, with its own environment, arguments and
output, that goes on from `server.cli.main` as if it had just been started. Nothing but imports has
happened before, no thread has been started, and no setting been read.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What a server imports until it is ready; what is missing here only costs time.
_MODULES = (
    "server.cli.serve",
    "server.api.app",
    "engine.prepare",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "transformers.modeling_gguf_pytorch_utils",
)


class Forked:
    """A process, as `subprocess.Popen` shows it.

    Args:
        arguments: of ``specserve``.
        environment: all of it.
        log: file that gets what it writes.
        prelude: Python that runs before.
    """

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str], log: Path, prelude: str = ""
    ) -> None:
        self.returncode: int | None = None
        self.pid: int = _ask({
            "arguments": arguments, "environment": dict(environment), "log": str(log),
            "prelude": prelude,
        })  # fmt: skip

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(9)


@functools.cache
def _mother() -> subprocess.Popen[str]:
    """The process that has imported everything; it ends with this one, whose pipe it reads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECSERVE_")}
    mother = subprocess.Popen(
        [sys.executable, "-m", "tests.forks"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept,
    )  # fmt: skip
    atexit.register(_end, mother)
    return mother


def _end(mother: subprocess.Popen[str]) -> None:
    """Lets it end, and closes both pipes: one left open is complained of at this one's end."""
    mother.communicate(timeout=30)


_LOCK = threading.Lock()


def _ask(question: dict[str, Any]) -> Any:
    with _LOCK:
        mother = _mother()
        assert mother.stdin is not None
        assert mother.stdout is not None
        mother.stdin.write(json.dumps(question) + "\n")
        mother.stdin.flush()
        return json.loads(mother.stdout.readline())


# -- in the other process ----------------------------------------------------------------------


def _serve() -> None:
    """Answers questions until there will be no more; returns in children only."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages of objects that nobody touches remain shared
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            _become(question)
        print(json.dumps(answer), flush=True)
    os._exit(0)


def _become(call: dict[str, Any]) -> None:
    """Goes on as the command that is called for."""
    from server.cli import main

    output = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.argv = ["specserve", *call["arguments"]]
    exec(call["prelude"], {})
    sys.exit(main())


if __name__ == "__main__":
    _serve()
