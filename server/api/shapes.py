"""What the OpenAPI document says of values that are checked where they are used."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from server.text.codec import RESERVED_VARIABLES

#: Says that a number is a token id; its maximum is known once the model is.
TOKEN_MARK = "x-token-id"
_TOKEN = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, TOKEN_MARK: True}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": 1024,
}
#: How many tokens of a prompt are kept.
LENGTH = {"type": "integer", "minimum": -1, "maximum": 2**31 - 1, "not": {"const": 0}}
VARIABLES: dict[str, Any] = {
    "propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}},
}
_WORD = {"type": "string", "pattern": r"\S"}
_STOP = {"type": "string", "minLength": 1, "maxLength": 1024}

TokenIds = Annotated[list[int], WithJsonSchema({"type": "array", "items": _TOKEN})]
FewTokenIds = Annotated[
    list[int], WithJsonSchema({"type": "array", "items": _TOKEN, "maxItems": 1024})
]
SomeTokenIds = Annotated[
    list[int], WithJsonSchema({"type": "array", "items": _TOKEN, "minItems": 1})
]
Biases = Annotated[dict[str, float], WithJsonSchema(_BIASES)]
Words = Annotated[list[str], WithJsonSchema({"type": "array", "items": _WORD, "maxItems": 1024})]
Stop = Annotated[
    str | list[str],
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}]}),
]

_Text = Annotated[str, Field(min_length=1)]
#: A prompt as the document tells it.
PromptShape = (
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=128)]
    | SomeTokenIds
    | Annotated[list[SomeTokenIds], Field(min_length=1, max_length=128)]
)


def one_of(*names: str) -> dict[str, Any]:
    """An object of whose fields just one is given and not null."""
    given = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names
    ]
    return {"oneOf": given}


def tell_vocabulary(document: Any, size: int) -> None:
    """Writes the largest token id of a model into an OpenAPI document."""
    if isinstance(document, dict):
        if TOKEN_MARK in document:
            document["maximum"] = size - 1
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            tell_vocabulary(item, size)
