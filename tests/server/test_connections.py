"""What one connection may do to the server: nothing, however slow, large or malformed."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.connection import SPARE_PLACES, ConnectionLimits, connection_class
from server.api.context import ServerContext
from server.api.middleware import MAX_HEADER_BYTES
from tests.server.benches import unharmed
from tests.server.disconnecting import ENDLESS, slow_engine
from tests.server.support import FakeEngine, call, make_app, serving, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def limited(app: FastAPI, **changes: Any) -> Iterator[str]:
    """A real server with limits on its connections."""
    context: ServerContext = app.state.context
    limits = {
        "connections": 100, "request_seconds": 20.0, "unread_seconds": 20.0,
        "metrics": context.metrics,
    }  # fmt: skip
    kind = connection_class(ConnectionLimits(**{**limits, **changes}))
    with serving(app, http=kind, h11_max_incomplete_event_size=MAX_HEADER_BYTES) as url:
        yield url


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def until(connection: socket.socket, ending: bytes) -> bytes:
    """What comes until it ends so."""
    received = b""
    while not received.endswith(ending):
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


def hung_up(connection: socket.socket, drop: bytes) -> bool:
    """Whether the server hangs up on a client that sends a little now and then."""
    try:
        for _ in range(200):
            connection.sendall(drop)
            time.sleep(0.02)
    except OSError:
        return True
    return False


def answer_of(received: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = received[received.rindex(b"HTTP/1.1") :].partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def rejected(app: FastAPI, reason: str) -> float:
    name = f'specserve_requests_rejected_total{{model_name="tests/fake-model",reason="{reason}"}} '
    lines = call(app, "GET", "/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


# ------------------------------------------------------------------------------ too large


@pytest.mark.bad_input(37)
def test_headers_that_never_end_are_refused() -> None:
    app = make_app(FakeEngine())
    with unharmed(app), limited(app) as url, connect(url) as connection:
        connection.sendall(HEAD + b"X: ")
        for _ in range(160):  # 10 MB
            try:
                connection.sendall(b"x" * 65536)
            except OSError:
                break
        status, error = answer_of(everything(connection))
        assert (status, error["code"]) == (431, "header_too_large")
        assert httpx.get(url + "/health").status_code == 200
    assert rejected(app, "header_too_large") == 1


@pytest.mark.bad_input(37)
@pytest.mark.parametrize(
    "headers", [{"x": "y" * 33_000}, {f"x-{i}": "y" for i in range(10_000)}], ids=["long", "many"]
)
def test_headers_that_come_at_once_are_counted(headers: dict[str, str]) -> None:
    app = make_app(FakeEngine())
    with unharmed(app):
        response = call(app, "GET", "/health", headers=headers)
    assert response.status_code == 431
    assert response.json()["error"]["code"] == "header_too_large"


def test_a_url_that_is_too_long() -> None:
    app = make_app(FakeEngine())
    for path in ("/" + "x" * 9000, "/health?" + "x" * 9000):
        response = call(app, "GET", path)
        assert response.status_code == 414
        assert len(response.text) < 300


# ------------------------------------------------------------------------------ malformed

GARBAGE = [
    b"\r\n\r\nnonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",  # no Host
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nbad\x00: y\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 0x10\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\nx",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=lambda sent: ascii(sent[-40:]))
def test_what_is_not_http_gets_the_envelope(sent: bytes) -> None:
    engine = FakeEngine()
    with limited(make_app(engine)) as url:
        with connect(url) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            received = everything(connection)
        if received:  # what looks like half a request gets no answer at its end
            status, error = answer_of(received)
            assert 400 <= status < 500
            assert set(error) == {"message", "type", "param", "code"}
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
        assert len(engine.requests) == 1


def test_two_lengths_are_one_request_at_most() -> None:
    """A body that looks like a request must not become one (smuggling)."""
    engine = FakeEngine()
    inner = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with limited(make_app(engine)) as url, connect(url) as connection:
        connection.sendall(HEAD + both + inner)
        connection.shutdown(socket.SHUT_WR)
        received = everything(connection)
    assert received.count(b"HTTP/1.1") == 1
    assert answer_of(received)[0] == 400
    assert engine.requests == []


def test_garbage_within_a_stream_ends_it_and_the_engines_work() -> None:
    engine = slow_engine()
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"
    with limited(make_app(engine)) as url, connect(url) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        time.sleep(0.05)
        connection.sendall(b"0\r\n\r\n")
        wait_until(lambda: bool(engine.running))
        connection.sendall(b"garbage\r\n\r\n" * 10)  # the next request, if it were one
        connection.close()
        wait_until(lambda: not engine.running)


# ------------------------------------------------------------------------------ too slow


@pytest.mark.bad_input(37)
@pytest.mark.parametrize("sent", [b"", b"POST", HEAD, HEAD + b"X-Slow: "])
def test_headers_that_come_slowly_are_given_up(sent: bytes) -> None:
    app = make_app(FakeEngine())
    with unharmed(app), limited(app, request_seconds=0.3) as url, connect(url) as connection:
        connection.sendall(sent)
        assert everything(connection) == b""
        wait_until(lambda: _answers(url))


def test_a_byte_now_and_then_does_not_help() -> None:
    with limited(make_app(FakeEngine()), request_seconds=0.4) as url, connect(url) as connection:
        connection.sendall(HEAD)
        assert hung_up(connection, b"a: b\r\n")


@pytest.mark.bad_input(37)
def test_a_slow_body_is_given_up_and_the_next_request_served() -> None:
    engine = FakeEngine()
    app = make_app(engine, body_seconds=1.0)
    with limited(app) as url, connect(url) as connection:
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt')
        status, error = answer_of(everything(connection))
        assert (status, error["code"]) == (408, "body_timeout")
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
    assert rejected(app, "body_timeout") == 1
    assert len(engine.requests) == 1


def test_a_body_that_nobody_reads_is_not_awaited_for_ever() -> None:
    app = make_app(FakeEngine(), max_body_bytes=1000)
    with limited(app, request_seconds=0.3) as url, connect(url) as connection:
        connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert answer_of(until(connection, b"}}"))[0] == 413
        assert hung_up(connection, b"x")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_time_limit_of_bodies_does_not_end_answers() -> None:
    engine = FakeEngine(delay=0.05)
    with limited(make_app(engine, body_seconds=1.0), request_seconds=1.0) as url:
        answers = [
            httpx.post(url + "/v1/completions", json={"prompt": "x", "stream": streamed})
            for streamed in (False, True)
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].text.endswith("data: [DONE]\n\n")


def test_a_connection_may_idle_between_requests() -> None:
    with limited(make_app(FakeEngine()), request_seconds=0.5) as url, httpx.Client() as client:
        assert client.get(url + "/health").status_code == 200
        time.sleep(1.0)
        connections = client._transport._pool.connections  # type: ignore[attr-defined]
        assert client.get(url + "/health").status_code == 200
        assert len(connections) == 1


# ------------------------------------------------------------------------------ too many


PROBES = ("/livez", "/health", "/readyz", "/ping")
PARTS = (b"", b"POST", HEAD, HEAD + b"Content-Length: 9\r\nX-Slow: ")


@contextlib.contextmanager
def half_open(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Clients that never finish their headers."""
    with contextlib.ExitStack() as stack:
        crowd = []
        for index in range(count):
            crowd.append(stack.enter_context(connect(url)))
            crowd[-1].sendall(PARTS[index % len(PARTS)])
        yield crowd


