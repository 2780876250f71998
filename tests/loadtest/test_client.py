from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

import httpx
import pytest

from loadtest.client import Client
from loadtest.measure import Answer
from loadtest.plan import Target, UsageError
from tests.loadtest.fake_server import FakeServer

Result = TypeVar("Result")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Hi"}],
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def with_client(
    use: Callable[[Client], Awaitable[Result]], timeout: float = 20.0, **options: Any
) -> Result:
    async def run() -> Result:
        async with Client(timeout, **options) as client:
            return await use(client)

    return asyncio.run(run())


def ask(server: FakeServer, path: str = CHAT, timeout: float = 20.0) -> Answer:
    target = Target("t", server.url)
    return with_client(lambda client: client.ask(target, path, BODY), timeout)


def prepare(server: FakeServer, **target: Any) -> Target:
    wanted = Target("t", server.url, **target)
    return with_client(lambda client: client.prepare(wanted, CHAT, {**BODY, "max_tokens": 1}))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_counts_the_tokens_of_each_chunk(server: FakeServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.error is None
    assert [chunk.tokens for chunk in answer.chunks] == [1, 3, 4]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (5, 2, 8)
    assert answer.text == "t0 t1 t2 t3 t4 t5 t6 t7 "
    assert answer.finish_reason == "length"


def test_times_are_taken_as_chunks_arrive(server: FakeServer) -> None:
    server.script.delay = 0.03
    answer = ask(server)
    # Sleeps never end early, so these are lower bounds; nothing is said of upper ones.
    assert answer.ttft is not None
    assert answer.ttft >= 0.03
    assert answer.chunks[-1].at >= 0.09
    assert answer.seconds >= answer.chunks[-1].at
    assert answer.ttft < answer.chunks[1].at < answer.chunks[2].at


def test_times_count_from_when_the_request_was_due(server: FakeServer) -> None:
    async def late(client: Client) -> Answer:
        return await client.ask(Target("t", server.url), CHAT, BODY, perf_counter() - 100.0)

    answer = with_client(late)
    assert answer.ttft is not None
    assert answer.ttft > 100.0


def test_without_running_usage_only_the_total_is_known(server: FakeServer) -> None:
    server.script.usage = "final"
    answer = ask(server)
    assert answer.output_tokens == 8
    assert not answer.counted


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        ("http", "http 503"),
        ("error", "stream"),
        ("garbage", "malformed"),
        ("cut", "incomplete"),
        ("no_done", "incomplete"),
        ("hang", "timeout"),
    ],
)
def test_every_failure_is_an_answer_of_its_kind(server: FakeServer, fail: str, error: str) -> None:
    server.script.fail = fail
    answer = ask(server, timeout=1.0 if fail == "hang" else 20.0)
    assert answer.error == error
    assert answer.detail
    if fail == "http":
        assert answer.detail == "the queue is full"
    if fail == "error":
        assert answer.detail == "engine died"


def test_a_closed_port_is_a_connection_error() -> None:
    target = Target("t", "http://127.0.0.1:1")
    answer = with_client(lambda client: client.ask(target, CHAT, BODY))
    assert answer.error == "connection"


def test_connections_are_used_again(server: FakeServer) -> None:
    opened = 0

    async def count(request: httpx.Request) -> None:
        async def trace(event: str, _: object) -> None:
            nonlocal opened
            opened += event == "connection.connect_tcp.complete"

        request.extensions["trace"] = trace

    async def three(client: Client) -> None:
        client._http.event_hooks = {"request": [count], "response": []}
        for _ in range(3):
            answer = await client.ask(Target("t", server.url), CHAT, BODY)
            assert answer.error is None

    with_client(three)
    assert opened == 1


def test_the_key_is_sent_and_the_environment_is_not(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    target = Target("t", server.url)
    with_client(lambda client: client.ask(target, CHAT, BODY), api_key="secret")
    assert server.seen[0].headers["authorization"] == "Bearer secret"
    assert server.seen[0].headers["accept-encoding"] == "identity"


def test_preparing_finds_the_model_and_running_usage(server: FakeServer) -> None:
    assert prepare(server) == Target("t", server.url, "fake-model", continuous_usage=True)
    assert server.seen[-1].body["model"] == "fake-model"


def test_a_server_that_refuses_running_usage_is_asked_without(server: FakeServer) -> None:
    server.script.usage = "strict"
    assert prepare(server, model="mine") == Target("t", server.url, "mine", continuous_usage=False)
    assert server.seen[-1].body["stream_options"] == {"include_usage": True}


def test_an_unusable_target_is_explained(server: FakeServer) -> None:
    server.script.fail = "http"
    with pytest.raises(UsageError, match=r"failed its first request \(http 503: the queue"):
        prepare(server)
    server.script.models = ()
    with pytest.raises(UsageError, match="lists no model; name one with --model"):
        prepare(server)
    nowhere = Target("t", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match=r"does not answer at http://127\.0\.0\.1:1/v1/models"):
        with_client(lambda client: client.prepare(nowhere, CHAT, BODY))
