"""Health, models, tokenizer, metrics, and the life of the application."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import httpx
import pytest

from engine.errors import ConfigurationError
from engine.types import EngineInfo
from server.api.access import OPEN_PATHS
from server.api.app import create_app
from server.api.keys import read_keys
from server.api.options import ServerOptions
from server.text.tokenizer import Tokenizer
from tests.server.support import (
    MODEL,
    TEXT,
    FakeEngine,
    call,
    ids,
    make_app,
    make_tokenizer,
    serving,
    wait_until,
)


@pytest.mark.parametrize(
    ("state", "health", "live"),
    [
        ("new", (503, "loading"), 200),
        ("loading", (503, "loading"), 200),
        ("ready", (200, "ok"), 200),
        ("draining", (503, "draining"), 200),
        ("stopped", (503, "stopped"), 503),
        ("dead", (503, "dead"), 503),
    ],
)
def test_health_follows_the_engine(state: str, health: tuple[int, str], live: int) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.state = state
    for path in ("/health", "/readyz", "/ping"):
        response = call(app, "GET", path)
        assert (response.status_code, response.json()["status"]) == health
    assert call(app, "GET", "/livez").status_code == live
    assert call(app, "GET", "/v1/models").status_code == 200
    up = f'specserve_engine_up{{model_name="{MODEL}"}} {float(state == "ready")}'
    assert up in call(app, "GET", "/metrics").text
    if state != "ready":
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
            response = call(app, "POST", path, json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "5"
            ending = state in ("draining", "stopped")
            code = "server_shutting_down" if ending else "engine_unavailable"
            assert response.json()["error"]["code"] == code


def test_a_hanging_step_is_not_alive() -> None:
    engine = FakeEngine()
    app = make_app(engine, stuck_after_seconds=60)
    engine.step_age = 61.0
    assert call(app, "GET", "/livez").json() == {"status": "stuck"}


def test_models_are_found_by_ids_with_slashes() -> None:
    app = make_app(FakeEngine())
    card = call(app, "GET", "/v1/models").json()["data"][0]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 512
    assert call(app, "GET", f"/v1/models/{MODEL}").json() == card
    missing = call(app, "GET", "/v1/models/other/model")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_a_model_is_served_under_several_names() -> None:
    app = make_app(FakeEngine(), aliases=("gpt-4", "other/name"))
    names = [MODEL, "gpt-4", "other/name"]
    cards = call(app, "GET", "/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [(name, MODEL) for name in names]
    for name, card in zip(names, cards, strict=True):
        assert call(app, "GET", f"/v1/models/{name}").json() == card
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = call(app, "POST", path, json={**body, "model": name}).json()
            assert answer["model"] == MODEL
        assert call(app, "POST", "/tokenize", json={"prompt": "x", "model": name}).is_success
    error = call(app, "POST", "/tokenize", json={"prompt": "x", "model": "gpt"}).json()["error"]
    assert error["code"] == "model_not_found"
    assert all(name in error["message"] for name in names)


def test_version_and_load() -> None:
    app = make_app(FakeEngine())
    assert re.match(r"\d+\.\d+", call(app, "GET", "/version").json()["version"])
    assert call(app, "GET", "/load").json() == {"server_load": 0}


def test_tokenize_and_detokenize_are_inverse() -> None:
    app = make_app(FakeEngine())
    for field in ("prompt", "content"):
        body = call(app, "POST", "/tokenize", json={field: TEXT, "return_token_strs": True}).json()
        assert body["tokens"] == ids(TEXT)
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == 512
    back = call(app, "POST", "/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": TEXT, "content": TEXT}


def test_tokenize_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = call(make_app(FakeEngine()), "POST", "/tokenize", json={"messages": messages}).json()
    assert body["tokens"] == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "content": "x"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_tokenizer_requests(path: str, body: dict[str, Any], param: str) -> None:
    response = call(make_app(FakeEngine()), "POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_openapi_document_is_honest() -> None:
    document = call(make_app(FakeEngine()), "GET", "/openapi.json").json()
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    assert "prompt" in schemas["CompletionRequest"]["required"]


def test_the_openapi_document_says_what_needs_a_key() -> None:
    assert "security" not in call(make_app(FakeEngine()), "GET", "/openapi.json").json()
    app = make_app(FakeEngine(), keys=read_keys(["a:0123456789abcdef"]))
    headers = {"Authorization": "Bearer 0123456789abcdef"}
    for _ in range(2):
        document = call(app, "GET", "/openapi.json", headers=headers).json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{"bearer": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path in OPEN_PATHS)
            assert operation.get("security", []) == []


# ------------------------------------------------------------------------------ life


class LoadsWhenTold(FakeEngine):
    """An engine that loads until `told` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    async def start(self) -> None:
        self.state = "loading"
        while not self.told.is_set():
            await asyncio.sleep(0.005)
        await super().start()


def test_the_socket_is_open_while_the_engine_loads() -> None:
    engine = LoadsWhenTold()
    engine.state = "new"
    loaded: list[EngineInfo] = []

    def load(info: EngineInfo) -> Tokenizer:
        loaded.append(info)
        return make_tokenizer()

    app = create_app(engine, load, MODEL)
    with serving(app) as url:
        assert httpx.get(url + "/health").json() == {"status": "loading"}
        refused = httpx.post(url + "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert "loading" in refused.json()["error"]["message"]
        engine.told.set()
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
    assert loaded == [engine.info]
    assert engine.state == "stopped"  # who starts it stops it


def test_an_engine_that_was_started_before_is_left_alone() -> None:
    engine = FakeEngine()
    with serving(create_app(engine, lambda _: make_tokenizer(), MODEL)) as url:
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)
    assert engine.state == "ready"


def test_a_failed_start_is_told() -> None:
    engine = FakeEngine()
    engine.state = "new"
    engine.start_failure = ConfigurationError("The model does not fit into memory.")
    failures: list[BaseException] = []
    app = create_app(engine, make_tokenizer(), MODEL, on_failure=failures.append)
    with serving(app) as url:
        wait_until(lambda: bool(failures))
        response = httpx.get(url + "/health")
        assert (response.status_code, response.json()) == (503, {"status": "failed"})
        assert httpx.get(url + "/livez").status_code == 503
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 503
    assert failures == [engine.start_failure]


def test_shutdown_gives_the_engine_its_drain_time() -> None:
    engine = FakeEngine()
    engine.state = "new"
    app = create_app(engine, make_tokenizer(), MODEL, options=ServerOptions(drain_seconds=7.0))

    async def live() -> None:
        async with app.router.lifespan_context(app):
            while engine.state != "ready":
                await asyncio.sleep(0)

    asyncio.run(live())
    assert engine.drained == 7.0
