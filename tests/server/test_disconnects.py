"""Clients that leave, stall or wait."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.server.disconnecting import ENDLESS, slow_engine
from tests.server.support import MODEL, FakeEngine, make_app, serving, wait_until


def raw_request(url: str, body: dict[str, Any], *, cut: int = 0) -> socket.socket:
    """Sends a request over a bare socket, without its last `cut` bytes."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall((head.encode() + payload)[: len(head) + len(payload) - cut])
    return connection


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"]}])
def test_a_client_that_leaves_a_stream_stops_the_engine(fields: dict[str, Any]) -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url:
        connection = raw_request(url, {**ENDLESS, "stream": True, **fields})
        assert b"data: " in connection.recv(65536) + connection.recv(65536)
        assert engine.running
        connection.close()
        wait_until(lambda: not engine.running)
        wait_until(lambda: httpx.get(url + "/load").json() == {"server_load": 0})
        metrics = httpx.get(url + "/metrics").text
    assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 0.0' in metrics
    assert f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0' in metrics
    name = "vllm:http_requests_client_disconnected_total"
    assert f'{name}{{model_name="{MODEL}"}} 1.0' in metrics


def test_a_client_that_leaves_before_the_first_token_stops_the_engine() -> None:
    engine = slow_engine()
    engine.delay = 30.0
    with serving(make_app(engine)) as url:
        for streamed in (False, True):
            connection = raw_request(url, {**ENDLESS, "stream": streamed})
            wait_until(lambda: bool(engine.running))
            connection.close()
            wait_until(lambda: not engine.running)


def test_a_client_that_leaves_a_whole_answer_stops_the_engine() -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url:
        connection = raw_request(url, ENDLESS)
        wait_until(lambda: bool(engine.running))
        connection.close()
        wait_until(lambda: not engine.running)
        wait_until(lambda: httpx.get(url + "/load").json() == {"server_load": 0})


def test_a_client_that_leaves_within_its_body_costs_nothing() -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url:
        raw_request(url, ENDLESS, cut=5).close()
        assert httpx.get(url + "/health").status_code == 200
        assert engine.requests == []


def test_many_impatient_clients_leave_nothing_behind() -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url:
        connections = [raw_request(url, {**ENDLESS, "stream": True}) for _ in range(60)]
        wait_until(lambda: len(engine.requests) == 60)
        for connection in connections:
            connection.close()
        wait_until(lambda: not engine.running)
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.bad_input(51)
def test_a_client_that_never_reads_is_cut_off() -> None:
    engine = slow_engine()
    engine.delay, engine.blocks = 0.0, (100,)
    with serving(make_app(engine, send_timeout_seconds=0.3)) as url:
        # Some 50 MB, more than the sockets between them swallow.
        connection = raw_request(url, {**ENDLESS, "stream": True, "logprobs": 20})
        wait_until(lambda: bool(engine.running))
        wait_until(lambda: not engine.running)
        wait_until(lambda: len(engine.aborts) == 1)
        connection.close()


def test_silence_is_filled_with_comments() -> None:
    engine = FakeEngine("ab", delay=0.25)
    with serving(make_app(engine, ping_seconds=0.05)) as url:
        response = httpx.post(url + "/v1/completions", json={"prompt": "x", "stream": True})
    frames = response.text.split("\n\n")
    assert ": ping" in frames
    assert (
        "".join(
            json.loads(frame[6:])["choices"][0]["text"]
            for frame in frames
            if frame[:7] == "data: {"
        )
        == "ab"
    )
    assert frames[-2:] == ["data: [DONE]", ""]


def test_a_short_request_does_not_wait_for_an_endless_stream() -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url, httpx.Client() as client:
        body = {**ENDLESS, "stream": True}
        with client.stream("POST", url + "/v1/completions", json=body) as response:
            chunks = response.iter_raw()
            assert next(chunks)
            assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
            assert len(engine.running) == 1
