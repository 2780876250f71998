"""What a running server tells of speculation: status, metrics, answers and log agree."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from server.api.speculation import SpeculationStatus
from tests.end_to_end.conftest import Serve
from tests.end_to_end.serving import PATIENCE, Server

#: Repeats itself, so that there is something to look up.
BODY: dict[str, Any] = {
    "prompt": "a b c a b c a b c",
    "max_tokens": 200,
    "allowed_token_ids": [68, 69],
    "temperature": 0,
    "ignore_eos": True,
}


def status(server: Server, **headers: str) -> dict[str, Any]:
    response = httpx.get(
        server.url + "/v1/speculation/status", headers=headers, timeout=PATIENCE, trust_env=False
    )
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    TypeAdapter(SpeculationStatus).validate_python(told)
    return told


def load_lines(server: Server) -> list[dict[str, Any]]:
    """The fields of each line on load."""
    lines = [line for line in server.log.read_text().splitlines() if " specserve.load: " in line]
    assert all(" INFO " in line for line in lines)
    return [dict(map(field, line.split(": load ")[1].split(" "))) for line in lines]


def field(text: str) -> tuple[str, Any]:
    """Name and value of ``name=value``; numbers and null as such."""
    name, value = text.split("=")
    return name, value if value[0].isalpha() and value != "null" else json.loads(value)


@pytest.mark.parametrize("mode", ["auto", "off", "fixed"])
def test_status_metrics_answers_and_log_agree(serve_tiny: Serve, mode: str) -> None:
    with serve_tiny("--speculation", mode, "--log-load-seconds", "0.2") as server:
        answers = [server.complete(BODY) for _ in range(4)] + server.complete_all([BODY] * 4)
        metrics, samples = server.wait_until_idle(), server.samples()
        told = status(server)
        deadline = time.monotonic() + PATIENCE
        while not load_lines(server):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lines, before = load_lines(server), -1
        while len(lines) != before:  # the end of the load may still have to be told; then idle
            assert time.monotonic() < deadline, "an idle server goes on to tell of load"
            before = len(lines)
            time.sleep(0.5)
            lines = load_lines(server)
    assert told["mode"] == mode
    assert told["drafters"] == ["lookup", "grammar"]
    # Status and metrics are one and the same account.
    measured = told["speedup"]
    for name, field in (
        ("plain_equivalent_seconds_total", "equal_seconds"),
        ("decode_seconds_total", "seconds"),
        ("unmeasured_seconds_total", "unknown_seconds"),
    ):
        assert metrics[f"specserve_spec_{name}"] == pytest.approx(measured[field], rel=1e-5)
    assert told["wasted_draft_tokens"] == metrics["specserve_spec_wasted_tokens_total"]
    counted = samples["specserve_spec_rows_off_total"]
    assert told["off_reasons"] == {name: n for name, n in counted.items() if n}
    gauge = samples.get("specserve_spec_speedup_ratio", {})
    assert (measured["ratio"] is None) == (not gauge)
    # What each answer tells of itself.
    drafted = sum(answer["speculation"]["drafted"] for answer in answers)
    assert (drafted > 0) == (mode != "off")
    # The first line may end before anything was drafted; with off, no line knows of a draft.
    assert any(line["draft_length"] is not None for line in lines) == (mode != "off")
    assert all("speedup" in answer["speculation"] for answer in answers)
    if mode == "off":
        assert measured["basis"] == "measured"
        assert 0.5 < measured["ratio"] <= 1.0
        # Planning is charged, and the tiny model's steps are so short that on a busy machine a
        # single planning that is interrupted may outweigh an answer: not half of them, though.
        speedups = [answer["speculation"]["speedup"] for answer in answers[1:]]
        assert all(0.0 < speedup <= 1.0 for speedup in speedups)
        assert statistics.median(speedups) > 0.5
        assert {line["not_drafted_mostly"] for line in lines} <= {"off", None}
    assert sum(line["tokens_per_second"] for line in lines) > 0


def test_the_line_on_load_can_be_switched_off(serve_tiny: Serve) -> None:
    with serve_tiny("--log-load-seconds", "0") as server:
        server.complete(BODY)
        time.sleep(0.3)
        assert load_lines(server) == []


def test_the_status_needs_the_key(serve_tiny: Serve) -> None:
    key = "0123456789abcdef"
    with serve_tiny("--api-keys", key, "--drafter", "none") as server:
        refused = httpx.get(server.url + "/v1/speculation/status", trust_env=False)
        assert refused.status_code == 401
        told = status(server, Authorization=f"Bearer {key}")
        assert told["drafters"] == []
        assert told["choices"] == {}


def test_it_may_be_asked_while_others_are_served(tiny: Server) -> None:
    """Reading never disturbs a stream: its text is the same, and it ends as it should."""
    wanted = tiny.complete(BODY)["choices"][0]["text"]
    with tiny.open_stream(BODY) as chunks:
        text = ""
        for number, chunk in enumerate(chunks):
            text += "".join(choice["text"] for choice in chunk["choices"])
            if number % 5 == 0:
                assert status(tiny)["mode"] == "fixed"
    assert text == wanted
