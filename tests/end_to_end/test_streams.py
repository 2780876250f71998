"""Streams say what whole answers say, alone and in a crowd, and end when their reader leaves."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import Server, said, text_of

GREEDY = {"temperature": 0, "max_tokens": 60}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 60}
USAGE = {"stream_options": {"include_usage": True}}

#: Every way to ask that changes how text is cut into chunks and choices.
SHAPES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "In the beginning"},
    "texts": {"prompt": ["one", "two", "three"]},
    "tokens": {"prompt": [70, 71, 72, 73]},
    "lists of tokens": {"prompt": [[70, 71], [80], [90, 91, 92]]},
    "several choices": {"prompt": "x", "n": 3},
    "several of several": {"prompt": ["x", "y"], "n": 2},
    "echo": {"prompt": "In the beginning", "echo": True},
    "logprobs": {"prompt": "In", "logprobs": 3, "return_token_ids": True},
    "stop": {"prompt": "x", "stop": ["N", "q", "12"], "max_tokens": 400},
    "stop, shown": {"prompt": "x", "stop": "N", "include_stop_str_in_output": True},
    "trace": {"prompt": "x x x", "n": 2, "speculation": {"trace": True}},
    "penalties": {"prompt": "x x x", "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "few tokens": {"prompt": "ab", "allowed_token_ids": [68, 69, 70, 200, 201]},
    "one token": {"prompt": "x", "max_tokens": 1},
    "no token": {"prompt": "x", "max_tokens": 0, "echo": True},
}


def joined(chunks: list[dict[str, Any]]) -> list[Any]:
    """What a stream says, choice by choice, in the shape of `said`."""
    result = []
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in sorted({choice["index"] for choice in choices}):
        own = [choice for choice in choices if choice["index"] == index]
        ends = [choice for choice in own if choice["finish_reason"] is not None]
        assert ends == own[-1:], "a choice ends once, with its last chunk"
        ids = [token for choice in own for token in choice.get("token_ids") or ()]
        text = text_of(chunks, index)
        result.append(
            (
                text,
                ids if "token_ids" in own[0] else None,
                ends[0]["finish_reason"],
                ends[0]["stop_reason"],
            )
        )
    return result


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_is_the_whole_answer(tiny: Server, shape: str, sampling: dict[str, Any]) -> None:
    body = {**sampling, **SHAPES[shape]}
    whole = tiny.complete(body)
    chunks = tiny.stream({**body, **USAGE})
    assert joined(chunks) == said(whole)
    *_, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if "stop" not in body:  # else passes go on until the engine hears of it
        counts = [answer["speculation"] | {"speedup": None} for answer in (last, whole)]
        assert counts[0] == counts[1]  # all but what the clock says
    if "logprobs" in body:
        lists = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
        for name, values in whole["choices"][0]["logprobs"].items():
            assert [value for part in lists for value in part[name]] == values


def test_no_chunk_splits_a_character(tiny: Server) -> None:
    """Random bytes of é, € and 😀: here and there they make a character."""
    bytes_of = tiny.post({"prompt": "é€😀"}, "/tokenize").json()["tokens"]
    assert len(bytes_of) == 9
    body = {"prompt": "x", "allowed_token_ids": bytes_of, "temperature": 2, "seed": 1}
    whole = tiny.complete({**body, "max_tokens": 500})
    text = text_of(tiny.stream({**body, "max_tokens": 500}))
    assert text == whole["choices"][0]["text"]
    assert set(text) - {"\ufffd"}, "not one character came about"


def test_chunks_come_while_the_answer_is_being_made(tiny: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1500, "temperature": 1, "seed": 1, "ignore_eos": True}
    with tiny.open_stream(body) as chunks:
        next(chunks)
        assert tiny.metrics()["vllm:num_requests_running"] == 1
        assert sum(1 for _ in chunks) > 50


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_32_streams_at_once_are_32_streams_alone(tiny: Server, sampling: dict[str, Any]) -> None:
    bodies = [
        {**sampling, "prompt": f"{i} and {i}" * (1 + i % 5), "max_tokens": 20 + 5 * (i % 8)}
        for i in range(32)
    ]
    alone = [said(tiny.complete(body)) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(tiny.stream, bodies))
    assert [joined(chunks) for chunks in together] == alone
    assert len({str(answer) for answer in alone}) > 16, "these texts are too alike to show anything"


# -- readers who leave ---------------------------------------------------------------------

LONG = {"prompt": "x" * 400, "max_tokens": 3000, "ignore_eos": True, "temperature": 1, "seed": 1}


def test_a_reader_who_leaves_ends_the_work(tiny: Server) -> None:
    before = tiny.samples()
    with tiny.open_stream(LONG) as chunks:
        next(chunks)
    tiny.wait_until_idle()
    after = tiny.samples()

    def gained(name: str, label: str = "") -> float:
        return after[name].get(label, 0) - before[name].get(label, 0)

    assert gained("vllm:http_requests_client_disconnected_total") == 1
    assert gained("vllm:request_success_total", "abort") == 1
    # Far from the 3000 passes that the whole text takes.
    assert gained("specserve_target_forwards_total") < 2500


@pytest.mark.quiet  # within a second or two the whole text would be there
def test_whoever_leaves_before_the_answer_is_not_served(tiny: Server) -> None:
    before = tiny.metrics()["specserve_target_forwards_total"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(tiny.url + "/v1/completions", json=LONG, timeout=0.3, trust_env=False)
    after = tiny.wait_until_idle()
    assert after["specserve_target_forwards_total"] - before < 2500


def test_pages_of_those_who_left_serve_others_at_once(serve_tiny: Serve) -> None:
    """A cache for one long request: were a page lost, or let go late, nobody could be served
    or somebody would be preempted."""
    with serve_tiny(*ALWAYS, "--dtype", "float32", "--kv-cache-memory", "900kB") as server:
        room = sum(float(k.split("/")[1]) for k in server.samples()["vllm:cache_config_info"])
        assert 3400 < 16 * room < 3600, "the cache is meant to hold one such request"
        for _ in range(6):
            with server.open_stream(LONG) as chunks:
                next(chunks)
        answer = server.complete({**LONG, "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 3000
        metrics = server.wait_until_idle()
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert metrics["vllm:num_preemptions_total"] == 0


def test_one_leaves_the_others_stay(tiny: Server) -> None:
    body = {**LONG, "max_tokens": 400, "seed": 50}
    alone = said(tiny.complete(body))
    with ThreadPoolExecutor(1) as pool:
        with contextlib.ExitStack() as stack:
            for seed in range(4):
                next(stack.enter_context(tiny.open_stream({**LONG, "seed": seed})))
            stays = pool.submit(tiny.stream, body)
        assert joined(stays.result()) == alone
