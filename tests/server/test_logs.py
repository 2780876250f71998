"""One line a request, whatever the request holds; and nothing in it that is not ours to tell."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.errors import RequestFailed
from server.api.keys import read_keys
from server.logs import FIELDS, JsonFormatter, TextFormatter, one_line
from tests.server.disconnecting import ENDLESS, slow_engine
from tests.server.support import FakeEngine, call, complete, make_app, serving, wait_until
from tests.server.test_disconnects import raw_request

NASTY = "a\r\n2026-01-01 INFO forged: x\x1b[31m\x00\u2028\u202eb\ud800\x85"


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that is logged, as an operator sees it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if request.param == "json" else TextFormatter())
    handler.addFilter(lambda record: not record.name.startswith("http"))  # the test's own client
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.setLevel(level)
    root.removeHandler(handler)


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[int, dict[str, Any]]]:
    return [
        (record.levelno, dict(getattr(record, FIELDS)))
        for record in caplog.records
        if record.name == "specserve.requests"
    ]


def test_a_generation_is_one_line_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = make_app(FakeEngine(blocks=(3, 1)), keys=read_keys(["alice:0123456789abcdef"]))
    headers = {"Authorization": "Bearer 0123456789abcdef", "x-request-id": "r-1"}
    body = {"prompt": "x" * 40, "max_tokens": 9, "n": 2, "stop": "upon"}
    used = call(app, "POST", "/v1/completions", json=body, headers=headers).json()
    [(level, fields)] = records(caplog)
    assert level == logging.INFO
    assert 0 <= fields.pop("queue_seconds") <= fields.pop("ttft_seconds") <= fields.pop("seconds")
    assert fields == {
        "request_id": "r-1",
        "method": "POST",
        "endpoint": "/v1/completions",
        "status": 200,
        "caller": "alice",
        "stream": False,
        "prompt_tokens": used["usage"]["prompt_tokens"],
        "cached_tokens": used["usage"]["prompt_tokens_details"]["cached_tokens"],
        "generated_tokens": used["usage"]["completion_tokens"],
        "finish_reasons": {"stop": 2},
        **used["speculation"],
        "error": None,
    }


def test_streams_and_failures_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    engine.fail_after, engine.failure = 2, RequestFailed("broken")
    with serving(make_app(engine)) as url:
        httpx.post(url + "/v1/completions", json={"prompt": "x", "stream": True})
    complete(make_app(FakeEngine()), temperature=9)
    (_, streamed), (_, refused) = records(caplog)
    assert (streamed["stream"], streamed["status"]) == (True, 200)
    assert (streamed["error"], streamed["finish_reasons"]) == ("request_failed", {"unfinished": 1})
    assert streamed["generated_tokens"] == 2
    assert (refused["status"], refused["endpoint"]) == (400, "/v1/completions")


def test_a_client_that_left_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = slow_engine()
    with serving(make_app(engine)) as url:
        raw_request(url, {**ENDLESS, "stream": True}).close()
        wait_until(lambda: bool(records(caplog)))
    [(_, fields)] = records(caplog)
    assert fields["finish_reasons"] == {"unfinished": 1}


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/ping", "/metrics"])
def test_probes_are_quiet(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    call(make_app(FakeEngine()), "GET", path)
    assert [level for level, _ in records(caplog)] == [logging.DEBUG]


def test_nothing_a_client_sends_starts_a_line_or_shows(log: io.StringIO) -> None:
    app = make_app(FakeEngine(NASTY.replace("\ud800", "")))
    secret = "my-secret-words"
    for body in (
        {"prompt": f"{secret} {NASTY[:9]}"},
        {"prompt": secret, "model": f"{secret}\r\nforged"},
        {"prompt": secret, "stop": f"{secret}\n"},
        {"prompt": secret, "user": f"{secret}\n", "request_id": f"{secret}\n"},
        {"prompt": secret, "cache_salt": f"{secret}\n", f"{secret}\r\nforged": 1},
        {"prompt": secret, "temperature": 9},
    ):
        call(app, "POST", "/v1/completions", json=body, headers={"user-agent": secret})
    call(app, "GET", f"/{secret}%0d%0aforged?{secret}=%0aforged")
    call(app, "BREW", "/", headers={"x-request-id": "a b; forged=1"})
    call(app, "POST", "/v1/completions", content=f'{{"{secret}', headers={"referer": secret})
    lines = [line for line in log.getvalue().splitlines() if "request" in line]
    assert len([line for line in lines if "specserve.requests" in line]) == 9
    assert secret not in log.getvalue()
    assert "forged:" not in log.getvalue()
    assert "abforged1" in log.getvalue()  # the id, with only harmless characters
    assert "once upon" not in log.getvalue().lower()


def test_an_exception_cannot_forge_a_line(log: io.StringIO) -> None:
    engine = FakeEngine()
    engine.refuse = ZeroDivisionError(NASTY)
    assert complete(make_app(engine)).status_code == 500
    lines = log.getvalue().encode("utf-8").decode().splitlines()
    starts = [line for line in lines if re.match(r"\d{4}-|\{", line)]
    assert not any(line.startswith("2026-01-01 INFO forged") for line in lines)
    assert len([line for line in starts if "unexpected error" in line]) == 1
    assert "\x1b" not in log.getvalue()
    assert "ZeroDivisionError" in log.getvalue()


def test_json_lines_parse(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    made = logging.Logger("x")
    made.addHandler(handler)
    made.info("hello %s", NASTY, extra={FIELDS: {"a": 1, "b": NASTY}})
    try:
        raise ValueError(NASTY)
    except ValueError:
        made.exception("bad")
    first, second = stream.getvalue().splitlines()
    entry = json.loads(first)
    assert (entry["level"], entry["logger"], entry["a"]) == ("info", "x", 1)
    assert entry["message"] == "hello " + NASTY
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
    assert "ValueError" in json.loads(second)["exception"]
    assert caplog.records == []


def test_text_is_one_line_and_fields_cannot_be_imitated() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "m %s", ("a\nb=2",), None)
    setattr(record, FIELDS, {"status": 200, "name": 'x" status=500', "none": None, "d": {"a": 1}})
    line = TextFormatter().format(record)
    assert "\n" not in line
    assert line.endswith('x: m a\\nb=2 status=200 name="x\\" status=500" none=null d="{\\"a\\":1}"')


def test_control_characters_are_written_out() -> None:
    every = "".join(map(chr, [*range(0x110000)]))
    cleaned = one_line(every)
    assert len(cleaned.splitlines()) == 1
    assert "\\n" in cleaned
    assert one_line("héllo 🦊 日本") == "héllo 🦊 日本"
    cleaned.encode("utf-8")
