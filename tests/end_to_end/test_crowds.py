"""More clients than there is room for, clients that leave, and a signal in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import PATIENCE, Server, read_chunks, said, text_of
from tests.end_to_end.test_life import LONG, wait_until

RUNNING, WAITING = 2, 6
NORMAL: dict[str, Any] = {"prompt": "In the beginning", "max_tokens": 24, "seed": 3, "logprobs": 2}


@pytest.fixture(scope="module")
def small(serve_tiny: Serve) -> Iterator[Server]:
    """Room for two that run and six that wait; 64 tokens a step."""
    limits = ("--max-sequences", str(RUNNING), "--max-waiting-sequences", str(WAITING))
    with serve_tiny(*ALWAYS, *limits, "--max-batch-tokens", "64", paced=True) as server:
        yield server


@contextlib.contextmanager
def unharmed(server: Server) -> Iterator[None]:
    """Afterwards everything is free again, and the normal request is answered as before."""
    before = server.complete(NORMAL)["choices"]
    yield
    metrics = server.wait_until_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert server.complete(NORMAL)["choices"] == before


# -- clients that leave --------------------------------------------------------------------


def connect(server: Server, body: dict[str, Any], *, cut: int = 0) -> socket.socket:
    """A request over a bare socket, without its last `cut` bytes."""
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(sent[: len(sent) - cut])
    return connection


def read_until(connection: socket.socket, what: bytes, count: int = 1) -> None:
    """Reads until something has come so often."""
    received = b""
    while received.count(what) < count:
        part = connection.recv(65536)
        assert part, received
        received += part


def sequences(server: Server, state: str) -> float:
    return server.metrics()[f"vllm:num_requests_{state}"]


#: phase in which the client leaves -> whether its answer is streamed
PHASES = {
    "before its body ends": True,
    "queued": True,
    "in prefill": True,
    "in prefill of a whole answer": False,
    "after the first token": True,
    "later": True,
    "within a whole answer": False,
    "before the last chunk": True,
}


@pytest.mark.bad_input(50)
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_sets_everything_free(small: Server, phase: str) -> None:
    body: dict[str, Any] = {**LONG, "stream": PHASES[phase]}
    with unharmed(small), contextlib.ExitStack() as running:
        if phase == "queued":
            running.enter_context(small.slow())
            streams = [running.enter_context(small.open_stream(LONG)) for _ in range(RUNNING)]
            assert all(next(chunks) for chunks in streams)
        elif "prefill" in phase:
            body |= {"prompt": [70 + i % 50 for i in range(1000)]}  # 16 steps
        elif phase == "before the last chunk":
            body |= {"max_tokens": 5, "stream_options": {"include_usage": True}}
        connection = running.enter_context(connect(small, body, cut=5 * ("body" in phase)))
        if phase == "queued":
            wait_until(lambda: sequences(small, "waiting") == 1)
        elif phase in ("after the first token", "later"):
            read_until(connection, b"data: ", 1 if "first" in phase else 10)
        elif phase == "before the last chunk":
            read_until(connection, b'"finish_reason":"length"')
        elif "body" not in phase:
            wait_until(lambda: sequences(small, "running") + sequences(small, "waiting") == 1)
        connection.close()
        if phase == "queued":
            wait_until(lambda: sequences(small, "waiting") == 0)
            assert sequences(small, "running") == RUNNING


@pytest.mark.quiet
@pytest.mark.bad_input(50)
def test_after_200_impatient_clients_one_is_served_in_5_seconds(tiny: Server) -> None:
    async def impatient(client: httpx.AsyncClient, number: int) -> str:
        body = {**LONG, "prompt": f"{number}", "stream": number % 2 == 0}
        try:
            async with asyncio.timeout(1.0):  # of all of it: one that is served leaves as well
                return str((await client.post("/v1/completions", json=body)).status_code)
        except TimeoutError:
            return "left"

    async def crowd() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=tiny.url, timeout=PATIENCE, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(impatient(client, number) for number in range(200)))

    before = tiny.complete(NORMAL)["choices"]
    assert asyncio.run(crowd()).count("left") > 100, "they were not impatient enough"
    answer = httpx.post(tiny.url + "/v1/completions", json=NORMAL, timeout=5, trust_env=False)
    assert answer.json()["choices"] == before
    tiny.wait_until_idle()


# -- overload ------------------------------------------------------------------------------


@pytest.mark.quiet
@pytest.mark.bad_input(52)
def test_ten_times_too_many_are_answered_in_full_or_refused_at_once(small: Server) -> None:
    room = RUNNING + WAITING
    common = {"max_tokens": 300, "ignore_eos": True}
    bodies = [{"prompt": f"{i}", "seed": i, **common} for i in range(room)]
    alone = [small.complete(body)["choices"][0]["text"] for body in bodies]
    before = small.metrics().get("specserve_requests_rejected_total", 0)

    async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, httpx.Response]:
        body = {**bodies[number % room], "stream": number % 3 == 0}
        return number, await client.post("/v1/completions", json=body)

    async def crowd() -> list[tuple[int, httpx.Response]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=small.url, timeout=PATIENCE, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(10 * room)))

    with unharmed(small):
        answers = asyncio.run(crowd())
        refused = [answer for _, answer in answers if answer.status_code != 200]
        for number, answer in answers:
            if answer.status_code == 200:
                streamed = number % 3 == 0
                text = text_of(list(read_chunks(answer))) if streamed else said(answer.json())[0][0]
                assert text == alone[number % room]
        assert len(answers) - len(refused) >= room
        assert len(refused) > room
        for answer in refused:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert 1 <= int(answer.headers["Retry-After"]) <= 120
        assert small.metrics()["specserve_requests_rejected_total"] - before == len(refused)
    # Told by the server itself, since this process is as busy. A machine that does nothing else
    # needs 0.3 ms for one and so 20 ms for all of them; the limit leaves room for those that do.
    lines = re.findall(r" status=503 seconds=([\d.]+)", small.log.read_text())
    assert len(lines) == len(refused)
    assert statistics.median(map(float, lines)) < 1.0


# -- a signal under load -------------------------------------------------------------------


@pytest.mark.bad_input(56)
def test_a_signal_under_load_loses_no_accepted_request(serve_tiny: Serve) -> None:
    limits = ("--max-sequences", "4", "--max-waiting-sequences", "4")
    with serve_tiny(*limits) as server:
        bodies = [{"prompt": f"{i}", "max_tokens": 200, "seed": i} for i in range(12)]
        alone = [server.complete(body)["choices"][0]["text"] for body in bodies]
        answered = len(bodies)
        stop = time.monotonic() + PATIENCE

        def client(number: int) -> int:
            """Asks until nobody answers any more; returns how many answers were complete."""
            complete, streamed = 0, number % 2 == 0
            body = {**bodies[number], "stream": streamed}
            how: Any = {"timeout": PATIENCE, "trust_env": False}
            with httpx.Client(base_url=server.url, **how) as session:
                while time.monotonic() < stop:
                    try:
                        answer = session.post("/v1/completions", json=body)
                    except httpx.TransportError:
                        return complete  # nobody is there; nothing was promised
                    if answer.status_code == 200:
                        text = (
                            text_of(list(read_chunks(answer)))
                            if streamed
                            else answer.json()["choices"][0]["text"]
                        )
                        assert text == alone[number]
                        complete += 1
                    else:
                        assert answer.status_code == 503
                        codes = ("overloaded", "server_shutting_down")
                        assert answer.json()["error"]["code"] in codes
            return complete

        with ThreadPoolExecutor(len(bodies)) as pool:
            clients = [pool.submit(client, number) for number in range(len(bodies))]
            done = r" status=200 .*endpoint=/v1/completions| endpoint=/v1/completions status=200 "
            wait_until(lambda: len(re.findall(done, server.log.read_text())) > 30)
            server.signal(signal.SIGTERM)
            answered += sum(one.result() for one in clients)
        assert server.wait() == 0
        said_by_server = server.log.read_text()
    assert len(re.findall(done, said_by_server)) == answered
    assert "unfinished" not in said_by_server
    assert "Traceback" not in said_by_server
