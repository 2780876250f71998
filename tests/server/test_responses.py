"""/v1/responses: every object and event fits the official client's own models, a stream adds up
to the whole, conversations are replayed, and what needs a store is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types import responses as shapes
from pydantic import BaseModel, TypeAdapter

from engine.errors import RequestFailed
from engine.types import Request
from server.api.response_output import Output
from server.text.choice import Delta
from tests.server import test_reasoning as thinking
from tests.server.benches import assert_envelope
from tests.server.support import (
    MODEL,
    TEXT,
    FakeEngine,
    call,
    ids,
    make_app,
    make_tokenizer,
    serving,
    wait_until,
)
from tests.server.test_tools import ARGUMENTS, SCHEMA, WRITTEN, app_of, says, tokenizer_of

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
OTHER = {"type": "function", "name": "other"}
EVENT: TypeAdapter[Any] = TypeAdapter(shapes.ResponseStreamEvent)


def respond(app: Any, **body: Any) -> dict[str, Any]:
    answer = call(app, "POST", PATH, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    shapes.Response.model_validate(found, strict=True)
    return found


def events_of(app: Any, **body: Any) -> list[dict[str, Any]]:
    """A stream's events; each is named as its type is, numbered, and fits the client's model."""
    answer = call(app, "POST", PATH, json={"input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def same(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")}
             for item in response["output"]]  # fmt: skip
    gone = ("id", "created_at", "completed_at", "output")
    return {**{k: v for k, v in response.items() if k not in gone}, "output": items}


def test_text() -> None:
    engine = FakeEngine(blocks=(3, 1))
    found = respond(make_app(engine), instructions="Be brief.", metadata={"a": "b"}, seed=5)
    [item] = found["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (found["status"], found["store"], found["metadata"]) == ("completed", False, {"a": "b"})
    [request] = engine.requests
    assert found["usage"]["input_tokens"] == len(request.prompt)
    assert found["usage"]["output_tokens"] == len(ids(TEXT)) + 1
    assert request.sampling.seed == 5
    prompt = make_tokenizer().decode(request.prompt)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 7},
        {"max_output_tokens": 0},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"stop": ["END"], "temperature": 0},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"reasoning": {"effort": "low"}, "user": "me", "tools": [], "truncation": "disabled"},
    ],
)
def test_a_stream_adds_up(fields: dict[str, Any]) -> None:
    app = make_app(FakeEngine(blocks=(3, 1)))
    whole = respond(app, **fields)
    events = events_of(app, **fields)
    final = events[-1]["response"]
    assert same(final) == same(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert [event["type"] for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[0]["response"]["output"] == []
    [part] = final["output"][0]["content"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert [event["type"] for event in events[-4:-1]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert events[-2]["item"] == final["output"][0]


def test_what_is_cut_off_is_incomplete() -> None:
    found = respond(make_app(FakeEngine()), max_output_tokens=4)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    assert found["usage"]["output_tokens"] == 4


def test_log_probabilities_are_of_the_text() -> None:
    found = respond(make_app(FakeEngine()), top_logprobs=2, max_output_tokens=5)
    entries = found["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 5
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    bare = respond(make_app(FakeEngine()), include=["message.output_text.logprobs"])
    assert len(bare["output"][0]["content"][0]["logprobs"]) == len(ids(TEXT)) + 1
    assert bare["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("blocks", [(1,), (4, 1), (99,)])
def test_an_answer_becomes_a_call(family: str, blocks: tuple[int, ...]) -> None:
    engine = says(WRITTEN[family])
    engine.blocks = blocks
    app = app_of(engine, family)
    body: dict[str, Any] = {"tools": [WEATHER, OTHER]}
    whole = respond(app, **body)
    [item] = whole["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", ARGUMENTS)  # fmt: skip  # noqa: E501
    assert whole["status"] == item["status"] == "completed"
    events = events_of(app, **body)
    assert same(events[-1]["response"]) == same(whole)
    kinds = [event["type"] for event in events]
    assert kinds[2] == "response.output_item.added"
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events[3:-3]) == ARGUMENTS
    assert '"name": "weather"' in tokenizer_of(family).decode(engine.requests[0].prompt)


@pytest.mark.parametrize("blocks", [(1,), (5, 2), (999,)])
def test_items_stand_in_the_order_in_which_they_were_written(blocks: tuple[int, ...]) -> None:
    engine = says(f"I look.\n{WRITTEN['hermes']}\n{WRITTEN['hermes']} Done.")
    engine.blocks = blocks
    app = app_of(engine)
    whole = respond(app, tools=[WEATHER])
    kinds = ["message", "function_call", "function_call", "message"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["output"][0]["content"][0]["text"] == "I look.\n"
    assert whole["output"][3]["content"][0]["text"] == " Done."
    assert same(events_of(app, tools=[WEATHER])[-1]["response"]) == same(whole)


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    app = app_of(says(WRITTEN["hermes"]))
    length = len(ids(WRITTEN["hermes"])) - 30
    found = respond(app, tools=[WEATHER], max_output_tokens=length)
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize(
    ("choice", "fits_weather", "fits_other", "fits_text"),
    [
        ("required", True, True, False),
        ({"type": "function", "name": "weather"}, True, False, False),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "other"}],
            },
            False,
            True,
            False,
        ),
    ],
)
def test_the_choice_binds(
    choice: Any, fits_weather: bool, fits_other: bool, fits_text: bool
) -> None:
    engine = says("")
    found = respond(app_of(engine), tools=[WEATHER, OTHER], tool_choice=choice)
    assert found["tool_choice"] == choice
    assert [tool["name"] for tool in found["tools"]] == ["weather", "other"]
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None

    def fits(text: str) -> bool:
        tokens = ids(text)
        return grammar.start().advance(tokens) == len(tokens)

    assert fits(WRITTEN["hermes"]) == fits_weather
    other = WRITTEN["hermes"].replace("weather", "other").replace(ARGUMENTS, "{}")
    assert fits(other) == fits_other
    assert fits("It is warm.") == fits_text


def test_a_schema_binds_the_text() -> None:
    engine = says("")
    named = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
    assert respond(make_app(engine), text={"format": named})["text"]["format"]["schema"] == SCHEMA
    respond(make_app(engine), text={"format": {"type": "json_object"}})
    for request, good, bad in zip(
        engine.requests, (ARGUMENTS, '{"a": 1}'), ('{"place": 5', "[1"), strict=True
    ):
        grammar = request.sampling.grammar
        assert grammar is not None
        assert grammar.start().advance(ids(good)) == len(ids(good))
        assert grammar.start().advance(ids(bad)) < len(ids(bad))


def test_a_conversation_is_replayed() -> None:
    """What was said and called at once is one message again, as on the chat endpoint."""
    engine = says("ok")
    app = app_of(engine)
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
            ],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "b", "name": "other", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "B"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "A"}],
        },
        {"type": "function_call", "call_id": "c", "name": "other", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "C"},
    ]
    function = {"name": "weather", "parameters": SCHEMA}

    def called(name: str, unique: str, arguments: str = "{}") -> dict[str, Any]:
        made = {"name": name, "arguments": arguments}
        return {"id": unique, "type": "function", "function": made}

    messages = [
        {"role": "system", "content": "Hello."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [called("weather", "a", ARGUMENTS), called("other", "b")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [called("other", "c")]},
        {"role": "tool", "tool_call_id": "c", "content": "C"},
    ]
    respond(app, input=items, instructions="Hello.", tools=[WEATHER])
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    assert call(app, "POST", "/v1/chat/completions", json=chat).status_code == 200
    first, second = engine.requests
    assert tokenizer_of("hermes").decode(first.prompt) == tokenizer_of("hermes").decode(second.prompt)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", "stores no responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "stored"),
        ({"background": True}, "background", "stream"),
        ({"prompt": {"id": "p"}}, "prompt", "stored"),
        ({"truncation": "auto"}, "truncation", "refused"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "one answer"),
        ({"suffix": "x"}, "suffix", "not have"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "'custom'"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [OTHER]}, "tool_choice",
         "'x'"),
        (
            {
                "tools": [OTHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "y"}],
                },
            },
            "tool_choice",
            "'y'",
        ),
        ({"tools": [OTHER], "top_logprobs": 1}, "top_logprobs", "tools"),
        ({"top_logprobs": 99}, "top_logprobs", "99"),
        ({"include": ["file_search_call.results"]}, "include", "logprobs"),
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "list"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "0 conversation"),
        (
            {"input": [{"role": "user", "content": ""}] * 4096, "instructions": "x"},
            "input",
            "4097",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "stored"),
        ({"input": [{"type": "web_search_call"}]}, "input", "'web_search_call'"),
        ({"input": [{"id": "x"}]}, "input", "no string"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "an image"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "5"}]},
            "input",
            "before it",
        ),
        ({"input": "x" * 3000}, "input", "max_output_tokens"),
        ({"max_output_tokens": 4096}, "input", "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens is -1"),
        ({"metadata": {"a": 5}}, "metadata", "string"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"text": {"format": {"type": "xml"}}}, "text", "type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text",
            "not",
        ),
        ({"speculation": {"trace": True}}, "speculation.trace", "not available"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning_effort", "both"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "effort"),
        ({"temperature": 9}, "temperature", "9"),
        ({"model": "nobody"}, "model", "nobody"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    engine = says("")
    response = call(app_of(engine), "POST", PATH, json={"input": "hi", **fields})
    error = assert_envelope(response, 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]
    assert "messages" not in error["message"]
    assert engine.requests == []


def test_unknown_fields_are_named_in_a_header() -> None:
    body = {"input": "hi", "service_tier": "auto", "n": 1, "store": False}
    answer = call(make_app(FakeEngine()), "POST", PATH, json=body)
    assert answer.headers["x-ignored-params"] == "service_tier"


def test_a_stream_that_breaks_off_says_so() -> None:
    engine = FakeEngine()
    engine.fail_after, engine.failure = 2, RequestFailed("broken")
    events = events_of(make_app(engine))
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "broken")


def test_the_same_tokens_in_any_pieces() -> None:
    """Items do not depend on how the text arrives."""

    def output(*pieces: str) -> list[dict[str, Any]]:
        made = Output(None, None)
        for i, piece in enumerate(pieces):
            reason = "stop" if i == len(pieces) - 1 else None
            made.push(
                Delta(text=piece, token_ids=(), logprobs=None, offsets=(), finish_reason=reason)
            )
        return [{**item, "id": ""} for item in made.items]

    assert output("ab", "", "c") == output("abc") == output("a", "bc", "")
    assert output("")[0]["content"][0]["text"] == ""


@pytest.mark.parametrize("blocks", [(1,), (3,), (100,)])
def test_a_thought_is_an_item_of_its_own(blocks: tuple[int, ...]) -> None:
    """It is streamed, kept out of the text's log probabilities, and replayed."""
    engine = thinking.says(thinking.THOUGHT, blocks=blocks)
    app = thinking.app_of(engine)
    whole = respond(app, reasoning={"effort": "low"}, top_logprobs=0)
    thought, message = whole["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Is it <b>?"}]
    [part] = message["content"]
    assert part["text"] == "Yes."
    assert "".join(entry["token"] for entry in part["logprobs"]) == "Yes.<eos>"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    events = events_of(app, reasoning={"effort": "low"}, top_logprobs=0)
    assert same(events[-1]["response"]) == same(whole)
    said = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(said) == "Is it <b>?"
    user = {"role": "user", "content": "And now?"}
    respond(app, input=[user, *whole["output"], user])
    prompt = make_tokenizer().decode(engine.requests[-1].prompt)
    assert "<|im_start|>assistant\n((Is it <b>?))Yes.<|im_end|>" in prompt


