"""The OpenAPI document is as strict as the server, and no stricter."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

from tests.server.bad_rows import BAD_FIELDS, VOCABULARY
from tests.server.found_rows import CHAT, COMPLETIONS, DETOKENIZE, FOUND, GOOD, RESPONSES, TOKENIZE
from tests.server.support import FakeEngine, call, make_app

ROWS = [(COMPLETIONS, fields) for _, fields, _ in BAD_FIELDS] + [(p, f) for p, f, _ in FOUND]

#: What JSON Schema cannot say: rules between fields, the length of a text in tokens, which
#: drafters are loaded, a number whose spelling counts, and the last digits of 2**63.
UNSAYABLE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x" * 3000}),
    (COMPLETIONS, {"prompt": [5] * 513}),
    (COMPLETIONS, {"prompt": ["ok", "x" * 3000]}),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}),
    (COMPLETIONS, {"max_tokens": 16.0}),
    (COMPLETIONS, {"max_tokens": -0.0}),
    (COMPLETIONS, {"n": 1.0}),
    (COMPLETIONS, {"logprobs": 1.0}),
    (COMPLETIONS, {"stop_token_ids": [1.0], "min_tokens": 1}),
    (COMPLETIONS, {"allowed_token_ids": [1.0]}),
    (DETOKENIZE, {"tokens": [5.0]}),
    (COMPLETIONS, {"best_of": 2, "n": 3}),
    (COMPLETIONS, {"best_of": 2, "stream": True}),
    (COMPLETIONS, {"min_tokens": 17}),
    (COMPLETIONS, {"min_tokens": 1, "max_tokens": 0}),
    (COMPLETIONS, {"seed": 2**63}),
    (COMPLETIONS, {"seed": 2.0**63}),
    (COMPLETIONS, {"logit_bias": {str(VOCABULARY): 1}}),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"stream_options": {}}),
    (COMPLETIONS, {"truncate_prompt_tokens": 513}),
    (COMPLETIONS, {"suffix": "x"}),
    (COMPLETIONS, {"structured_outputs": {"regex": "[.*"}}),
    (
        COMPLETIONS,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    ),
    (COMPLETIONS, {"guided_json": "{"}),
    (COMPLETIONS, {"guided_json": "5"}),
    (COMPLETIONS, {"guided_regex": "[.*"}),
    (COMPLETIONS, {"guided_grammar": "start: nowhere"}),
    (COMPLETIONS, {"guided_json": {"$ref": "#/x"}}),
    (COMPLETIONS, {"guided_json": {"$ref": "http://169.254.169.254/x"}}),
    (COMPLETIONS, {"guided_json": {"$ref": "#"}}),
    (COMPLETIONS, {"guided_json": {"minLength": 5, "maxLength": 3, "type": "string"}}),
    (COMPLETIONS, {"speculation": {"drafter": "../x"}}),
    (COMPLETIONS, {"speculation": {"drafter": "eagle"}}),
    (COMPLETIONS, {"speculation": {"drafter": ""}}),
    (COMPLETIONS, {"speculation": {"drafter": "x" * 10**5}}),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}),
    (CHAT, {"top_logprobs": 1}),
    (CHAT, {"top_logprobs": 1, "logprobs": False}),
    # Python's own `$`, unlike JSON Schema's, lets a line end follow.
    (COMPLETIONS, {"request_id": "x\n"}),
]


@functools.cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = call(make_app(FakeEngine()), "GET", "/openapi.json").json()
    return found


@functools.cache
def validator(path: str) -> jsonschema.Draft202012Validator:
    content = document()["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document()["components"]})


def test_what_the_server_refuses_the_document_refuses() -> None:
    """All bad requests that are known, but for those that no schema can tell."""
    allowed = [(p, f) for p, f in ROWS if validator(p).is_valid({**GOOD[p], **f})]

    def key(row: object) -> str:
        return json.dumps(row)

    assert sorted(allowed, key=key) == sorted(UNSAYABLE, key=key)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {}),
        (TOKENIZE, {"prompt": None, "messages": None}),
        (TOKENIZE, {"prompt": "x", "content": "x"}),
        (TOKENIZE, {"messages": []}),
        (TOKENIZE, {**GOOD[CHAT], "chat_template_kwargs": {"tools": []}}),
        (TOKENIZE, {"prompt": "x", "chat_template_kwargs": {"unk_token": 1}}),
        (DETOKENIZE, {}),
        (DETOKENIZE, {"tokens": [VOCABULARY]}),
        (DETOKENIZE, {"tokens": [-1]}),
        (COMPLETIONS, {"prompt": [VOCABULARY]}),
        (COMPLETIONS, {"prompt": [[5], [-1]]}),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [VOCABULARY]}),
        (CHAT, {**GOOD[CHAT], "chat_template_kwargs": {"messages": []}}),
        (CHAT, {**GOOD[CHAT], "echo": True}),
        (RESPONSES, {}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (RESPONSES, {"input": "x", "store": True}),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
        (RESPONSES, {"input": "x", "truncation": "auto"}),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "file_search"}}),
        (RESPONSES, {"input": "x", "metadata": {"a": 5}}),
        (RESPONSES, {"input": "x", "max_tokens": 5}),
        (RESPONSES, {"input": "x", "include": ["file_search_call.results"]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]}),
    ],
)
def test_both_refuse(path: str, body: dict[str, Any]) -> None:
    assert not validator(path).is_valid(body)
    assert call(make_app(FakeEngine()), "POST", path, json=body).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *GOOD.items(),
        (TOKENIZE, {"prompt": None, "content": ""}),
        (TOKENIZE, {**GOOD[CHAT], "prompt": None, "chat_template_kwargs": {"a": [1]}}),
        (DETOKENIZE, {"tokens": []}),
        (DETOKENIZE, {"tokens": [VOCABULARY - 1, 0]}),
        (COMPLETIONS, {"prompt": [VOCABULARY - 1], "stop": [], "logit_bias": {"5": -100}}),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [0], "stop_token_ids": []}),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": -1, "tools": []}),
        (CHAT, {**GOOD[CHAT], "unheard_of": 1, "reasoning_effort": "low", "tool_choice": "auto"}),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}], "store": False, "n": 1}),
        (RESPONSES, {"input": [{"type": "message", "role": "assistant", "content": []}]}),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "text"}, "verbosity": "low"}}),
        (RESPONSES, {"input": "x", "include": ["reasoning.encrypted_content"], "tools": []}),
    ],
)
def test_both_accept(path: str, body: dict[str, Any]) -> None:
    assert validator(path).is_valid(body)
    assert call(make_app(FakeEngine()), "POST", path, json=body).status_code == 200


@pytest.mark.parametrize("path", GOOD)
def test_null_is_the_default_in_both(path: str) -> None:
    ref = validator(path).schema["$ref"].rpartition("/")[2]
    fields = document()["components"]["schemas"][ref]["properties"]
    body = {**dict.fromkeys(fields), **GOOD[path]}
    assert validator(path).is_valid(body)
    assert call(make_app(FakeEngine()), "POST", path, json=body).status_code == 200


def test_the_largest_token_id_is_told_once_the_model_is_known() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.state = "loading"

    def largest() -> int:
        answer = call(app, "GET", "/openapi.json").json()
        tokens = answer["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
        found: int = tokens["items"]["maximum"]
        return found

    assert largest() == 2**31 - 1
    engine.state = "ready"
    assert largest() == largest() == VOCABULARY - 1
