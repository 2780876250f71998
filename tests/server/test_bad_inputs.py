"""Bad input gets the stated answer, harms nobody, and the next request is answered as ever."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.ledger import marked
from tests.server.bad_rows import BAD_BODIES, BAD_FIELDS, VOCABULARY
from tests.server.benches import Bench, assert_envelope, strict_json
from tests.server.support import call, complete


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def name_of(row: Any) -> str:
    return ascii(row)[:60]


@pytest.mark.parametrize(("fields", "param"), marked(BAD_FIELDS), ids=name_of)
def test_a_bad_field_is_named(bench: Bench, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"prompt": "x", **fields}).replace("Infinity", "1e400").encode()
    before = len(bench.engine.requests)
    response = call(
        bench.app,
        "POST",
        "/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    error = assert_envelope(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(bench.engine.requests) == before
    bench.check_health()


@pytest.mark.bad_input(7, 8)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fields", [{"prompt": "x" * 3000}, {"prompt": "x", "max_tokens": 512}])
def test_the_context_is_checked_before_the_200(
    bench: Bench, fields: dict[str, Any], streamed: bool
) -> None:
    error = assert_envelope(complete(bench.app, stream=streamed, **fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512 tokens" in error["message"]
    bench.check_health()


@pytest.mark.parametrize(("body", "word"), marked(BAD_BODIES), ids=name_of)
def test_a_bad_body_is_explained(bench: Bench, body: bytes, word: str) -> None:
    response = call(
        bench.app,
        "POST",
        "/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert word in assert_envelope(response, 400)["message"]
    bench.check_health()


@pytest.mark.bad_input(35, 36)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-encoding": "br"},
    ],
)
def test_media_types(bench: Bench, path: str, headers: dict[str, str]) -> None:
    body = gzip.compress(b'{"prompt": "x"}') if "content-encoding" in headers else b'{"prompt":"x"}'
    assert_envelope(call(bench.app, "POST", path, content=body, headers=headers), 415)
    bench.check_health()


def test_json_with_a_charset_is_fine(bench: Bench) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    body = '{"prompt": "é"}'.encode()
    response = call(bench.app, "POST", "/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.bad_input(14, 15, 28, 31, 46, 48)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-12},
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 0},
        {"top_k": 0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"n": 128},
        {"prompt": ["a"] * 64, "n": 2},
        {"logit_bias": {str(i): -100 for i in range(VOCABULARY)}},
        {"logit_bias": {}},
        {"logprobs": 20},
        {"stop": []},
        {"stop": ["x"] * 16},
        {"stop_token_ids": []},
        {"bad_words": []},
        {"cache_salt": "é"},
        {"prediction": {"type": "content", "content": ""}},
        {"prediction": {"type": "content", "content": "x " * 50_000}, "n": 128},
        {"speculation": {}},
        {"speculation": {"enabled": False, "drafter": "none", "max_draft": 0}},
        {"speculation": {"enabled": None, "drafter": None, "max_draft": None}},
        {"prompt": "\x00"},
        {"prompt": "\ufeffx"},
        {"prompt": "\u202eabc"},
        {"prompt": "🦊" * 10},
        {"prompt": "<eos><|im_start|>"},
        {"prediction": {"type": "content", "content": "<eos>\x00\ufeff🦊"}},
        {"user": "x" * 10_000},
        {"kv_transfer_params": {"do_remote": True}},
        {"response_format": {"type": "text"}},
        {"use_beam_search": False, "length_penalty": 1.0},
        {"metadata": {"deep": [[[[1]]]]}},
    ],
    ids=name_of,
)
def test_edges_that_are_fine(bench: Bench, fields: dict[str, Any]) -> None:
    response = complete(bench.app, **fields)
    assert response.status_code == 200, response.text
    assert strict_json(response)["choices"]
    bench.check_health()
