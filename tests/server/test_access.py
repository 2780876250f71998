"""Keys, tenants, rate limits, origins: who may do what, and that no spelling gets around it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from server.api.keys import read_keys
from tests.server.benches import assert_envelope, unharmed
from tests.server.support import MODEL, TEXT, FakeEngine, call, complete, make_app, serving

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = read_keys([f"alice:{ALICE}", BOB])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app(FakeEngine(), keys=KEYS)


# ------------------------------------------------------------------------------ the gate


def endpoints(app: FastAPI) -> Iterator[tuple[str, str]]:
    paths = app.openapi()["paths"]
    for path in (*paths, "/openapi.json", "/nope"):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "BREW"):
            yield method, path.replace("{model}", MODEL)


def test_without_a_key_nothing_but_health_is_answered(app: FastAPI) -> None:
    answered = set()
    for method, path in endpoints(app):
        response = call(app, method, path, json={"prompt": "x"})
        if response.status_code == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert assert_envelope(response, 401)["code"] == "invalid_api_key"
        else:
            answered.add(path)
    assert answered == {"/health", "/livez", "/readyz", "/ping"}


def test_the_list_of_routes_is_what_the_test_above_thinks(app: FastAPI) -> None:
    document = set(app.openapi()["paths"])
    routes = {r.path for r in app.routes if isinstance(r, APIRoute)}
    assert {path.replace(":path", "") for path in routes} <= document


@pytest.mark.parametrize("key", [ALICE, BOB])
def test_each_key_opens(app: FastAPI, key: str) -> None:
    assert complete(app, headers=bearer(key)).status_code == 401  # in the body it is no header
    response = call(app, "POST", "/v1/completions", json={"prompt": "x"}, headers=bearer(key))
    assert response.status_code == 200
    assert call(app, "GET", "/metrics", headers=bearer(key)).status_code == 200
    assert call(app, "GET", "/nope", headers=bearer(key)).status_code == 404


@pytest.mark.bad_input(38)
@pytest.mark.parametrize(
    "given",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer wrong"],
        [b"Bearer " + ALICE[:-1].encode()],
        [b"Bearer " + ALICE.encode() + b"x"],
        [b"Bearer  " + ALICE.encode()],
        [b"Bearer alice:" + ALICE.encode()],
        [b"bearer " + ALICE.encode()],
        [b"BEARER " + ALICE.encode()],
        [b"Basic " + ALICE.encode()],
        [ALICE.encode()],
        [b"Bearer " + ALICE.upper().encode()],
        [b"Bearer " + ALICE.encode() + b", Bearer " + ALICE.encode()],
        [b"Bearer " + ALICE.encode(), b"Bearer " + ALICE.encode()],
        [b"Bearer " + ALICE.encode(), b"Bearer wrong"],
        [b"Bearer \xff\x00"],
        [b"Bearer " + b"x" * 20_000],
    ],
    ids=lambda given: ascii(given)[:50],
)
def test_wrong_keys(app: FastAPI, given: list[bytes]) -> None:
    headers = [(b"authorization", value) for value in given]
    with unharmed(app, **bearer(ALICE)):
        response = call(app, "POST", "/v1/completions", json={"prompt": "x"}, headers=headers)
    error = assert_envelope(response, 401)
    assert ALICE not in error["message"]


@pytest.mark.parametrize("where", ["key", "api_key", "token"])
def test_keys_elsewhere_do_not_count(app: FastAPI, where: str) -> None:
    assert call(app, "GET", f"/v1/models?{where}={ALICE}").status_code == 401
    assert call(app, "GET", "/v1/models", headers={"x-api-key": ALICE}).status_code == 401
    cookie = {"cookie": f"{where}={ALICE}"}
    assert call(app, "GET", "/v1/models", headers=cookie).status_code == 401


TARGETS = [
    "//v1/completions", "/v1//completions", "/v1/../v1/completions", "/health/../v1/completions",
    "/health/..%2fv1/completions", "/v1%2fcompletions", "/%76%31/completions", "/health%00",
    "/health%2f..%2fv1%2fmodels", "/health;/v1/models", "/health?/v1/models", "/health#/v1/models",
    "/v1/models/", "/v1/models/health", "/V1/completions", "/health/", "//health", "/./v1/models",
    "/v1/models?x=/health", "/metrics?/health", "http://x/v1/models", "http://x/health?/v1/models",
    "http://health/v1/models", "/openapi.json", "/livez/%2e%2e/metrics", "*", "/invocations",
]  # fmt: skip


@pytest.mark.bad_input(39)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_no_spelling_of_a_url_gets_around_the_gate(method: str) -> None:
    engine = FakeEngine()
    with serving(make_app(engine, keys=KEYS)) as url:
        port = int(url.rsplit(":", 1)[1])
        for target in TARGETS:
            for host in ("x", "x/health?", "/health", ""):
                status, body = raw(port, f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n")
                is_health = target.removeprefix("http://x").startswith("/health?")
                assert status in (400, 401) or is_health, target
                assert b"max_model_len" not in body
                assert b"vllm:" not in body
        assert engine.requests == []
        asked = {"prompt": "x", "max_tokens": 100}
        answer = httpx.post(url + "/v1/completions", json=asked, headers=bearer(ALICE))
        assert answer.json()["choices"][0]["text"] == TEXT


def raw(port: int, head: str) -> tuple[int, bytes]:
    """One request as it is written; the status and everything that came back."""
    body = '{"prompt": "x"}'
    rest = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}{rest}Connection: close\r\n\r\n{body}".encode())
        received = b""
        while part := connection.recv(65536):
            received += part
    return int(received.split()[1]), received


@pytest.mark.bad_input(39)
@pytest.mark.parametrize(
    "headers",
    [
        {"x-original-url": "/health"},
        {"x-rewrite-url": "/health"},
        {"x-forwarded-prefix": "/health"},
        {"x-forwarded-for": "127.0.0.1"},
        {"x-http-method-override": "OPTIONS"},
        {"forwarded": "for=127.0.0.1"},
    ],
)
def test_headers_of_proxies_change_nothing(app: FastAPI, headers: dict[str, str]) -> None:
    with unharmed(app, **bearer(ALICE)):
        assert_envelope(call(app, "GET", "/v1/models", headers=headers), 401)


@pytest.mark.bad_input(39)
def test_a_mount_point_does_not_hide_the_path(app: FastAPI) -> None:
    async def ask(root_path: str) -> int:
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/health/v1/models")).status_code

    with unharmed(app, **bearer(ALICE)):
        for root_path in ("/health", "/health/", "/"):
            assert asyncio.run(ask(root_path)) == 401


def test_metrics_may_be_open() -> None:
    app = make_app(FakeEngine(), keys=KEYS, open_metrics=True)
    assert call(app, "GET", "/v1/models").status_code == 401
    scrape = call(app, "GET", "/metrics")
    assert 'specserve_requests_rejected_total{model_name="tests/fake-model",reason="auth"} 1.0' in (
        scrape.text
    )


def test_without_keys_anybody_may_call() -> None:
    assert complete(make_app(FakeEngine())).status_code == 200


def test_keys_are_not_logged(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (ALICE, "wrong-key-of-a-stranger"):
        call(app, "GET", "/v1/models", headers=bearer(key))
    shown = caplog.text + str([record.__dict__ for record in caplog.records])
    assert ALICE not in shown
    assert "stranger" not in shown
    assert "'caller': 'alice'" in shown


# ------------------------------------------------------------------------------ tenants


def test_each_key_has_its_own_prefix_cache() -> None:
    engine = FakeEngine()
    app = make_app(engine, keys=KEYS)
    for key in (ALICE, BOB):
        for salt in (None, "s", f"{KEYS[0].tenant}/"):
            body = {"prompt": "x", "cache_salt": salt}
            call(app, "POST", "/v1/completions", json=body, headers=bearer(key))
    salts = [request.cache_salt for request in engine.requests]
    assert len(set(salts)) == 6
    assert all(salt.startswith(KEYS[i // 3].tenant + "/") for i, salt in enumerate(salts))
    call(app, "POST", "/v1/completions", json={"prompt": "y"}, headers=bearer(ALICE))
    assert engine.requests[-1].cache_salt == salts[0]  # the same tenant shares with itself


def test_without_keys_the_salt_is_the_requests_own() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    complete(app)
    complete(app, cache_salt="s")
    assert [request.cache_salt for request in engine.requests] == ["", "s"]


# ------------------------------------------------------------------------------ origins

PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_no_origin_may_call_by_default() -> None:
    app = make_app(FakeEngine())
    for method, path in (("OPTIONS", "/v1/completions"), ("GET", "/v1/models")):
        response = call(app, method, path, headers=PREFLIGHT)
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_origins_that_may_call() -> None:
    app = make_app(FakeEngine(), keys=KEYS, cors_origins=("https://a.example",))
    allowed = call(app, "OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in allowed.headers
    answer = call(
        app, "GET", "/v1/models", headers={"Origin": "https://a.example", **bearer(ALICE)}
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    stranger = {**PREFLIGHT, "Origin": "https://b.example"}
    refused = call(app, "OPTIONS", "/v1/completions", headers=stranger)
    assert "access-control-allow-origin" not in refused.headers
    no_key = call(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert_envelope(no_key, 401)
