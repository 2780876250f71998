"""Streams over a real socket: framing, usage, errors, disconnects, slow readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.errors import EngineUnavailable, Overloaded, RequestFailed
from engine.types import FinishReason
from tests.server.disconnecting import ENDLESS, slow_engine
from tests.server.support import (
    MODEL,
    TEXT,
    FakeEngine,
    choice,
    ids,
    make_app,
    serving,
)


def stream(url: str, path: str = "/v1/completions", **body: Any) -> tuple[httpx.Response, str]:
    """The whole body of a stream as it went over the wire."""
    fields = {"stream": True, **({"prompt": "Say it"} if "chat" not in path else {}), **body}
    response = httpx.post(url + path, json=fields, timeout=30)
    assert response.status_code == 200, response.text
    return response, response.text


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that is framed exactly as it should be."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames.count("data: [DONE]") == 1
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        c["text"] for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index
    )


@pytest.fixture(params=[(1,), (3, 1, 4), (100,)], ids=str)
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return FakeEngine(blocks=request.param)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(make_app(engine)) as address:
        yield address


def test_framing_and_headers(url: str) -> None:
    response, text = stream(url, max_tokens=200)
    chunks = events(text)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]
    assert text_of(chunks) == TEXT
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_whole_and_streamed_answers_agree(engine: FakeEngine, url: str) -> None:
    fields = {
        "max_tokens": 200,
        "best_of": 1,
        "logprobs": 2,
        "echo": True,
        "stop": "END",
        "return_token_ids": True,
    }
    whole = choice(make_app(engine), **fields)
    _, text = stream(url, **fields)
    chunks = [chunk["choices"][0] for chunk in events(text)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [t for chunk in chunks for t in chunk["token_ids"]] == whole["token_ids"]
    for name, values in whole["logprobs"].items():
        assert [v for chunk in chunks for v in chunk["logprobs"][name]] == values
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        whole["prompt_token_ids"]
    ]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", "END")


def test_include_usage_adds_one_chunk_without_choices(url: str) -> None:
    _, text = stream(url, max_tokens=200, stream_options={"include_usage": True})
    *chunks, last = events(text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids(TEXT)) + 1
    assert last["speculation"]["target_passes"] >= 1


def test_continuous_usage_counts_up(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, text = stream(url, max_tokens=200, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(text)]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids(TEXT)) + 1


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": False, "continuous_usage_stats": True}, None]
)
def test_no_usage_unless_asked(url: str, options: dict[str, Any] | None) -> None:
    _, text = stream(url, stream_options=options)
    assert all("usage" not in chunk for chunk in events(text))


def test_a_stop_string_in_a_block_ends_stream_and_usage(engine: FakeEngine, url: str) -> None:
    options = {"include_usage": True}
    _, text = stream(url, max_tokens=200, stop=["said"], stream_options=options)
    *chunks, last = events(text)
    assert text_of(chunks) == TEXT[: TEXT.index("said")]
    assert last["usage"]["completion_tokens"] == len(ids(TEXT[: TEXT.index("said") + 4]))
    assert engine.aborts[0] == (engine.requests[0].request_id, 0, FinishReason.STOP)


def test_many_prompts_and_samples_interleave(url: str) -> None:
    _, text = stream(url, prompt=["a", "b", "c"], n=2, max_tokens=200)
    chunks = events(text)
    assert [text_of(chunks, index) for index in range(6)] == [TEXT] * 6
    for index in range(6):
        reasons = [
            c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index
        ]
        assert reasons[-1] == "stop"
        assert reasons[:-1] == [None] * (len(reasons) - 1)


def test_chat_streams_begin_with_the_role(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, text = stream(url, "/v1/chat/completions", messages=messages, n=2)
    chunks = [chunk["choices"][0] for chunk in events(text)]
    for index in (0, 1):
        first, *middle, last = [c for c in chunks if c["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in middle) == TEXT
        assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_line_separators_inside_text_do_not_break_frames() -> None:
    nasty = "a\n\nb\u2028c\u0085d\r\ne"
    with serving(make_app(FakeEngine(nasty))) as url, httpx.Client() as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 99}
        with client.stream("POST", url + "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert text_of(chunks) == nasty


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RequestFailed("The logits of this request were not finite."), "request_failed"),
        (EngineUnavailable("The engine has died."), "engine_unavailable"),
    ],
)
def test_an_error_in_mid_stream_is_an_event(failure: Exception, code: str) -> None:
    engine = FakeEngine(blocks=(3,))
    engine.fail_after, engine.failure = 4, failure  # type: ignore[assignment]
    with serving(make_app(engine)) as url:
        _, text = stream(url, max_tokens=200)
        *chunks, last = events(text)
        assert last["error"]["code"] == code
        assert last["error"]["type"] == "server_error"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        metrics = httpx.get(url + "/metrics").text
    assert (
        f'vllm:request_success_total{{finished_reason="error",model_name="{MODEL}"}} 1.0' in metrics
    )


def test_a_shutdown_ends_streams_with_its_own_code() -> None:
    engine = slow_engine()
    with serving(make_app(engine)) as url, httpx.Client() as client:
        body = {**ENDLESS, "stream": True}
        with client.stream("POST", url + "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            engine.state, engine.fail_after = "draining", 0
            text += "".join(pieces)
        refused = client.post(url + "/v1/completions", json=body)
    *chunks, last = events(text)
    assert last["error"]["code"] == "server_shutting_down"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")


def test_the_same_error_before_the_first_byte_has_a_status() -> None:
    engine = FakeEngine()
    engine.fail_after, engine.failure = 1, RequestFailed("The logits were not finite.")
    with serving(make_app(engine)) as url:
        response = httpx.post(url + "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_come_before_the_200(streamed: bool) -> None:
    engine = FakeEngine()
    engine.refuse = Overloaded("The queue holds 1024 sequences, its limit.", 2.5)
    with serving(make_app(engine)) as url:
        body = {"prompt": "x", "stream": streamed}
        response = httpx.post(url + "/v1/completions", json=body)
        long = httpx.post(url + "/v1/completions", json={"prompt": "x" * 3000, "stream": streamed})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "overloaded"
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_if_one_prompt_is_refused_none_runs() -> None:
    engine = FakeEngine()
    submit = engine.submit

    def refuse_the_third(request: Any) -> Any:
        if len(engine.requests) == 2:
            raise Overloaded("The queue is full.")
        return submit(request)

    engine.submit = refuse_the_third  # type: ignore[method-assign]
    with serving(make_app(engine)) as url:
        response = httpx.post(url + "/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 503
        assert engine.running == set()
        assert httpx.get(url + "/load").json() == {"server_load": 0}
