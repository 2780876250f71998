"""Thoughts over HTTP: told apart, streamed, counted, limited, replayed, before bound answers."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from engine.types import Request
from server.api.app import create_app
from server.api.options import ServerOptions
from tests.server.support import MODEL, FakeEngine, call, ids, make_app, make_tokenizer, serving

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi, what is a <think> tag?"}]
_REST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}(({{ m.reasoning_content }})){% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
#: How the templates begin the model's turn: as Qwen3's do, and as DeepSeek-R1's.
TEMPLATES = {
    "free": _REST + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "opened": _REST + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "tools": "{{ tools | tojson if tools }}<tool_call>" + _REST
    + "{% if add_generation_prompt %}<think>{% endif %}",
}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@functools.cache
def tokenizer_of(family: str) -> Any:
    made = copy.deepcopy(make_tokenizer())
    made.chat_template = TEMPLATES[family]
    return made


def app_of(engine: FakeEngine, family: str = "free", **options: Any) -> FastAPI:
    return create_app(engine, tokenizer_of(family), MODEL, options=ServerOptions(**options))


def says(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(lambda _r, _c: [*ids(text), make_tokenizer().eos_token_id], **options)


def ask(app: FastAPI, **fields: Any) -> dict[str, Any]:
    response = call(app, "POST", CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(app: FastAPI, **fields: Any) -> list[dict[str, Any]]:
    response = call(app, "POST", CHAT, json={"messages": HELLO, "stream": True, **fields})
    lines = response.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], name: str, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get(name) or "" for c in choices if c["index"] == index)


THOUGHT = "<think>\nIs it <b>?\n</think>\n\nYes."


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize(
    ("family", "text"), [("free", THOUGHT), ("opened", THOUGHT.removeprefix("<think>\n"))]
)
def test_thoughts_are_told_from_answers(family: str, text: str, block: int) -> None:
    count = len(ids(THOUGHT)) - len(ids("<think>")) - len(ids("</think>\n\nYes."))
    if family == "opened":
        count -= 1
    app = app_of(says(text, blocks=(block,)), family)
    body = ask(app)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Is it <b>?"
    assert message["content"] == "Yes."
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == count
    assert body["usage"]["completion_tokens"] == len(ids(text)) + 1
    chunks = stream(app, stream_options={"include_usage": True}, logprobs=True, n=2)
    for index in (0, 1):
        assert joined(chunks, "reasoning_content", index) == "Is it <b>?"
        assert joined(chunks, "reasoning", index) == "Is it <b>?"
        assert joined(chunks, "content", index) == "Yes."
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * count
    spoken = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == 0 and choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert "".join(spoken).startswith(text)


def test_what_no_thought_precedes_is_the_answer() -> None:
    plain = ask(app_of(says("Just so.")))["choices"][0]["message"]
    assert (plain["content"], plain["reasoning_content"]) == ("Just so.", None)
    closed = app_of(says("Sure, </think> is one."))
    off = ask(closed, chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert (off["content"], off["reasoning_content"]) == ("Sure, </think> is one.", None)
    effort = ask(closed, reasoning_effort="none")["choices"][0]["message"]
    assert effort == off
    cut = ask(app_of(says("hm, hm"), "opened"), max_tokens=3)["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
    assert cut["message"]["reasoning_content"] == make_tokenizer().decode(ids("hm, hm")[:3])


def test_who_looks_for_thoughts_can_be_set() -> None:
    raw = ask(app_of(says(THOUGHT), reasoning_parser="none"))["choices"][0]["message"]
    assert raw["content"] == THOUGHT
    assert "reasoning_content" not in raw
    other = "[THINK]a[/THINK]b"
    named = ask(app_of(says(other), reasoning_parser="mistral"))["choices"][0]["message"]
    assert (named["reasoning_content"], named["content"]) == ("a", "b")
    without = ask(make_app(says(THOUGHT)))["choices"][0]["message"]
    assert without == {"role": "assistant", "content": THOUGHT, "refusal": None}


def test_an_earlier_thought_reaches_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        engine = says("ok")
        past = {"role": "assistant", "content": "a", name: "so I thought"}
        ask(app_of(engine), messages=[*HELLO, past, *HELLO])
        prompt = tokenizer_of("free").decode(engine.requests[0].prompt)
        assert "((so I thought))a" in prompt
    ask(app_of(says("ok")), messages=[*HELLO, {"role": "assistant", "reasoning_content": "x"}])


def test_a_begun_answer_goes_on_where_it_is() -> None:
    for begun, thought, content in (
        ("<think>\nI", "b", "c"),
        ("<think>I</think> so", None, "b</think>c"),
        ("Well", None, "b</think>c"),
    ):
        body = ask(
            app_of(says("b</think>c"), "opened"),
            messages=[*HELLO, {"role": "assistant", "content": begun}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, content), begun


def test_calls_are_looked_for_after_the_thought_alone() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    app = app_of(says(f"I may {CALL}.</think>{CALL}"), "tools")
    choice = ask(app, tools=tools)["choices"][0]
    assert choice["message"]["reasoning_content"] == f"I may {CALL}."
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"
    chunks = stream(app, tools=tools)
    assert joined(chunks, "reasoning_content") == f"I may {CALL}."
    assert joined(chunks, "content") == ""
    calls = [c for k in chunks for choice in k["choices"] for c in choice["delta"].get("tool_calls", ())]  # fmt: skip  # noqa: E501
    assert [call["function"]["name"] for call in calls if "id" in call] == ["f"]


def obedient(text: str) -> Any:
    """A script that says a text as far as the request's grammar lets it, and what it forces."""

    def script(request: Request, _: int) -> list[int]:
        grammar = request.sampling.grammar
        assert grammar is not None
        matcher, said = grammar.start(), list[int]()
        for token in ids(text):
            while forced := matcher.forced():
                said += forced[: matcher.advance(forced)]
            if matcher.advance([token]):
                said.append(token)
        assert matcher.may_end
        return [*said, make_tokenizer().eos_token_id]

    return script


