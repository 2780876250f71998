"""A real server process on a real port, and the few ways in which tests talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

import loadtest
from tests.caches import own_cache
from tests.forks import Forked
from tests.tiny import Weights, write_gguf

#: Longest wait for anything: a first start compiles the kernels and may fetch a model.
PATIENCE = 240.0

_URL = re.compile(r"^  URL +(http://\S+)/v1$", re.MULTILINE)

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: without ``/v1``.
        log: file of everything it has written.
        headers: of every request.
    """

    process: Forked
    url: str
    log: Path
    headers: Mapping[str, str] = field(default_factory=dict)

    def called_with(self, key: str) -> Server:
        """The same server, asked with an API key."""
        return replace(self, headers={"Authorization": f"Bearer {key}"})

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return self.process.wait(PATIENCE)

    @property
    def most_memory(self) -> int:
        """Bytes of memory that it has held at its worst moment so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Meanwhile a step takes so long that no long answer ends, however busy the machine is
        with the test itself. Of servers that were started with `paced`."""
        brake = _brake(self.log)
        brake.touch()
        try:
            yield
        finally:
            brake.unlink()

    # -- requests --------------------------------------------------------------------------

    def post(self, body: Body, path: str = "/v1/completions") -> httpx.Response:
        """One request, answered as a whole."""
        how: Any = {"headers": self.headers, "timeout": PATIENCE, "trust_env": False}
        return httpx.post(self.url + path, json=dict(body), **how)

    def complete(self, body: Body) -> dict[str, Any]:
        """The answer to a completion, as a whole."""
        response = self.post(body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def complete_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers to completions that are all sent at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.complete, bodies))

    def stream(self, body: Body) -> list[dict[str, Any]]:
        """All chunks of a stream that ends as it should."""
        with self.open_stream(body) as chunks:
            return list(chunks)

    @contextlib.contextmanager
    def open_stream(self, body: Body) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a stream, as they come; leaving early closes the connection."""
        request = {**body, "stream": True}
        with (
            httpx.Client(timeout=PATIENCE, trust_env=False, headers=self.headers) as client,
            client.stream("POST", self.url + "/v1/completions", json=request) as response,
        ):
            assert response.status_code == 200, response.read()
            yield read_chunks(response)

    # -- metrics ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Every sample, summed over its labels; a histogram's are its ``_sum`` and ``_count``."""
        return {name: sum(values.values()) for name, values in self.samples().items()}

    def samples(self) -> dict[str, dict[str, float]]:
        """Name -> last label's value -> sample, parsed by Prometheus' own parser."""
        how: Any = {"headers": self.headers, "timeout": PATIENCE, "trust_env": False}
        response = httpx.get(self.url + "/metrics", **how)
        assert response.status_code == 200
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                label = [v for k, v in sample.labels.items() if k != "model_name"]
                if not sample.name.endswith("_bucket"):
                    found.setdefault(sample.name, {})["/".join(label)] = sample.value
        return found

    def wait_until_idle(self) -> dict[str, float]:
        """The metrics, once nothing runs or waits."""
        deadline = time.monotonic() + PATIENCE
        while True:
            metrics = self.metrics()
            running = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
            if not running:
                return metrics
            assert time.monotonic() < deadline, f"{running:.0f} sequences never end"
            time.sleep(0.01)


def read_chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Payloads of the events, up to ``[DONE]``, which must come and be the last thing."""
    lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
    for line in lines:
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            assert next(lines, None) is None, "something follows [DONE]"
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def said(answer: Mapping[str, Any]) -> list[Any]:
    """What must not depend on company, streaming or speculation: text and end of each choice."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [(c["text"], c.get("token_ids"), c["finish_reason"], c["stop_reason"]) for c in choices]


def chat_prompts() -> list[str]:
    """First turns of the load test's own prompts, as SmolLM2 reads a conversation."""
    file = Path(loadtest.__file__).parent / "data" / "prompts.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    turns = [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]
    return [f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" for turn in turns]


# -- processes -----------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    directory: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    port: int = 0,
    ready: bool = True,
    paced: bool = False,
) -> Iterator[Server]:
    """A server that is stopped at the end, whatever happens.

    Args:
        directory: where its log goes.
        flags: of ``specserve serve``.
        environment: variables on top of this process's own, of which no setting is passed on.
        port: 0 = a free one, which only a server that is ready tells.
        ready: whether to wait until it is.
        paced: whether its steps can be slowed down (`Server.slow`).
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPECSERVE_") or name == "SPECSERVE_HOME"
    }
    log = directory / f"server-{time.monotonic_ns()}.log"
    own = kept | dict(environment or {})
    arguments = ["serve", "--port", str(port), *flags]
    log.touch()
    process = Forked(arguments, own, log, _PACED.format(brake=str(_brake(log))) if paced else "")
    try:
        url = f"http://127.0.0.1:{port}"
        yield Server(process, _wait_for_url(process, log) if ready else url, log)
    finally:
        process.kill()
        process.wait()


#: Makes steps take long while a file is there.
_PACED = """
import os, time
from engine.core import Engine
step = Engine.step
def paced(self):
    if os.path.exists({brake!r}):
        time.sleep(0.1)
    return step(self)
Engine.step = paced
"""


def _brake(log: Path) -> Path:
    return log.with_suffix(".slow")


@contextlib.contextmanager
def serving_tiny(
    directory: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    weights: Weights | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server of a tiny model, with a cache in `directory` but the user's kernels.

    Args:
        options: see `serving`.
    """
    weights = weights or Weights()
    model = directory / f"tiny{abs(hash(weights)):x}.gguf"
    if not model.exists():
        write_gguf(model, weights=weights)
    own = {"SPECSERVE_HOME": str(own_cache(directory)), **(environment or {})}
    # Threads wait for each other in every layer; one is quicker here, and on any busy machine.
    flags = ("--model", str(model), "--threads", "1", *flags)
    with serving(directory, *flags, environment=own, **options) as server:
        yield server


def _wait_for_url(process: Forked, log: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while (found := _URL.search(log.read_text())) is None:
        assert process.poll() is None, f"exit code {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not ready:\n{log.read_text()}"
        time.sleep(0.02)
    return found[1]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
