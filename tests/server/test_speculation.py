"""What the API tells of speculation: the planner's state, and what each request gained."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from engine.errors import EngineUnavailable, RequestFailed
from server.api import speculation
from server.api.keys import read_keys
from server.logs import FIELDS
from tests.server.support import FakeEngine, call, complete, make_app, serving

STATUS = "/v1/speculation/status"
KEY = "0123456789abcdef"


# -- the planner's state -------------------------------------------------------------------


def test_the_status_is_what_the_engine_tells() -> None:
    engine = FakeEngine()
    engine.state_of_speculation = {"mode": "fixed", "steps": 7, "speedup": None}
    response = call(make_app(engine), "GET", STATUS)
    assert response.status_code == 200
    assert response.json() == {**engine.state_of_speculation, "recent": []}


def test_the_status_needs_a_key() -> None:
    app = make_app(FakeEngine(), keys=read_keys([KEY]), open_metrics=True)
    assert call(app, "GET", STATUS).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert call(app, "GET", STATUS, headers=headers).status_code == 200


@pytest.mark.parametrize("state", ["new", "loading", "draining", "stopped", "dead"])
def test_without_an_engine_there_is_no_status(state: str) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.state = state
    response = call(app, "GET", STATUS)
    assert response.status_code == 503
    assert response.json()["error"]["code"] in ("engine_unavailable", "server_shutting_down")


@pytest.mark.parametrize(
    ("error", "status"), [(EngineUnavailable("It died."), 503), (RequestFailed("Unclear."), 500)]
)
def test_what_keeps_the_engine_from_telling_is_told(error: Exception, status: int) -> None:
    engine = FakeEngine()
    engine.state_of_speculation = error
    response = call(make_app(engine), "GET", STATUS)
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


def test_a_step_that_hangs_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_PATIENCE_SECONDS", 0.01)
    engine = FakeEngine(delay=30.0)
    engine.step_age = 41.0
    response = call(make_app(engine), "GET", STATUS)
    assert response.status_code == 503
    assert "41 s" in response.json()["error"]["message"]


def test_the_document_describes_every_field() -> None:
    document = call(make_app(FakeEngine()), "GET", "/openapi.json").json()
    answer = document["paths"][STATUS]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"]["$ref"].endswith("/SpeculationStatus")
    schemas = document["components"]["schemas"]
    fields = schemas["SpeculationStatus"]["properties"]
    assert {"mode", "speedup", "choices", "acceptance", "cost_model", "guard"} <= set(fields)
    assert "speedup" in schemas["Speculation"]["required"]


# -- each request --------------------------------------------------------------------------


def test_an_answer_has_its_own_speed_up() -> None:
    engine = FakeEngine(blocks=(2,))
    engine.speedups = {0: 1.23456}
    assert complete(make_app(engine)).json()["speculation"]["speedup"] == 1.2346


def test_an_unknown_speed_up_is_null() -> None:
    told = complete(make_app(FakeEngine()), n=2).json()["speculation"]
    assert told["speedup"] is None
    assert told["target_passes"] > 0


def test_choices_weigh_as_much_as_their_passes() -> None:
    """One took three passes of four tokens, one has stopped after one; a third is unknown."""

    def script(_: Any, choice: int) -> list[int]:
        return [5] * (12 if choice == 0 else 4)

    engine = FakeEngine(script, blocks=(4,))
    engine.speedups = {0: 2.0, 1: 1.0}
    told = complete(make_app(engine), n=3, max_tokens=12).json()["speculation"]
    assert told["target_passes"] == 3 + 1 + 1
    assert told["speedup"] == pytest.approx((3 * 2.0 + 1 * 1.0) / 4)


def test_a_stream_tells_it_with_its_usage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    engine.speedups = {0: 1.5}
    with serving(make_app(engine)) as url:
        body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        lines = httpx.post(url + "/v1/completions", json=body).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["speculation"]["speedup"] == 1.5
    [record] = [r for r in caplog.records if r.name == "specserve.requests"]
    assert getattr(record, FIELDS)["speedup"] == 1.5


def test_one_request_never_changes_what_another_asks_for() -> None:
    """Side by side: each engine request carries its own wishes and nobody else's."""
    engine = FakeEngine(delay=0.005)
    app = make_app(engine)
    wishes: list[dict[str, Any] | None] = [
        {"enabled": False},
        None,
        {"max_draft": 1},
        {"drafter": "none"},
        {"enabled": True, "drafter": "lookup", "num_speculative_tokens": 3},
    ]

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "x" * (number + 1), "speculation": wishes[number]}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    async def all_at_once() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await asyncio.gather(*(ask(client, number) for number in range(len(wishes))))

    asyncio.run(all_at_once())
    assert len(engine.requests) == len(wishes)
    for request in engine.requests:
        wanted = wishes[len(request.prompt) - 1] or {}
        got = request.speculation
        assert got.enabled == wanted.get("enabled")
        assert got.drafter == wanted.get("drafter")
        assert got.num_speculative_tokens == wanted.get(
            "num_speculative_tokens", wanted.get("max_draft")
        )


