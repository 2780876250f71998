"""A server for one command alone: started in a process of its own, stopped whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from engine.errors import EngineUnavailable
from server.cli.settings import Settings

_URL = re.compile(r"^  URL +(http://\S+)/v1$")

#: What it takes to end in good order; then it is killed.
_STOP_SECONDS = 10


@contextlib.contextmanager
def own_server(
    settings: Settings, model: tuple[Path, str], say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """A server on a free port of this machine, with a key that only this process knows.

    Args:
        settings: those of the model and the engine hold; of HTTP the server has its own.
        model: its directory and its name.
        say: is given the lines that the server says until it is ready.

    Yields:
        Its address, without `/v1`, and its key.

    Raises:
        EngineUnavailable: it could not start.
    """
    key = secrets.token_urlsafe(24)
    changes = {
        "model": str(model[0]),
        "served_model_name": (model[1],),
        "host": "127.0.0.1",
        "port": 0,
        "api_keys": (),
        "api_key_file": None,
        "ui": False,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "drain_seconds": 0.0,
        "log_format": "text",
        "log_level": "warning",
        "log_load_seconds": 0.0,
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPECSERVE_")}
    if home := os.environ.get("SPECSERVE_HOME"):
        kept["SPECSERVE_HOME"] = home
    with tempfile.TemporaryDirectory(prefix="specserve-") as place:  # nobody else can enter it
        config = Path(place, "settings.yaml")
        config.write_text(settings.model_copy(update=changes).to_yaml(), "utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "server.cli.child", str(os.getpid()), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # The key is in its environment, which only its owner can read, and in no argument.
            env={**kept, "SPECSERVE_API_KEYS": key},
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        assert process.stderr is not None
        # What it says once it is ready must be read, or it would wait for a reader.
        reader = threading.Thread(target=deque, args=(process.stderr, 0), daemon=True)
        try:
            url = _wait_for_url(process.stderr, say)
            reader.start()
            yield url, key
        finally:
            _stop(process)
            if reader.is_alive():
                reader.join()
            process.stderr.close()


def _wait_for_url(lines: IO[str], say: Callable[[str], None]) -> str:
    last: deque[str] = deque(["it said nothing"], maxlen=1)
    for line in lines:
        if found := _URL.match(line.rstrip("\n")):
            return found[1]
        if line.strip():
            last.append(line.strip())
            say(line.rstrip())
    reason = last[0].rpartition("specserve.server: ")[2].removeprefix("specserve: ")
    raise EngineUnavailable(f"no server could be started: {reason}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
