"""From the first sign of life to the last: loading, overload, shutdown."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import Serve
from tests.end_to_end.serving import PATIENCE, Server, free_port, serving, text_of

LONG: dict[str, Any] = {
    "prompt": "x",
    "max_tokens": 3000,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 1,
}


def get(url: str) -> httpx.Response:
    """The answer to a GET."""
    return httpx.get(url, timeout=PATIENCE, trust_env=False)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@contextlib.contextmanager
def loading(serve_tiny: Serve, directory: Path) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A server whose loading waits for a compiler that takes its time, and what lets it go on
    (the compiler then fails; the server falls back to torch)."""
    compiler, waiting, go = (directory / name for name in ("compiler", "waiting", "go"))
    compiler.write_text(
        f"#!/bin/sh\ntouch {waiting}\nuntil [ -e {go} ]; do sleep 0.05; done\nexit 1\n"
    )
    compiler.chmod(0o755)
    try:
        with serve_tiny(
            port=free_port(), ready=False, environment={"CXX": str(compiler)}
        ) as server:
            wait_until(waiting.exists)
            yield server, go.touch
    finally:
        go.touch()


def test_health_turns_good_when_the_model_is_ready(serve_tiny: Serve, tmp_path: Path) -> None:
    with loading(serve_tiny, tmp_path) as (server, go_on):
        for _ in range(3):
            health = get(server.url + "/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading"})
        early = server.post({"prompt": "x"})
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "engine_unavailable"
        assert int(early.headers["Retry-After"]) > 0
        assert get(server.url + "/livez").status_code == 200
        assert server.metrics()["specserve_engine_up"] == 0
        go_on()
        wait_until(lambda: get(server.url + "/health").is_success)
        assert get(server.url + "/health").json() == {"status": "ok"}
        assert (
            server.complete({"prompt": "x", "ignore_eos": True})["usage"]["completion_tokens"] == 16
        )
        assert server.metrics()["specserve_engine_up"] == 1
        assert "falls back" in server.log.read_text()


def test_a_signal_while_loading_ends_it_at_once(serve_tiny: Serve, tmp_path: Path) -> None:
    with loading(serve_tiny, tmp_path) as (server, _):
        server.signal()
        assert server.wait() == 0


def test_more_than_the_queue_holds_is_refused(serve_tiny: Serve) -> None:
    limits = ("--max-sequences", "1", "--max-waiting-sequences", "1")
    body = {**LONG, "max_tokens": 200}
    with serve_tiny(*limits, paced=True) as server, ThreadPoolExecutor(1) as pool:
        with server.slow(), server.open_stream(LONG) as running:
            next(running)
            waiting = pool.submit(server.complete, body)
            wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 1)
            refused = server.post(body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert 1 <= int(refused.headers["Retry-After"]) <= 120
            assert server.metrics()["specserve_requests_rejected_total"] == 1
        # Whoever was let in is served.
        assert waiting.result()["usage"]["completion_tokens"] == body["max_tokens"]
        assert server.post({"prompt": "x"}).status_code == 200


@pytest.mark.bad_input(56)
def test_a_drain_lets_answers_end_and_nobody_in(serve_tiny: Serve) -> None:
    body = {**LONG, "max_tokens": 500}
    with serve_tiny("--drain-seconds", str(PATIENCE), paced=True) as server:
        wanted = server.complete(body)["choices"][0]["text"]
        with server.open_stream(body) as chunks:
            with server.slow():
                first = next(chunks)
                server.signal(signal.SIGTERM)
                wait_until(lambda: not get(server.url + "/health").is_success)
                health = get(server.url + "/health")
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                refused = server.post({"prompt": "x"})
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "server_shutting_down"
            assert text_of([first, *chunks]) == wanted
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            get(server.url + "/health")


def test_a_drain_that_takes_too_long_ends_streams_in_good_order(serve_tiny: Serve) -> None:
    flags = ("--drain-seconds", "0.1")
    with serve_tiny(*flags, paced=True) as server, ThreadPoolExecutor(1) as pool, server.slow():
        many = {**LONG, "n": 16}
        whole = pool.submit(server.post, many)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 16)
        with server.open_stream(many) as chunks:
            next(chunks)
            server.signal(signal.SIGINT)
            *_, last = chunks  # and [DONE]
        assert last["error"]["code"] == "server_shutting_down"
        assert whole.result().status_code == 503
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.bad_input(56)
def test_the_second_signal_ends_it_at_once(serve_tiny: Serve) -> None:
    with serve_tiny(paced=True) as server, server.slow(), server.open_stream(LONG) as chunks:
        next(chunks)
        server.signal(signal.SIGTERM)
        wait_until(lambda: not get(server.url + "/health").is_success)
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


@pytest.mark.bad_input(60)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/no/such/model"), "neither a directory"),
        (("--max-draft", "65"), "--max-draft is '65'"),
        (("--host", "0.0.0.0"), "--insecure"),
        (("--drafer", "none"), "did you mean --drafter?"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    with serving(tmp_path, *flags, ready=False) as server:
        assert server.wait() == 2
        lines = server.log.read_text().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.bad_input(60)
def test_a_taken_port_is_told_before_the_model_is_loaded(tiny: Server, tmp_path: Path) -> None:
    port = int(tiny.url.rsplit(":", 1)[1])
    with serving(tmp_path, port=port, ready=False) as server:
        assert server.wait() == 2
        assert "choose another with --port" in server.log.read_text()


def test_health_answers_under_load(tiny: Server) -> None:
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            tiny.post({"prompt": "x", "max_tokens": 100, "n": 8})

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(load) for _ in range(4)]
        try:
            for path in ["/health", "/livez", "/metrics", "/v1/models"] * 5:
                assert get(tiny.url + path).status_code == 200
        finally:
            stop.set()
        for one in running:
            one.result()