@contextlib.contextmanager
def answered(url: str, engine: FakeEngine, count: int) -> Iterator[list[socket.socket]]:
    """Clients whose streams are under way."""
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(count):
            streams.append(stack.enter_context(connect(url)))
            streams[-1].sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(engine.running) == count)
        yield streams


def test_half_open_connections_give_way_the_oldest_first() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    with limited(app, connections=20) as url, half_open(url, 88) as crowd:
        for path in PROBES:
            assert httpx.get(url + path).status_code == 200
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
        for connection in crowd[:68]:
            status, error = answer_of(everything(connection))
            assert (status, error["code"]) == (503, "overloaded")
        crowd[-1].sendall(b"x\r\n\r\n" + b"x" * 9)  # it was in time, and is not forgotten
        assert "not valid JSON" in answer_of(until(crowd[-1], b"}}"))[1]["message"]
    assert rejected(app, "connections") >= 68


def test_a_full_server_still_answers_probes() -> None:
    engine = slow_engine()
    app = make_app(engine)
    with limited(app, connections=3) as url, answered(url, engine, 3) as streams:
        for path in PROBES:
            answer = httpx.get(url + path)
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
            assert httpx.head(url + path).status_code == 200
        for path in ("/v1/models", "/metrics", "/health/", "/nowhere"):
            answer = httpx.get(url + path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
        body = json.dumps({"prompt": "x" * 500_000})
        headers = {"Content-Type": "application/json"}
        refused = httpx.post(url + "/v1/completions", content=body, headers=headers)
        assert refused.json()["error"]["code"] == "overloaded"
        assert len(engine.running) == 3
        streams.pop().close()
        wait_until(lambda: len(engine.running) == 2)
        wait_until(lambda: httpx.get(url + "/v1/models").status_code == 200)


@pytest.mark.quiet  # a client that is slow to send finds its connection refused and reset
def test_half_open_connections_do_not_take_the_places_of_probes() -> None:
    engine = slow_engine()
    app = make_app(engine)
    context: ServerContext = app.state.context
    with limited(app, connections=2) as url, answered(url, engine, 2):
        with half_open(url, 3 * SPARE_PLACES) as crowd:
            for path in PROBES:
                assert httpx.get(url + path).status_code == 200
            assert len(engine.running) == 2  # who is being answered never gives way
            assert answer_of(everything(crowd[0]))[0] == 503
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)
    assert context.load == 0


def test_idle_connections_give_way_without_a_word() -> None:
    app = make_app(FakeEngine())
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with limited(app, connections=2) as url, connect(url) as first, connect(url) as second:
        for connection in (first, second):
            connection.sendall(request)
            assert b"200 OK" in until(connection, b"}")
        with connect(url) as third:
            assert everything(first) == b""
            for connection in (second, third):
                connection.sendall(request)
                assert b"200 OK" in until(connection, b"}")


def test_who_owes_a_body_that_nobody_reads_gives_way() -> None:
    app = make_app(FakeEngine(), max_body_bytes=1000)
    with limited(app, connections=1) as url, connect(url) as connection:
        connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert answer_of(until(connection, b"}}"))[0] == 413
        assert httpx.get(url + "/v1/models").status_code == 200
        assert everything(connection) == b""


def test_pipelined_requests_are_answered_in_turn() -> None:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with limited(make_app(FakeEngine())) as url, connect(url) as connection:
        connection.sendall(one * 5 + last)
        assert everything(connection).count(b"200 OK") == 6


def test_a_client_that_never_reads_is_dropped_by_the_kernel_in_the_end() -> None:
    engine = slow_engine()
    engine.delay, engine.blocks = 0.0, (100,)
    with limited(make_app(engine), unread_seconds=0.5) as url:
        connection = connect(url)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({**ENDLESS, "stream": True, "logprobs": 20}).encode()
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: bool(engine.running))
        wait_until(lambda: not engine.running, 30)
        connection.close()
