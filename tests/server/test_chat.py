"""/v1/chat/completions, whole answers."""

from __future__ import annotations

import inspect
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from server.api.app import create_app
from server.text.codec import RESERVED_VARIABLES
from tests.server.benches import assert_envelope, unharmed
from tests.server.support import MODEL, TEXT, FakeEngine, call, ids, make_app, make_tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def chat(engine: FakeEngine, **body: Any) -> httpx.Response:
    return call(make_app(engine), "POST", "/v1/chat/completions", json={"messages": HELLO, **body})


def test_the_answer_has_openais_shape() -> None:
    engine = FakeEngine()
    body = chat(engine).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    expected = ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert list(engine.requests[0].prompt) == expected
    assert make_tokenizer().convert_tokens_to_ids("<|im_start|>") in expected
    assert engine.requests[0].sampling.max_tokens == 512 - len(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ],
)
def test_two_names_for_the_limit(fields: dict[str, int], expected: int) -> None:
    body = chat(FakeEngine(), **fields).json()
    assert body["usage"]["completion_tokens"] == expected
    assert body["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_bytes() -> None:
    content = chat(FakeEngine("é"), logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    entries = content["content"]
    assert content["refusal"] is None
    assert bytes(b for entry in entries[:-1] for b in entry["bytes"]).decode() == "é"
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert set(entries[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


def test_content_parts_and_the_developer_role() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be nice"}, {"role": "user", "content": parts}]
    assert chat(engine, messages=messages).status_code == 200
    assert list(engine.requests[0].prompt) == ids(
        "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_last_message_can_be_continued() -> None:
    engine = FakeEngine()
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert chat(engine, messages=messages, continue_final_message=True).status_code == 200
    assert list(engine.requests[0].prompt) == ids(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"
    )


@pytest.mark.bad_input(42)
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.system('touch /hacked') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ undefined.attribute }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_hostile_template_of_the_models_own_is_refused(template: str) -> None:
    hostile = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        eos_token="<eos>",
        chat_template=template,
    )
    app = create_app(FakeEngine(), hostile, MODEL)
    with unharmed(app):
        response = call(app, "POST", "/v1/chat/completions", json={"messages": HELLO})
        assert "template" in assert_envelope(response, 400)["message"]


def test_a_base_model_has_no_chat() -> None:
    base = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<eos>"
    )
    app = create_app(FakeEngine(), base, MODEL)
    response = call(app, "POST", "/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


@pytest.mark.bad_input(44)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "5", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}
                        ],
                    }
                ]
            },
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"chat_template": "{% for _ in range(10**9) %}{% endfor %}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"echo": True}, "echo"),
        ({"n": 129}, "n"),
    ],
)
def test_bad_requests_name_the_field(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    with unharmed(app):
        before = len(engine.requests)
        body = {"messages": HELLO, **fields}
        error = assert_envelope(call(app, "POST", "/v1/chat/completions", json=body), 400)
        assert error["param"] == param
        assert len(engine.requests) == before


@pytest.mark.parametrize(
    ("message", "where", "reason"),
    [
        (
            {"role": "wizard", "content": "x"},
            "messages.0.role",
            "the role is 'wizard', but it must be one of developer, system, user, assistant "
            "and tool.",
        ),
        (
            {"role": "tool", "content": "x"},
            "messages.0",
            "a message of a tool needs tool_call_id, the call that it answers.",
        ),
        ({"role": 5, "content": "x"}, "messages.0.role", "the role is no string, but it must be "),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "messages.0.content",
            "part 1 is an image (type image_url), but this server reads text only.",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages.0.content",
            "part 0 is audio (type input_audio), but this server reads text only.",
        ),
        (
            {"role": "user", "content": [{"type": ["image_url"]}]},
            "messages.0.content",
            'part 0 must be such as {"type": "text", "text": "..."}.',
        ),
        ({"role": "user", "content": []}, "messages.0.content", "send a string, or a non-empty "),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}] * 1025},
            "messages.0.content",
            "it has 1025 parts; at most 1024 are allowed.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    message: dict[str, Any], where: str, reason: str
) -> None:
    error = assert_envelope(chat(FakeEngine(), messages=[message]), 400)
    assert error["param"] == "messages"
    assert error["message"].startswith(f"{where}: {reason}")
    assert error["message"].count(". ") == 0


