"""Tools of a chat request: their shapes, what the answer is held to, and how they are called."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.grammar import Grammar
from engine.types import EngineInfo
from server.api.context import ServerContext
from server.api.errors import ApiError, quote
from server.text.call_reader import CallPiece, CallReader
from server.text.calls import FORMATS, CallFormat, calls_grammar, format_of
from server.text.codec import TextCodec
from server.text.description import GrammarSource

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]

#: Arguments of a tool that says nothing of them.
_ANYTHING: dict[str, Any] = {"type": "object"}


class FunctionTool(BaseModel):
    """What a tool is called, does and takes."""

    model_config = ConfigDict(strict=True)

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Hold the arguments to it in any case.")


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(BaseModel):
    """A tool by its name."""

    model_config = ConfigDict(strict=True)

    name: _Name


class NamedChoice(BaseModel):
    """The tool that has to be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


class ToolFields(BaseModel):
    """The fields of a chat request that concern tools."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Default auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="Default true.")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers of one request call tools.

    Args:
        form: how its model writes calls.
        grammar: what holds the answer to it; None = nothing does.
        short_ids: whether calls are known by nine letters and digits, as some templates insist.
    """

    form: CallFormat
    grammar: Grammar | None
    short_ids: bool

    def call_id(self) -> str:
        """A new name for a call."""
        unique = uuid.uuid4().hex
        return unique[:9] if self.short_ids else f"call_{unique[:24]}"


async def tool_use(
    context: ServerContext,
    codec: TextCodec,
    body: ToolFields,
    answer: GrammarSource | None = None,
) -> ToolUse | None:
    """What a request's tools ask for; None = nothing, its answer is text.

    Args:
        answer: the schema of answers that call none, if there is one.

    Raises:
        ApiError: the choice names no tool, or there are none to choose from.
        InvalidRequest: the model's template knows no tools, or a schema does not compile.
    """
    tools = {tool.function.name: tool.function for tool in body.tools or ()}
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    if len(tools) < len(body.tools or ()):
        raise ApiError(400, "tools has two functions of the same name.", param="tools")
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise ApiError(400, "tool_choice needs tools; send some.", param="tool_choice")
    if named is not None and named not in tools:
        raise ApiError(
            400, f"tool_choice names {quote(named)}, which is not in tools.", param="tool_choice"
        )
    kind = format_of(codec.template)
    if kind is None:
        raise ApiError(
            400,
            "This model's chat template knows no tools; leave tools out, or serve a model whose "
            "template does.",
            param="tools",
        )
    if choice == "none":
        return None
    if named is not None:
        tools = {named: tools[named]}
    form, grammar = FORMATS[context.options.tool_format or kind], None
    required, info = named is not None or choice == "required", context.engine.info
    if required or answer is not None or any(tool.strict for tool in tools.values()):
        schemas = await _schemas(codec, tools, required, info)
        many = body.parallel_tool_calls is not False and named is None
        if answer is not None:
            await codec.grammars.compile(answer, info.eos_token_ids)  # to say which is at fault
        text = calls_grammar(
            form,
            schemas,
            required=required,
            many=many,
            special=codec.special_ids,
            answer=None if answer is None else json.loads(answer.text),
        )
        source = GrammarSource("lark", text, "tools")
        grammar = await codec.grammars.compile(source, info.eos_token_ids)
    return ToolUse(form, grammar, kind == "mistral")


async def _schemas(
    codec: TextCodec, tools: Mapping[str, FunctionTool], required: bool, info: EngineInfo
) -> dict[str, Any]:
    """What binds the arguments of each tool."""
    schemas = {}
    for name, tool in tools.items():
        bound = required or tool.strict
        schemas[name] = {**_ANYTHING, **(tool.parameters or {})} if bound else _ANYTHING
        source = GrammarSource("json", json.dumps(schemas[name]), "tools")
        await codec.grammars.compile(source, info.eos_token_ids)  # to say which is at fault
    return schemas


class ToolText:
    """The calls of one choice, in OpenAI's shapes."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = CallReader(use.form)

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._reader.calls > 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text, and deltas of calls, that have become certain."""
        content, pieces = self._reader.push(text)
        if last:
            more, rest = self._reader.finish()
            content, pieces = content + more, pieces + rest
        return content, list(map(self._delta, pieces))

    def _delta(self, piece: CallPiece) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": piece.arguments}
        if piece.name is None:
            return {"index": piece.index, "function": function}
        head = {"index": piece.index, "id": self._use.call_id(), "type": "function"}
        return {**head, "function": {"name": piece.name, **function}}


def whole_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that are complete, of their deltas."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append(
                {
                    **{k: v for k, v in delta.items() if k != "index"},
                    "function": dict(delta["function"]),
                }
            )
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
