"""litellm, instructor and pydantic-ai."""

from __future__ import annotations

import json
from typing import Any

from tools.clients.shared import FEW, QUESTION, SYSTEM, Server, Weather, case

_FUNCTION = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
}


def _litellm(server: Server) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.url,
        "api_key": "none",
        "num_retries": 0,
    }


@case("litellm", "completion: a form, a call, its answer, a stream")
def litellm_chat(server: Server) -> None:
    import litellm

    asked = _litellm(server)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    form = litellm.completion(**asked, messages=messages, response_format=Weather)
    Weather.model_validate_json(form.choices[0].message.content)
    tools = [{"type": "function", "function": _FUNCTION}]
    called = litellm.completion(
        **asked, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    message = called.choices[0].message
    Weather.model_validate_json(message.tool_calls[0].function.arguments)
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"},
    ]
    words = litellm.completion(
        **asked, messages=messages, tools=tools, tool_choice="none", max_tokens=FEW
    )
    assert words.choices[0].message.content is not None
    stream = litellm.completion(**asked, messages=messages, max_tokens=FEW, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@case("litellm", "responses: a form, a call, a stream")
def litellm_responses(server: Server) -> None:
    import litellm

    asked = _litellm(server)
    form = litellm.responses(**asked, input=QUESTION, text_format=Weather)
    said = next(item for item in form.output if item.type == "message")
    Weather.model_validate_json(said.content[0].text)
    tools: Any = [{"type": "function", **_FUNCTION}]
    called = litellm.responses(**asked, input=QUESTION, tools=tools, tool_choice="required")
    call = next(item for item in called.output if item.type == "function_call")
    Weather.model_validate_json(call.arguments)
    stream = litellm.responses(**asked, input=QUESTION, max_output_tokens=FEW, stream=True)
    kinds = [str(getattr(event.type, "value", event.type)) for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


@case("instructor", "modes TOOLS, TOOLS_STRICT, JSON, JSON_SCHEMA, PARALLEL_TOOLS")
def instructor_modes(server: Server) -> None:
    from collections.abc import Iterable

    import instructor
    import openai

    for name in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "PARALLEL_TOOLS"):
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=getattr(instructor.Mode, name))
            shape: Any = Iterable[Weather] if name == "PARALLEL_TOOLS" else Weather
            more: dict[str, Any] = {}
            if name == "JSON":  # this mode only asks for some JSON object
                more = {
                    "extra_body": {"response_format": None, "guided_json": _FUNCTION["parameters"]}
                }
            if name == "PARALLEL_TOOLS":
                more = {"extra_body": {"tool_choice": "required"}}  # it says auto by itself
            found = client.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": QUESTION}],
                response_model=shape,
                max_retries=0,
                **more,
            )
            for one in found if name == "PARALLEL_TOOLS" else [found]:
                assert isinstance(one, Weather), name


@case("instructor", "responses: mode RESPONSES_TOOLS")
def instructor_responses(server: Server) -> None:
    import instructor
    import openai

    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
        found = client.responses.create(
            model=server.model, input=QUESTION, response_model=Weather, max_retries=0
        )
        assert isinstance(found, Weather)


def _agents(model: Any) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        agent = Agent(model, output_type=output, instructions=SYSTEM, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Weather)


def _agent_loop(model: Any) -> None:
    """The tool is offered first, alone; then the output, alone."""
    from pydantic_ai import Agent, Tool, ToolOutput
    from pydantic_ai.capabilities import PrepareOutputTools

    called: list[str] = []

    async def first(_: Any, definition: Any) -> Any:
        return None if called else definition

    async def then(_: Any, definitions: list[Any]) -> list[Any]:
        return definitions if called else []

    def weather(place: str) -> str:
        """Tells the weather of a place."""
        called.append(place)
        return "dry"

    tool = Tool(weather, prepare=first)
    agent = Agent(
        model,
        output_type=ToolOutput(Weather),
        tools=[tool],
        capabilities=[PrepareOutputTools(then)],
        retries=0,
    )
    result = agent.run_sync(QUESTION)
    assert isinstance(result.output, Weather)
    assert len(called) >= 1
    assert len(result.all_messages()) >= 4
    json.loads(result.all_messages_json())


def _pydantic_ai(server: Server, *, responses: bool) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=server.url, api_key="none")
    kind: Any = OpenAIResponsesModel if responses else OpenAIChatModel
    return kind(server.model, provider=provider)


@case("pydantic-ai-slim", "chat: agents with output by tool and by schema")
def agents_chat(server: Server) -> None:
    _agents(_pydantic_ai(server, responses=False))


@case("pydantic-ai-slim", "chat: an agent that calls a tool first")
def agent_loop_chat(server: Server) -> None:
    _agent_loop(_pydantic_ai(server, responses=False))


@case("pydantic-ai-slim", "responses: agents with output by tool and by schema")
def agents_responses(server: Server) -> None:
    _agents(_pydantic_ai(server, responses=True))


@case("pydantic-ai-slim", "responses: an agent that calls a tool first")
def agent_loop_responses(server: Server) -> None:
    _agent_loop(_pydantic_ai(server, responses=True))