# --------------------------------------------------------------------------- the official client


class Weather(BaseModel):
    place: str
    days: int


@pytest.fixture
def engine() -> FakeEngine:
    def script(request: Request, _: int) -> list[int]:
        prompt = tokenizer_of("hermes").decode(request.prompt)
        text = "I look.\n" + WRITTEN["hermes"]
        if "21 C" in prompt:
            text = "It is 21 degrees."
        elif request.sampling.grammar is not None and "weather" not in prompt:
            text = ARGUMENTS
        return [*ids(text), make_tokenizer().eos_token_id]

    return FakeEngine(script, blocks=(4,))


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(app_of(engine)) as url,
        openai.OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as made,
    ):
        yield made


def test_an_agent_in_a_loop_with_the_official_client(
    engine: FakeEngine, client: openai.OpenAI
) -> None:
    """Streamed and not: the call, its answer, and the output replayed as it came."""
    tools: Any = [WEATHER]
    for streamed in (False, True):
        conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
        if streamed:
            with client.responses.stream(model=MODEL, input=conversation, tools=tools) as stream:
                first: Any = stream.get_final_response()
        else:
            first = client.responses.create(model=MODEL, input=conversation, tools=tools)
        assert first.output_text == "I look.\n"
        made = first.output[1]
        assert made.type == "function_call"
        jsonschema.validate(json.loads(made.arguments), SCHEMA)
        conversation += first.output
        conversation.append(
            {"type": "function_call_output", "call_id": made.call_id, "output": "21 C"}
        )
        second = client.responses.create(model=MODEL, input=conversation, tools=tools)
        assert second.output_text == "It is 21 degrees."
    prompt = tokenizer_of("hermes").decode(engine.requests[-1].prompt)
    assert "I look.\n!weather" in prompt


def test_parse_with_the_official_client(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(place="Rom", days=3)
    with client.responses.stream(model=MODEL, input="hi", text_format=Weather) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.completed"
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    flat: Any = [{"type": "function", **tool}]
    called = client.responses.parse(model=MODEL, input="hi", tools=flat)
    assert called.output[1].parsed_arguments == {"place": "Rom", "days": 3}  # type: ignore[union-attr]


def test_errors_become_the_clients_exceptions(engine: FakeEngine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    engine.fail_after, engine.failure = 2, RequestFailed("broken")
    stream = client.responses.create(model=MODEL, input="x", stream=True)
    assert list(stream)[-1].type == "response.failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="x")


def test_who_leaves_stops_the_work(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.delay = 0.01
    with client.responses.create(model=MODEL, input="x", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    wait_until(lambda: not engine.running)
    assert engine.aborts
