"""Limits of time in the engine, and an engine that never answers again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.errors import EngineUnavailable
from engine.types import Event, FinishReason, Request
from server.api.context import ServerContext
from tests.server.benches import assert_envelope
from tests.server.disconnecting import ENDLESS, slow_engine
from tests.server.support import FakeEngine, call, complete, make_app, serving, wait_until


def error_in_stream(url: str, **body: Any) -> dict[str, Any]:
    """The error event that ends a stream."""
    response = httpx.post(url + "/v1/completions", json={"stream": True, **body}, timeout=30)
    assert response.status_code == 200
    *_, last, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["a", "b"]}])
def test_a_wait_for_the_first_token_ends(fields: dict[str, Any]) -> None:
    engine = FakeEngine(delay=60)
    app = make_app(engine, queue_seconds=0.1)
    response = complete(app, **fields)
    assert assert_envelope(response, 503)["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "5"
    assert engine.running == set()
    assert {reason for _, _, reason in engine.aborts} == {FinishReason.ABORT}
    scrape = call(app, "GET", "/metrics").text
    assert 'rejected_total{model_name="tests/fake-model",reason="queue_timeout"} 1.0' in scrape
    assert call(app, "GET", "/load").json() == {"server_load": 0}


def test_a_wait_for_the_first_token_ends_in_a_stream_too() -> None:
    engine = FakeEngine(delay=60)
    with serving(make_app(engine, queue_seconds=0.1)) as url:
        assert error_in_stream(url, prompt="x")["code"] == "queue_timeout"
        assert engine.running == set()


class HalfStuck(FakeEngine):
    """Answers the first request only."""

    def submit(self, request: Request) -> AsyncIterator[Event]:
        stream = super().submit(request)
        return stream if len(self.requests) == 1 else _never()


async def _never() -> AsyncIterator[Event]:
    await asyncio.sleep(60)
    yield  # type: ignore[misc]


def test_one_prompt_of_several_that_waits_is_enough() -> None:
    engine = HalfStuck()
    response = complete(make_app(engine, queue_seconds=0.2), prompt=["a", "b"])
    assert assert_envelope(response, 503)["code"] == "queue_timeout"
    assert engine.running == set()


def test_an_answer_that_takes_too_long_ends() -> None:
    engine = slow_engine()
    app = make_app(engine, generation_seconds=0.5, queue_seconds=5.0)
    response = call(app, "POST", "/v1/completions", json=ENDLESS)
    assert assert_envelope(response, 504)["code"] == "generation_timeout"
    assert response.headers["x-should-retry"] == "false"
    assert engine.running == set()
    with serving(app) as url:
        assert error_in_stream(url, **ENDLESS)["code"] == "generation_timeout"
        assert engine.running == set()
    scrape = call(app, "GET", "/metrics").text
    assert 'request_success_total{finished_reason="error",model_name="tests/fake-model"} 2.0' in (
        scrape
    )


@pytest.mark.parametrize("limits", [{"queue_seconds": 1.0}, {"generation_seconds": 30}])
def test_limits_do_not_touch_what_is_within_them(limits: dict[str, float]) -> None:
    engine = FakeEngine(delay=0.03)  # the whole answer takes longer than the wait may
    assert complete(make_app(engine, **limits), max_tokens=40).status_code == 200


def test_zero_is_no_limit() -> None:
    app = make_app(FakeEngine(delay=0.05), queue_seconds=0, generation_seconds=0)
    assert complete(app).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_hangs_is_told_to_every_client(streamed: bool) -> None:
    engine = FakeEngine(delay=60)
    app = make_app(engine, stuck_after_seconds=5.0)
    context: ServerContext = app.state.context
    with serving(app) as url, httpx.Client(timeout=30) as client:
        request = client.build_request(
            "POST", url + "/v1/completions", json={"prompt": "x", "stream": streamed}
        )
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(client.send(request)))
        thread.start()
        wait_until(lambda: context.load == 1)
        engine.step_age = 6.0
        for path in ("/health", "/readyz", "/livez"):
            response = httpx.get(url + path)
            assert (response.status_code, response.json()) == (503, {"status": "stuck"})
        refused = httpx.post(url + "/v1/completions", json={"prompt": "x"})
        assert assert_envelope(refused, 503)["code"] == "engine_unavailable"
        assert "engine_up" in httpx.get(url + "/metrics").text
        loop_call(context, EngineUnavailable("The engine hangs."))
        thread.join(60)
        wait_until(lambda: context.load == 0)  # a moment after the client has its answer
    if streamed:
        assert '"code":"engine_unavailable"' in answers[0].text
        assert answers[0].text.endswith("data: [DONE]\n\n")
    else:
        assert assert_envelope(answers[0], 503)["message"] == "The engine hangs."


def loop_call(context: ServerContext, error: EngineUnavailable) -> None:
    """Interrupts from the event loop, as the server's watchdog does."""
    [generation] = context.running
    generation._patience._loop.call_soon_threadsafe(context.interrupt, error)  # type: ignore[attr-defined]
