"""The official library: forms, and agents of several turns, by both endpoints."""

from __future__ import annotations

import json
from typing import Any

from tools.clients.shared import FEW, QUESTION, SYSTEM, Server, Verdict, Weather, case


def _client(server: Server) -> Any:
    import openai

    return openai.OpenAI(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )


@case("openai", "chat: `parse` with a pydantic model")
def chat_parse(server: Server) -> None:
    """Whole and streamed."""
    asked: Any = {
        "model": server.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "response_format": Weather,
    }
    with _client(server) as client:
        answer = client.chat.completions.parse(**asked)
        assert isinstance(answer.choices[0].message.parsed, Weather)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        assert isinstance(streamed.choices[0].message.parsed, Weather)


@case("openai", "chat: three turns with tools")
def chat_loop(server: Server) -> None:
    """A named call, a required one, and words; the conversation is replayed each time."""
    import openai

    tools = [
        openai.pydantic_function_tool(Weather, name="weather"),
        openai.pydantic_function_tool(Verdict, name="verdict"),
    ]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    turns: list[Any] = [{"type": "function", "function": {"name": "weather"}}, "required", "none"]
    with _client(server) as client:
        for turn in turns:
            answer = client.chat.completions.parse(
                model=server.model,
                messages=messages,
                tools=tools,
                tool_choice=turn,
                parallel_tool_calls=False,
                **({"max_completion_tokens": 200} if turn != "none" else {}),
                **({"stop": [" "]} if turn == "none" else {}),
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or []:
                assert isinstance(call.function.parsed_arguments, Weather | Verdict)
                content = json.dumps({"done": True})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            assert bool(message.tool_calls) == (turn != "none")


@case("openai", "responses: `parse` with a pydantic model")
def responses_parse(server: Server) -> None:
    """Whole and streamed."""
    asked: Any = {"model": server.model, "input": QUESTION, "text_format": Weather}
    with _client(server) as client:
        assert isinstance(client.responses.parse(**asked).output_parsed, Weather)
        with client.responses.stream(**asked) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Weather)


@case("openai", "responses: three turns with tools")
def responses_loop(server: Server) -> None:
    """As by the other endpoint; the output is sent back as it came."""
    import openai

    tools: list[Any] = [
        {"type": "function", **openai.pydantic_function_tool(shape, name=name)["function"]}
        for shape, name in ((Weather, "weather"), (Verdict, "verdict"))
    ]
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    turns: list[Any] = [{"type": "function", "name": "weather"}, "required", "none"]
    with _client(server) as client:
        for turn in turns:
            answer = client.responses.parse(
                model=server.model,
                instructions=SYSTEM,
                input=conversation,
                tools=tools,
                tool_choice=turn,
                parallel_tool_calls=False,
                max_output_tokens=200 if turn != "none" else FEW,
            )
            conversation += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            for call in calls:
                assert call.parsed_arguments
                output = json.dumps({"done": True})
                conversation.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": output}
                )
            assert bool(calls) == (turn != "none")


@case("openai", "responses: a stream of words")
def responses_stream(server: Server) -> None:
    """Its events, and the response at its end."""
    with _client(server) as client:
        events = list(
            client.responses.create(
                model=server.model, input=QUESTION, max_output_tokens=FEW, stream=True
            )
        )
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert said == events[-1].response.output_text != ""
