"""Requests that nobody thought of: mutated bodies and bytes, and whatever the server's own
document allows. Never a 5xx, always the envelope, and the next request is answered as ever."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server.api import schemas
from server.api.keys import read_keys
from server.api.response_schemas import ResponseRequest
from server.api.unsupported import UNSUPPORTED, UNSUPPORTED_RESPONSES
from tests.server.benches import Bench, assert_envelope, strict_json
from tests.server.found_rows import CHAT, COMPLETIONS, DETOKENIZE, FOUND, GOOD, RESPONSES, TOKENIZE
from tests.server.support import FakeEngine, call, make_app

JSON = {"content-type": "application/json"}
QUICK = settings(
    max_examples=120, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

BENCH = Bench()


def send(path: str, body: bytes) -> httpx.Response:
    """One request, and what must be true of every answer."""
    response = call(BENCH.app, "POST", path, content=body, headers=JSON)
    if response.status_code != 200:
        assert_envelope(response, response.status_code)
        assert response.status_code < 500
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '{"error":' not in response.text
        if path == RESPONSES:
            assert (
                response.text.count("event: response.completed")
                + response.text.count("event: response.incomplete")
                == 1
            )
        else:
            assert response.text.endswith("data: [DONE]\n\n")
    else:
        strict_json(response)
    assert BENCH.engine.running == set()
    return response


@pytest.mark.parametrize(("path", "fields", "param"), FOUND, ids=lambda row: ascii(row)[:50])
def test_what_fuzzing_found(path: str, fields: dict[str, Any], param: str) -> None:
    before = len(BENCH.engine.requests)
    response = send(path, json.dumps({**GOOD[path], **fields}).encode())
    assert assert_envelope(response, 400)["param"] == param
    assert len(BENCH.engine.requests) == before
    BENCH.check_health()


FIELDS = {
    COMPLETIONS: [*schemas.CompletionRequest.model_fields, *UNSUPPORTED],
    CHAT: [*schemas.ChatCompletionRequest.model_fields, *UNSUPPORTED],
    RESPONSES: [*ResponseRequest.model_fields, *UNSUPPORTED_RESPONSES],
    TOKENIZE: list(schemas.TokenizeRequest.model_fields),
    DETOKENIZE: list(schemas.DetokenizeRequest.model_fields),
}

NUMBERS = (
    st.integers(-3, 3)
    | st.sampled_from([2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e-300, 1e308])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["<eos>", "<|im_start|>", "auto", "none", "left", "5", "NaN", "\x00", "\u202e", "content"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXTS | st.sampled_from(["type", "text", "role"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("path", FIELDS)
def test_mutated_fields(path: str) -> None:
    @QUICK
    @given(st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, min_size=1, max_size=3))
    def check(fields: dict[str, Any]) -> None:
        send(path, json.dumps({**GOOD[path], **fields}).encode())

    check()
    BENCH.check_health()


def test_mutated_bytes() -> None:
    good = json.dumps(
        {**GOOD[COMPLETIONS], "max_tokens": 3, "stop": ["é", "🦊"], "logit_bias": {"5": -1.5e1}}
    ).encode()

    @QUICK
    @given(st.integers(0, len(good)), st.integers(0, 6), st.binary(max_size=4))
    def check(place: int, removed: int, added: bytes) -> None:
        send(COMPLETIONS, good[:place] + added + good[place + removed :])

    check()
    BENCH.check_health()


# -------------------------------------------------------------------- by the server's document

SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", make_app(FakeEngine(blocks=(3, 1))))

SECRET = "key-for-schemathesis"
BEARER = {"Authorization": f"Bearer {SECRET}"}
GUARDED = schemathesis.openapi.from_asgi(
    "/openapi.json", make_app(FakeEngine(), keys=read_keys([SECRET])), headers=BEARER
)


@SCHEMA.parametrize()
@settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_the_document_is_kept(case: schemathesis.Case) -> None:
    """All of schemathesis' checks but one: what the document cannot say (a token id within the
    model's vocabulary, a prompt within its context) is refused although it fits the document."""
    response = case.call()
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    assert response.status_code < 500
    if response.status_code >= 400 and case.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@GUARDED.parametrize()
@settings(
    max_examples=2, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_the_document_is_kept_with_keys(case: schemathesis.Case) -> None:
    """Among others: what the document says needs a key is answered with 401 without one."""
    response = case.call(headers=BEARER)
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if response.request.headers.get("Authorization") == BEARER["Authorization"]:
        assert response.status_code != 401
