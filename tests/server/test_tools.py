"""Tools over HTTP: the template is told of them, answers become calls, schemas bind arguments."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import jsonschema
import openai
import pytest
from fastapi import FastAPI

from engine.types import Request
from server.api.app import create_app
from server.api.options import ServerOptions
from tests.server.support import MODEL, FakeEngine, call, ids, make_tokenizer, serving

CHAT = "/v1/chat/completions"
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}",
    "mistral": "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}",
    "llama3": '{% if tools %}{{ tools | tojson }} "parameters": dictionary {% endif %}',
}
_REST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.tool_call_id or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
HELLO = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"place": "Rom", "days": 3}'
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>' % ARGUMENTS,  # noqa: UP031
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]' % ARGUMENTS,  # noqa: UP031
    "llama3": '{"name": "weather", "parameters": %s}' % ARGUMENTS,  # noqa: UP031
}


@functools.cache
def tokenizer_of(family: str) -> Any:
    made = copy.deepcopy(make_tokenizer())
    made.chat_template = TEMPLATES[family] + _REST
    return made


def app_of(engine: FakeEngine, family: str = "hermes", **options: Any) -> FastAPI:
    return create_app(engine, tokenizer_of(family), MODEL, options=ServerOptions(**options))


def says(text: str) -> FakeEngine:
    return FakeEngine(lambda _r, _c: [*ids(text), make_tokenizer().eos_token_id])


def ask(engine: FakeEngine, family: str = "hermes", **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "tools": [WEATHER, OTHER], **fields}
    response = call(app_of(engine, family), "POST", CHAT, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


@pytest.mark.parametrize("family", WRITTEN)
def test_an_answer_becomes_a_call(family: str) -> None:
    engine = says(WRITTEN[family])
    choice = ask(engine, family)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [made] = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert made["type"] == "function"
    assert len(made["id"]) == (9 if family == "mistral" else 29)
    prompt = tokenizer_of(family).decode(engine.requests[0].prompt)
    assert '"name": "weather"' in prompt
    assert engine.requests[0].sampling.grammar is None


def test_text_stays_text_and_none_means_none() -> None:
    plain = ask(says("It is warm."))
    assert plain["finish_reason"] == "stop"
    assert plain["message"]["content"] == "It is warm."
    engine = says(WRITTEN["hermes"])
    none = ask(engine, tool_choice="none")
    assert none["message"]["content"] == WRITTEN["hermes"]
    assert "weather" not in tokenizer_of("hermes").decode(engine.requests[0].prompt)


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, WRITTEN, ["It is warm.", "days", '"weathers"', '"Rom" ']),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            WRITTEN,
            ["text", "other"],
        ),
    ],
)
def test_the_choice_binds_the_answer(
    family: str, fields: dict[str, Any], good: dict[str, str], bad: list[str]
) -> None:
    engine = says("")
    ask(engine, family, **fields)
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None

    def fits(text: str) -> bool:
        tokens = tokenizer_of(family).encode(text, add_special_tokens=False)
        matcher = grammar.start()
        return matcher.advance(tokens) == len(tokens) and matcher.may_end

    assert fits(good[family])
    for text in bad:
        assert not fits(text)
    assert not fits(good[family].replace("3", "0"))
    assert not fits(good[family].replace('"weather"', '"whether"'))
    named = isinstance(fields["tool_choice"], dict)
    assert fits(good[family].replace('"weather"', '"other"').replace(ARGUMENTS, "{}")) != named


def test_the_form_can_be_set() -> None:
    app = app_of(says(WRITTEN["mistral"]), tool_format="mistral")
    body = {"messages": HELLO, "tools": [WEATHER]}
    choice = call(app, "POST", CHAT, json=body).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_several_calls_unless_they_are_unwanted() -> None:
    twice = f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}"
    assert [c["function"]["name"] for c in ask(says(twice))["message"]["tool_calls"]] == [
        "weather", "weather",
    ]  # fmt: skip
    for parallel in (True, False):
        engine = says("")
        ask(engine, tool_choice="required", parallel_tool_calls=parallel)
        grammar = engine.requests[0].sampling.grammar
        assert grammar is not None
        assert (grammar.start().advance(ids(twice)) == len(ids(twice))) == parallel


def test_strict_tools_are_bound_whatever_the_choice() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    engine = says("")
    ask(engine, tools=[strict])
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    for text, fits in (
        ("Just text.", True),
        (WRITTEN["hermes"], True),
        ("Let me see.\n" + WRITTEN["hermes"], True),
        (WRITTEN["hermes"].replace("3", "0"), False),
    ):
        assert (grammar.start().advance(ids(text)) == len(ids(text))) == fits, text


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_schema_binds_the_answer_and_calls_stay_possible(family: str, choice: str) -> None:
    engine = says("")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    ask(engine, family, response_format=form, tool_choice=choice)
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None

    def fits(text: str) -> bool:
        tokens = tokenizer_of(family).encode(text, add_special_tokens=False)
        matcher = grammar.start()
        return matcher.advance(tokens) == len(tokens) and matcher.may_end

    assert fits(ARGUMENTS) == (choice != "required")
    assert fits(WRITTEN[family]) == (choice != "none")
    assert fits(WRITTEN[family].replace("3", "0")) == (choice == "auto")  # that tool is not strict
    assert not fits(ARGUMENTS.replace("3", "0"))
    assert not fits("It is warm.")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "not in tools",
        ),
        ({"tools": [OTHER, OTHER]}, "tools", "same name"),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "web_search"}]}, "tools", "type"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice"),
        (
            {
                "tools": [{**OTHER, "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
        (
            {"tool_choice": "required", "guided_json": {"type": "object"}},
            "guided_json",
            "must be called",
        ),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "content"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused(fields: dict[str, Any], param: str, words: str) -> None:
    body = {"messages": HELLO, "tools": [WEATHER], **fields}
    response = call(app_of(says("")), "POST", CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_an_agent_in_a_loop_with_the_official_client() -> None:
    """Streamed and not: the call, its answer, and the conversation replayed."""

    def script(request: Request, _: int) -> list[int]:
        prompt = tokenizer_of("hermes").decode(request.prompt)
        text = "It is 21 degrees." if "21 C" in prompt else "I look.\n" + WRITTEN["hermes"]
        return [*ids(text), make_tokenizer().eos_token_id]

    engine = FakeEngine(script, blocks=(4,))
    with (
        serving(app_of(engine)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = list(HELLO)
        tools: Any = [WEATHER]
        for streamed in (False, True):
            messages = list(HELLO)
            if streamed:
                with client.chat.completions.stream(
                    model=MODEL, messages=messages, tools=tools
                ) as stream:
                    choice = stream.get_final_completion().choices[0]
            else:
                done = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
                choice = done.choices[0]  # type: ignore[assignment]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look.\n"
            assert choice.message.tool_calls is not None
            [made] = choice.message.tool_calls
            assert made.type == "function"
            jsonschema.validate(json.loads(made.function.arguments), SCHEMA)
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            for one in messages[-1]["tool_calls"]:
                one["function"].pop("parsed_arguments", None)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "21 C"})
            after = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            assert after.choices[0].message.content == "It is 21 degrees."
            assert after.choices[0].finish_reason == "stop"
    prompt = tokenizer_of("hermes").decode(engine.requests[-1].prompt)
    assert '!weather{"days": 3, "place": "Rom"}' in prompt or "!weather" + ARGUMENTS in prompt