# -- what was asked lately -----------------------------------------------------------------


def recent(app: Any, key: str = "") -> list[dict[str, Any]]:
    """The status' recent requests, as the holder of a key sees them."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: list[dict[str, Any]] = call(app, "GET", STATUS, headers=headers).json()["recent"]
    return found


def test_recent_requests_are_numbers_without_texts() -> None:
    engine = FakeEngine("one two three", blocks=(4, 1))
    engine.speedups = {0: 1.25}
    app = make_app(engine)
    assert recent(app) == []
    said = complete(app, prompt="a secret question", max_tokens=9, user="somebody").json()
    complete(app, prompt="x", max_tokens=3, n=2, stream=True)
    complete(app, prompt="x", max_tokens=-1)  # refused: nothing to tell
    newest, first = recent(app)
    assert (newest["stream"], newest["generated_tokens"]) == (True, 6)
    assert newest["drafters"] == {"lookup": newest["drafted"]}
    usage, told = said["usage"], said["speculation"]
    assert first["endpoint"] == "/v1/completions"
    assert first["prompt_tokens"] == usage["prompt_tokens"]
    assert first["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert first["generated_tokens"] == usage["completion_tokens"] == 9
    assert 0 < first["ttft_seconds"] <= first["seconds"]
    for name in ("drafted", "accepted", "tokens_per_pass", "speedup"):
        assert first[name] == told[name]
    assert first["finish_reasons"] == {"length": 1}
    assert first["error"] is None
    for text in ("secret", "one", said["id"].removeprefix("cmpl-"), "somebody"):
        assert text not in json.dumps([newest, first])


def test_recent_requests_are_few_and_ones_own() -> None:
    mine, other = "mine" * 5, "other" * 4
    app = make_app(FakeEngine("x"), keys=read_keys([mine, other]))
    for tokens in range(1, 40):
        body = {"prompt": "x" * tokens, "max_tokens": 1}
        call(app, "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {mine}"})
    told = [entry["prompt_tokens"] for entry in recent(app, mine)]
    assert told == [*range(39, 7, -1)]
    assert recent(app, other) == []


def test_a_request_that_failed_or_was_left_is_told_of() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.fail_after = 2
    assert complete(app, prompt="x", max_tokens=9).status_code == 503
    [entry] = recent(app)
    assert entry["error"] == "engine_unavailable"
    assert entry["finish_reasons"] == {"unfinished": 1}


def test_the_document_describes_recent_requests() -> None:
    schemas = call(make_app(FakeEngine()), "GET", "/openapi.json").json()["components"]["schemas"]
    app = make_app(FakeEngine())
    complete(app, prompt="x", max_tokens=2)
    [entry] = recent(app)
    assert set(entry) == set(schemas["RecentRequest"]["properties"])
    assert set(schemas["SpeculationStatus"]["properties"]["recent"]) >= {"items"}