@pytest.mark.parametrize("family", ["free", "opened"])
def test_a_grammar_binds_the_answer_and_not_the_thought(family: str) -> None:
    opening = "<think>" if family == "free" else ""
    app = app_of(FakeEngine(obedient(opening + 'any {"a": 1} text</think>\n{"b": 2}')), family)
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"guided_json": {"properties": {"b": {"const": 2}}, "additionalProperties": False}},
    ):
        message = ask(app, **fields)["choices"][0]["message"]
        assert message["reasoning_content"] == 'any {"a": 1} text'
        assert message["content"] == '{"b": 2}'
    unthinking = app_of(FakeEngine(obedient('{"b": 2}')), "free")
    message = ask(unthinking, response_format={"type": "json_object"})["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"b": 2}', None)


@pytest.mark.parametrize("name", ["max_reasoning_tokens", "thinking_token_budget"])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_budget_closes_the_thought(name: str, most: int) -> None:
    for family, opening in (("free", "<think>"), ("opened", "")):
        app = app_of(FakeEngine(obedient(opening + "abcdefgh 12345")), family)
        body = ask(app, **{name: most})
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == ("abcdefgh"[:most] or None)
        assert message["content"] == "abcdefgh 12345"[most:]
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == most
    engine = says(THOUGHT)
    ask(app_of(engine), max_reasoning_tokens=5, ignore_eos=True)
    sampling = engine.requests[0].sampling
    assert sampling.grammar is not None
    assert not sampling.ends_at_eos  # a thought's end is none of the text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", "from 0 to 2147483647"),
        ({"max_reasoning_tokens": 1.5}, "max_reasoning_tokens", "integer"),
        ({"max_reasoning_tokens": "5"}, "max_reasoning_tokens", "integer"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget", "from 0 to 2147483647"),
        (
            {"thinking_token_budget": 3, "max_reasoning_tokens": 3},
            "thinking_token_budget",
            "not both",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
            "messages",
            "only messages of the assistant have reasoning",
        ),
        ({"messages": [{"role": "assistant", "reasoning_content": 5}]}, "messages", "string"),
    ],
)
def test_bad_wishes_are_refused(fields: dict[str, Any], param: str, words: str) -> None:
    response = call(app_of(says("x")), "POST", CHAT, json={"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert words in error["message"]


def test_a_budget_needs_a_model_that_thinks() -> None:
    for path, prompt in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
        body = {**prompt, "max_reasoning_tokens": 7}
        response = call(make_app(says("x")), "POST", path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_reasoning_tokens"


def test_the_official_client_sees_the_thought() -> None:
    engine = says(THOUGHT, blocks=(2,))
    with (
        serving(app_of(engine)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages: Any = HELLO
        done = client.chat.completions.create(
            model=MODEL, messages=messages, extra_body={"max_reasoning_tokens": 50}
        )
        message = done.choices[0].message
        assert message.content == "Yes."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "Is it <b>?"
        assert done.usage is not None
        assert done.usage.completion_tokens_details is not None
        assert (done.usage.completion_tokens_details.reasoning_tokens or 0) > 5
        again = [*messages, message.model_dump(exclude_none=True), *messages]
        with client.chat.completions.stream(model=MODEL, messages=again) as events:
            final = events.get_final_completion().choices[0].message
        assert final.content == "Yes."
        assert final.model_extra is not None
        assert final.model_extra["reasoning_content"] == "Is it <b>?"
