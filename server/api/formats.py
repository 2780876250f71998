"""What a request says its answer must look like: OpenAI's `response_format`, vLLM's fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.api.errors import ApiError
from server.api.shapes import one_of
from server.text.description import MOST_CHARACTERS, MOST_CHOICES, GrammarSource

Schema = dict[str, Any]
_Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)
]


class TextFormat(BaseModel):
    """Any text: the default."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(strict=True)

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON schema; it is kept to exactly, `strict` or not."""

    model_config = ConfigDict(strict=True)

    name: str | None = None
    description: str | None = None
    body: Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted, without effect.")


class JsonSchemaFormat(BaseModel):
    """JSON that a schema allows."""

    model_config = ConfigDict(strict=True)

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]

_FORMS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(BaseModel):
    """vLLM's form: one of its fields."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=one_of(*_FORMS))

    schema_: Schema | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    regex: _Text | None = Field(None, description="Matched by the whole answer.")
    choice: _Choices | None = Field(None, description="One of these texts.")
    grammar: _Text | None = Field(None, description="In Lark's form, or in GBNF.")


class GuidedFields(BaseModel):
    """vLLM's fields of a request; at most one of them asks for something."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: _Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: _Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: _Text | None = Field(None, description="As structured_outputs.grammar.")


class StructuredFields(GuidedFields):
    """The same, and OpenAI's."""

    response_format: ResponseFormat | None = None


def answer_schema(body: StructuredFields) -> GrammarSource | None:
    """The schema of `response_format`: it binds answers that call no tool."""
    found = _of_format(body.response_format)
    return found[0] if found else None


def grammar_source(body: StructuredFields) -> GrammarSource | None:
    """What the answer must match; None = it may be any text.

    Raises:
        ApiError: it is described twice, or a schema is no JSON.
    """
    wanted = [*_of_format(body.response_format), *_of_structured(body.structured_outputs)]
    for name, value in (
        ("guided_json", body.guided_json),
        ("guided_regex", body.guided_regex),
        ("guided_choice", body.guided_choice),
        ("guided_grammar", body.guided_grammar),
    ):
        if value is not None:
            wanted.append(_source(name.removeprefix("guided_"), value, name))
    if len(wanted) > 1:
        first, second = (source.param.partition(".")[0] for source in wanted[:2])
        raise ApiError(
            400,
            f"{first} and {second} both say what the answer must look like; send one of them.",
            param=second,
        )
    return wanted[0] if wanted else None


def _of_format(
    asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> list[GrammarSource]:
    if isinstance(asked, JsonObjectFormat):
        return [_source("json", {"type": "object"}, "response_format")]
    if isinstance(asked, JsonSchemaFormat):
        return [_source("json", asked.json_schema.body, "response_format")]
    return []


def _of_structured(asked: StructuredOutputs | None) -> list[GrammarSource]:
    if asked is None:
        return []
    fields = {
        "json": asked.schema_,
        "json_object": asked.json_object,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1:
        raise ApiError(
            400,
            f"structured_outputs has {len(given)} fields; send one of {', '.join(_FORMS)}.",
            param="structured_outputs",
        )
    [(name, value)] = given.items()
    if name == "json_object":
        name, value = "json", {"type": "object"}
    return [_source(name, value, "structured_outputs")]


def _source(kind: str, value: Any, param: str) -> GrammarSource:
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ApiError(400, f"{param} is no JSON schema: send an object.", param=param)
    text = value if isinstance(value, str) else json.dumps(value)
    return GrammarSource(kind, text, param)  # type: ignore[arg-type]
