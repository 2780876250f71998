"""The page at /: files that ask nobody else, and need no key; and what it is told by `trace`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from server.api.keys import read_keys
from server.api.page import PAGE_FILES
from tests.server.support import FakeEngine, call, choice, complete, ids, make_app

TRACED: dict[str, Any] = {"speculation": {"trace": True}, "max_tokens": 9, "temperature": 0}


def test_the_page_is_whole_and_asks_nobody_else() -> None:
    app = make_app(FakeEngine(), keys=read_keys(["k" * 20]))
    page = call(app, "GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    wanted = set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text))
    for path in PAGE_FILES:
        file = call(app, "GET", path)  # without a key
        assert file.status_code == 200
        policy = file.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", file.text)  # a name space
        assert "innerHTML" not in file.text  # what a model says is text
        wanted |= {f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', file.text)}
    assert {f"/{path}" for path in wanted} == set(PAGE_FILES) - {"/"}
    assert call(app, "GET", "/v1/models").status_code == 401


def test_it_can_be_left_out() -> None:
    app = make_app(FakeEngine(), ui=False)
    assert {call(app, "GET", path).status_code for path in PAGE_FILES} == {404}


def test_a_proxy_may_show_it_under_a_path() -> None:
    """With the path taken off or not; and no key is needed for less than without one."""
    key = "k" * 20
    app = make_app(FakeEngine(), keys=read_keys([key]), root_path="/a/b")
    for prefix in ("", "/a/b"):
        for path in PAGE_FILES:
            assert call(app, "GET", prefix + path).status_code == 200
        assert call(app, "GET", prefix + "/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert call(app, "GET", prefix + "/v1/models", headers=headers).status_code == 200
    for path in ("/a/bc/", "/a/b/a/b/", "/a/b", "/a/b//health"):
        assert call(app, "GET", path).status_code == 401
    assert app.openapi()["servers"] == [{"url": "/a/b"}]


def test_it_is_no_part_of_the_document() -> None:
    assert not set(PAGE_FILES) & set(make_app(FakeEngine()).openapi()["paths"])


def test_a_trace_tells_whose_guess_a_token_was() -> None:
    engine = FakeEngine("one two three", blocks=(4, 1))
    engine.speedups = {0: 1.23456}
    app = make_app(engine)
    answer = choice(app, **TRACED)
    trace = answer["trace"]
    assert [token["drafter"] for token in trace["tokens"]][:5] == ["lookup"] * 3 + [None] * 2
    assert "".join(token["text"] for token in trace["tokens"]) == answer["text"]
    assert [len(token.get("refused", ())) for token in trace["tokens"]][:5] == [0, 0, 0, 1, 1]
    assert (trace["drafted"], trace["accepted"]) == (9, 6)
    assert trace["speedup"] == 1.2346
    assert "trace" not in choice(app, max_tokens=9)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_of_a_stream_add_up(path: str) -> None:
    app = make_app(FakeEngine("one two three", blocks=(4, 1)))
    asked = (
        {"prompt": "x"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    stream = call(app, "POST", path, json={**asked, **TRACED, "stream": True}).text
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    choices = [entry for line in lines for entry in json.loads(line)["choices"]]
    traces = [entry["trace"] for entry in choices if "trace" in entry]
    assert sum(trace["drafted"] for trace in traces) == 9
    assert sum(trace["accepted"] for trace in traces) == 6
    for entry in choices:
        said = entry["text"] if "text" in entry else entry["delta"].get("content", "")
        assert said == "".join(token["text"] for token in entry.get("trace", {}).get("tokens", []))
    assert sum(len(trace["tokens"]) for trace in traces) == min(9, len(ids("one two three")) + 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_asked_for_is_not_worked_out(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that traces are made with is taken away."""
    worked: list[object] = []
    for place in ("text.choice._origin", "api.chat.write_trace", "api.completions.write_trace"):
        monkeypatch.setattr(f"server.{place}", lambda *given: worked.append(given))
    engine = FakeEngine("one two three", blocks=(4, 1))
    asked: dict[str, Any] = {"max_tokens": 9, "stream": stream}
    if path == "/v1/completions":
        asked["prompt"] = "x"
    else:
        asked["messages"] = [{"role": "user", "content": "x"}]
    assert call(make_app(engine), "POST", path, json=asked).status_code == 200
    assert not engine.requests[0].speculation.trace
    assert worked == []


def test_the_document_describes_traces() -> None:
    schemas = make_app(FakeEngine()).openapi()["components"]["schemas"]
    trace = choice(make_app(FakeEngine("one two", blocks=(3, 1))), **TRACED)["trace"]
    assert set(trace) == set(schemas["Trace"]["properties"])
    for token in trace["tokens"]:
        assert set(schemas["TracedToken"]["required"]) <= set(token)
        assert set(token) <= set(schemas["TracedToken"]["properties"])
    for name in ("ChatChoice", "CompletionChoice"):
        assert "trace" in schemas[name]["properties"]


def test_a_server_may_refuse_to_tell() -> None:
    response = complete(make_app(FakeEngine(), allow_trace=False), **TRACED)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculation.trace"
