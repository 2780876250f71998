"""Structured outputs over HTTP: what reaches the engine, what is refused, and how soon."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fastapi import FastAPI

from engine.types import Request
from tests.server.support import FakeEngine, call, complete, ids, make_app, make_info, serving

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def spell(text: str) -> Any:
    """A script that says a text if the request's grammar allows it, else nothing."""

    def script(request: Request, _: int) -> list[int]:
        grammar = request.sampling.grammar
        assert grammar is not None
        matcher, tokens = grammar.start(), ids(text)
        fits = matcher.advance(tokens) == len(tokens) and matcher.may_end
        return [*tokens, *grammar.end_tokens] if fits else list(grammar.end_tokens)

    return script


@pytest.mark.parametrize(
    ("fields", "text", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
            '{"name": "x", "age": 5}',
            '{"name": "x"}',
        ),
        ({"structured_outputs": {"json": PERSON}}, '{"name": "", "age": -1}', '{"age": 5}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "a+b"}}, "aab", "aabb"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "n"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy", "x"),
        ({"guided_json": json.dumps(PERSON)}, '{"name": "y", "age": 0}', "{}"),
        ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
        ({"guided_choice": ["one", "two"]}, "one", "three"),
        ({"guided_grammar": 'root ::= "q" | "r"'}, "r", "qr"),
    ],
)
def test_every_form_reaches_the_engine(fields: dict[str, Any], text: str, other: str) -> None:
    for script, expected in ((text, text), (other, "")):
        app = make_app(FakeEngine(spell(script)))
        done = complete(app, max_tokens=60, **fields)
        assert done.status_code == 200, done.text
        assert done.json()["choices"][0]["text"] == expected
        chat = call(app, "POST", CHAT, json={"messages": HELLO, **fields})
        assert chat.json()["choices"][0]["message"]["content"] == expected


def test_text_asks_for_nothing() -> None:
    engine = FakeEngine()
    assert complete(make_app(engine), response_format={"type": "text"}).status_code == 200
    assert engine.requests[0].sampling.grammar is None


def refusal(fields: dict[str, Any], app: FastAPI | None = None) -> str:
    response = complete(app or make_app(FakeEngine()), **fields)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_a_schema_that_does_not_compile_is_refused_with_the_place() -> None:
    inner = {"properties": {"b": {"items": {"anyOf": [{"type": "string"}, {"type": "strin"}]}}}}
    message = refusal({"guided_json": {"properties": {"a": {"type": "integer"}, "c": inner}}})
    assert "guided_json.properties.c.properties.b.items.anyOf.1 cannot be compiled" in message
    assert "Invalid type: strin" in message
    named = refusal({"guided_json": {"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}})
    assert "guided_json.$defs.x" in named
    assert "not" in named


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
)
def test_two_descriptions_are_refused(fields: dict[str, Any]) -> None:
    assert "send one of them" in refusal(fields)


def test_a_model_without_an_end_takes_no_grammar() -> None:
    app = make_app(FakeEngine(info=make_info(eos_token_ids=frozenset())))
    assert "no end token" in refusal({"guided_regex": "a"}, app)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(links: int) -> dict[str, Any]:
    links_ = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**links_, f"d{links}": {"type": "string"}}}


def hard(n: int) -> dict[str, Any]:
    """Some 2**n states by itself, and worse with others."""
    return {"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"}


def twice(reference: str) -> dict[str, Any]:
    """Each of sixty in a row doubles what a careless reader looks at."""
    return {"allOf": [{"$ref": reference}] * 2}


#: Descriptions that have brought servers down, and whether they are refused.
NASTY: dict[str, tuple[dict[str, Any], bool]] = {
    "deep": ({"guided_json": deep(90)}, True),
    "long chain of references": ({"guided_json": chain(3000)}, True),
    "circle of references": (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        True,
    ),
    "many choices": ({"guided_choice": [f"choice number {i}" for i in range(900)]}, False),
    "huge": ({"guided_json": {"enum": ["x" * 100_000, "y" * 200_000]}}, True),
    "huge list": ({"guided_json": {"enum": [f"value {i}" for i in range(9000)]}}, False),
    "nested brackets": ({"guided_grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, True),
    "many rules": (
        {"guided_grammar": "".join(f"r{i}: r{i + 1} \"x\"\n" for i in range(5000)) + 'r5000: "a"'},
        True,
    ),
    "nested groups": ({"guided_regex": "(" * 3000 + "a" + ")" * 3000}, True),
    "catastrophe": ({"guided_regex": "(a+)+$"}, False),
    "exponential states": ({"guided_regex": "(a|b)*a(a|b){40}"}, False),
    "nested repeats": ({"guided_regex": "(((a{1,90}){1,90}){1,90}){1,90}"}, False),
    "unsatisfiable": ({"guided_json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, True),
    "all at once": ({"guided_json": {"allOf": [hard(n) for n in range(20)]}}, True),
    "all at once, by reference": (
        {
            "guided_json": {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{n}": {**hard(n), "$ref": f"#/$defs/d{n + 1}"} for n in range(20)
                } | {"d20": {"type": "string"}},
            }
        },
        True,
    ),
    "all at once, in Lark": (
        {"guided_grammar": "start: X\nX: " + " & ".join(f"/a{n}|b*/" for n in range(20))},
        True,
    ),
    "doubling": (
        {
            "guided_json": {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": twice(f"#/$defs/d{i + 1}") for i in range(60)} | {"d60": {}},
            }
        },
        False,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NASTY)
def test_nasty_descriptions_are_answered_while_others_stream(name: str) -> None:
    """The stream is longer than any answer may wait; it is still going on when that is there."""
    fields, refused = NASTY[name]
    app = make_app(FakeEngine(lambda _r, _c: ids("x") * 400, delay=0.001))

    async def run() -> tuple[httpx.Response, bool]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            other = {"prompt": "x", "stream": True, "max_tokens": 400}
            stream = asyncio.create_task(client.post("/v1/completions", json=other, timeout=60))
            nasty = {"prompt": "x", "max_tokens": 1, **fields}
            answer = await client.post("/v1/completions", json=nasty, timeout=60)
            assert (await stream).text.endswith("data: [DONE]\n\n")
            after = {"prompt": "x", "max_tokens": 1, "guided_regex": "b"}
            healthy = await client.post("/v1/completions", json=after, timeout=60)
            return answer, healthy.status_code == 200

    answer, healthy = asyncio.run(run())
    assert answer.status_code == (400 if refused else 200), answer.text
    assert not refused or len(answer.json()["error"]["message"]) < 1000
    assert healthy


# -- the official client -----------------------------------------------------------------------


class Person(pydantic.BaseModel):
    """What the client makes a strict schema of."""

    name: str
    age: int
    friends: list[str]


def test_the_official_client_parses() -> None:
    text = '{"name": "Ada", "age": 36, "friends": ["Charles"]}'
    with (
        serving(make_app(FakeEngine(spell(text), blocks=(3,)))) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.parse(
            model="tests/fake-model",
            messages=[{"role": "user", "content": "who?"}],
            response_format=Person,
        )
        assert answer.choices[0].message.parsed == Person(name="Ada", age=36, friends=["Charles"])
        with client.chat.completions.stream(
            model="tests/fake-model",
            messages=[{"role": "user", "content": "who?"}],
            response_format=Person,
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == answer.choices[0].message.parsed
