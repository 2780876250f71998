"""Servers of several versions of the project, and a machine whose cores are taken."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Longest that a server may take to start: it may have to compile its kernels.
_START_SECONDS = 600.0

#: A process that takes a core, for so many seconds at most.
_BURN = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        url: without ``/v1``.
        process: its id; None if it runs elsewhere.
    """

    url: str
    process: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rstrip("/").rpartition(":")
        return host.strip("[]"), int(port)

    def resident(self) -> float | None:
        """Bytes of memory that it holds, if that can be known."""
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)
        return None if found is None else 1024.0 * int(found[1])


@contextlib.contextmanager
def serving(project: Path, flags: list[str]) -> Iterator[Server]:
    """A server of one version, which is killed in the end.

    Args:
        project: a checkout.
        flags: of ``specserve serve``.

    Raises:
        SystemExit: it does not start; with all that it wrote.
    """
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
    environment = os.environ | {"PYTHONPATH": str(project)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (found := re.search(r"URL +(http://\S+)/v1", said := _read(log.fileno()))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"A server of {project} does not start:\n{said}")
                time.sleep(0.1)
            yield Server(found[1], process.pid)
        finally:
            process.kill()
            process.wait()


def _read(descriptor: int) -> str:
    """All of a file that somebody else writes to the end of."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


@contextlib.contextmanager
def burning(processes: int, seconds: float) -> Iterator[None]:
    """Other processes take cores meanwhile, and end by themselves after `seconds` at the latest."""
    command = [sys.executable, "-c", _BURN, str(seconds)]
    # Each in a session of its own: some systems share cores among sessions, not processes.
    burners = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