def test_a_prediction_is_text_as_well() -> None:
    prediction = {"type": "content", "content": [{"type": "image_url", "image_url": {}}]}
    error = assert_envelope(chat(FakeEngine(), prediction=prediction), 400)
    assert error["message"] == (
        "prediction.content: part 0 is an image (type image_url), but this server reads text only."
    )


# ------------------------------------------------------------- variables of the template

THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "[{{ enable_thinking }} {{ reasoning_effort }} {{ tags | tojson }}]"
)


def rendered(**body: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        eos_token="<eos>",
        chat_template=THINKING,
    )
    app = create_app(engine := FakeEngine(), tokenizer, MODEL)
    body = {"messages": HELLO, **body}
    response = call(app, "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    counted = call(app, "POST", "/tokenize", json=body).json()["tokens"]
    assert counted == list(engine.requests[0].prompt)
    text: str = tokenizer.decode(counted)
    return text


def test_variables_reach_the_template() -> None:
    kwargs = {"enable_thinking": False, "tags": ["é", {"a": None}]}
    assert rendered(chat_template_kwargs=kwargs) == 'hi[False  ["é", {"a": null}]]'
    assert rendered(reasoning_effort="high", chat_template_kwargs={"tags": 1}) == "hi[ high 1]"
    assert rendered(reasoning_effort="none", chat_template_kwargs={"tags": 1}) == (
        "hi[False none 1]"
    )


def test_no_variable_overrides_what_is_not_the_callers() -> None:
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    taken = set(parameters) - {"kwargs"}
    assert taken <= RESERVED_VARIABLES
    assert set(PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES) <= RESERVED_VARIABLES
    for name in RESERVED_VARIABLES:
        error = assert_envelope(chat(FakeEngine(), chat_template_kwargs={name: []}), 400)
        assert error["param"] == "chat_template_kwargs"
        assert name in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            "reasoning_effort",
        ),
    ],
)
def test_bad_variables_name_the_field(fields: dict[str, Any], param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": HELLO, **fields}
        response = call(make_app(FakeEngine()), "POST", path, json=body)
        assert assert_envelope(response, 400)["param"] == param


def test_chats_have_a_default_limit_if_the_server_sets_one() -> None:
    for default, given, limit in ((7, {}, 7), (7, {"max_tokens": 9}, 9), (500, {}, None)):
        engine = FakeEngine()
        app = make_app(engine, default_chat_max_tokens=default)
        body = {"messages": HELLO, **given}
        assert call(app, "POST", "/v1/chat/completions", json=body).status_code == 200
        room = 512 - len(engine.requests[0].prompt)
        assert engine.requests[0].sampling.max_tokens == (limit or room)
    long = {"messages": [{"role": "user", "content": "x" * 2000}]}
    app = make_app(FakeEngine(), default_chat_max_tokens=7)
    error = assert_envelope(call(app, "POST", "/v1/chat/completions", json=long), 400)
    assert error["param"] == "messages"


def test_neutral_values_of_what_is_missing_are_accepted() -> None:
    response = chat(
        FakeEngine(),
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        chat_template_kwargs={},
        modalities=["text"],
        metadata={"a": "b"},
    )
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "metadata"


def test_token_ids_are_returned_on_request() -> None:
    engine = FakeEngine("ab")
    body = chat(engine, return_token_ids=True, prompt_logprobs=0).json()
    assert body["choices"][0]["token_ids"] == [*ids("ab"), make_tokenizer().eos_token_id]
    assert body["prompt_token_ids"] == list(engine.requests[0].prompt)
    assert body["prompt_logprobs"][0] is None
