"""Sizes, names, ids, URLs and methods: what any HTTP server must withstand."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from server.api.keys import read_keys
from tests.server.benches import NORMAL, Bench, assert_envelope
from tests.server.support import FakeEngine, call, complete, make_app, serving


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


# ------------------------------------------------------------------------------ sizes


def test_a_body_over_the_limit_is_refused_by_its_length(bench: Bench) -> None:
    response = call(
        bench.app,
        "POST",
        "/v1/completions",
        content=b'{"prompt": "' + b"x" * 4_000_000 + b'"}',
        headers={"content-type": "application/json"},
    )
    assert assert_envelope(response, 413)["code"] == "content_too_large"
    bench.check_health()


@pytest.mark.bad_input(34)
@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_refused_early_on_the_wire(declared: bool) -> None:
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1600):
            sent += 65536
            yield b"x" * 65536

    app = make_app(FakeEngine(), max_body_bytes=100_000)
    headers = {"content-type": "application/json"}
    if declared:
        headers["content-length"] = str(1600 * 65536)
    with serving(app) as url:
        response = httpx.post(url + "/v1/completions", content=pieces(), headers=headers)
        assert assert_envelope(response, 413)["code"] == "content_too_large"
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.bad_input(46)
def test_a_prediction_of_ten_megabytes_is_too_large(bench: Bench) -> None:
    prediction = {"type": "content", "content": "x" * 10_000_000}
    assert_envelope(complete(bench.app, prediction=prediction), 413)
    bench.check_health()


def test_bodies_below_the_parsing_thread_limit_and_above_it_agree(bench: Bench) -> None:
    padded = complete(bench.app, **NORMAL, user="x" * 500_000).json()["choices"][0]
    assert padded == bench.expected


# ------------------------------------------------------------------------------ names, ids


def test_a_body_has_so_many_fields_at_most() -> None:
    app = make_app(FakeEngine())
    body: dict[str, object] = {"prompt": "a", **{f"unheard_of_{i}": i for i in range(1023)}}
    assert call(app, "POST", "/v1/completions", json=body).status_code == 200
    response = call(app, "POST", "/v1/completions", json={**body, "one_more": 1})
    error = assert_envelope(response, 400)
    assert error["message"] == "The body has 1025 fields; at most 1024 are allowed."


@pytest.mark.bad_input(40)
@pytest.mark.parametrize(
    "model", ["nobody", "../../etc/passwd", "x" * 10**6, "a\r\nSet-Cookie: b", "", "é\x00"]
)
def test_unknown_models(bench: Bench, model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    error = assert_envelope(complete(bench.app, model=model), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "passwd" not in call(bench.app, "GET", "/metrics").text
    assert "Set-Cookie" not in caplog.text
    bench.check_health()


def test_unknown_urls_and_methods(bench: Bench) -> None:
    assert assert_envelope(call(bench.app, "GET", "/nope"), 404)["code"] == "not_found"
    assert_envelope(call(bench.app, "POST", "/v1/completions/", json=NORMAL), 404)
    assert_envelope(call(bench.app, "GET", "//v1/completions"), 404)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        response = call(bench.app, method, "/v1/completions")
        assert_envelope(response, 405)
        assert response.headers["allow"] == "POST"
    odd = call(bench.app, "BREW", "/" + "x" * 5000)
    assert_envelope(odd, 404)
    metrics = call(bench.app, "GET", "/metrics").text
    assert "BREW" not in metrics
    assert "xxx" not in metrics


@pytest.mark.bad_input(58)
def test_what_is_switched_off_does_not_exist(bench: Bench) -> None:
    for path in ("/docs", "/redoc", "/tokenizer_info", "/slots", "/props"):
        assert_envelope(call(bench.app, "GET", path), 404)


@pytest.mark.bad_input(59)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc-1.2:3_x", "abc-1.2:3_x"),
        ("a b\tc", "abc"),
        ("x" * 5000, "x" * 128),
        ("<script>", "script"),
    ],
)
def test_request_ids_are_echoed_sanitised(bench: Bench, given: str, expected: str) -> None:
    response = call(bench.app, "GET", "/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == expected


@pytest.mark.parametrize("given", ["", "  ", "é"])
def test_useless_request_ids_are_replaced(bench: Bench, given: str) -> None:
    headers = {"x-request-id": given.encode()}
    response = call(bench.app, "GET", "/nope", headers=headers)
    assert len(response.headers["x-request-id"]) == 32


def test_prompts_are_not_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    complete(bench.app, prompt="my secret words")
    complete(bench.app, prompt="my secret words", temperature=99)
    complete(bench.app, prompt=["my secret words", 5])
    assert "secret" not in caplog.text


def test_a_bug_answers_500_and_gives_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.refuse = ZeroDivisionError("secret path /srv/model")
    response = complete(app)
    error = assert_envelope(response, 500)
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"
    assert "unexpected error" in caplog.text
    engine.refuse = None
    assert complete(app).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/livez", "/metrics", "/v1/models", "/openapi.json"])
def test_head_is_answered_wherever_get_is(path: str) -> None:
    with serving(make_app(FakeEngine())) as url, httpx.Client() as client:
        answers = {method: client.request(method, url + path) for method in ("GET", "HEAD")}
    head, whole = answers["HEAD"], answers["GET"]
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":  # which has counted one more answer
        assert head.headers["content-length"] == str(len(whole.content))


def test_head_of_what_only_takes_post_is_refused() -> None:
    answer = call(make_app(FakeEngine()), "HEAD", "/v1/completions")
    assert (answer.status_code, answer.content, answer.headers["allow"]) == (405, b"", "POST")


def absolute(url: str, target: str, *headers: str) -> int:
    """The status of a GET whose target is written out, as if through a proxy."""
    host, port = url.removeprefix("http://").split(":")
    lines = [f"GET {target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://example.com/health", 200),
        ("HTTPS://example.com:8000/health?a=b", 200),
        ("http://example.com/v1/models", 401),
        ("http://example.com/health/http://x/v1/models", 401),
        ("http://example.com/%68ealth", 200),
        ("http://example.com", 401),
        ("/http://example.com/health", 401),
        ("ftp://example.com/health", 401),
    ],
)
def test_a_target_in_absolute_form_is_its_path(target: str, status: int) -> None:
    keys = read_keys(["k" * 40])
    with serving(make_app(FakeEngine(), keys=keys, ui=False)) as url:  # nobody may open /
        assert absolute(url, target) == status
        if status == 401:
            known = absolute(url, target, "Authorization: Bearer " + "k" * 40)
            assert known == (200 if target.endswith("com/v1/models") else 404)
