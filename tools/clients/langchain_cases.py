"""langchain-openai, by both endpoints."""

from __future__ import annotations

from typing import Any

from tools.clients.shared import FEW, QUESTION, SYSTEM, Server, Verdict, Weather, case


def _model(server: Server, *, responses: bool, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {
        "model": server.model,
        "base_url": server.url,
        "api_key": "none",
        "max_retries": 0,
        "temperature": 0,
        "use_responses_api": responses,
    }
    return ChatOpenAI(**{**given, **more})


def _forms(server: Server, *, responses: bool) -> None:
    for method in ("json_schema", "function_calling"):
        model = _model(server, responses=responses).with_structured_output(Weather, method=method)
        assert isinstance(model.invoke(QUESTION), Weather), method


def _loop(server: Server, *, responses: bool) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    model = _model(server, responses=responses)
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    for choice in ("Weather", "any"):
        answer = model.bind_tools(
            [Weather, Verdict], tool_choice=choice, parallel_tool_calls=False
        ).invoke(messages)
        assert len(answer.tool_calls) == 1
        messages += [answer, ToolMessage("done", tool_call_id=answer.tool_calls[0]["id"])]
    words = _model(server, responses=responses, max_tokens=FEW)
    assert words.bind_tools([Weather], tool_choice="none").invoke(messages).text is not None


def _stream(server: Server, *, responses: bool) -> None:
    words = _model(server, responses=responses, max_tokens=FEW, stream_usage=True)
    whole: Any = None
    for chunk in words.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.text
    assert whole.usage_metadata["output_tokens"] == FEW
    called: Any = None
    model = _model(server, responses=responses).bind_tools([Weather], tool_choice="any")
    for chunk in model.stream(QUESTION):
        called = chunk if called is None else called + chunk
    Weather.model_validate(called.tool_calls[0]["args"])


@case("langchain-openai", "chat: structured output by schema and by function")
def chat_forms(server: Server) -> None:
    _forms(server, responses=False)


@case("langchain-openai", "chat: three turns with tools")
def chat_loop(server: Server) -> None:
    _loop(server, responses=False)


@case("langchain-openai", "chat: streams of words and of calls")
def chat_stream(server: Server) -> None:
    _stream(server, responses=False)


@case("langchain-openai", "responses: structured output by schema and by function")
def responses_forms(server: Server) -> None:
    _forms(server, responses=True)


@case("langchain-openai", "responses: three turns with tools")
def responses_loop(server: Server) -> None:
    _loop(server, responses=True)


@case("langchain-openai", "responses: streams of words and of calls")
def responses_stream(server: Server) -> None:
    _stream(server, responses=True)
