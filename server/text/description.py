"""Descriptions of what an answer must match, their limits, and what is found within a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import InvalidRequest

#: Longest description, in characters.
MOST_CHARACTERS = 256 * 1024
#: Rules of a grammar and references of a schema are followed one within the other, natively, on a
#: stack that ends somewhere beyond 2000.
MOST_RULES = 500
#: The library would go on to refuse alternatives that begin in more places at once.
MOST_CHOICES = 1000

#: One spelling of each value, as Python's `json.dumps` writes it: what is between the values is
#: forced then, and costs a model next to nothing.
_JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
#: Places of schemas within a schema; of the first by name, of the second in lists.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A description of what an answer must match.

    Args:
        kind: "json" (a JSON schema), "regex", "choice" (a JSON list of strings), "grammar" (Lark,
            or GBNF) or "lark".
        text: the description.
        param: the request's field that it came in.
    """

    kind: Literal["json", "regex", "choice", "grammar", "lark"]
    text: str
    param: str = field(compare=False)


class Refused(Exception):
    """A description that does not compile, and where in it the fault lies, if that is known."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


def check_size(source: GrammarSource) -> None:
    """Raises InvalidRequest for what is too much to look at."""

    def check(size: int, most: int, what: str) -> None:
        if size > most:
            raise InvalidRequest(f"{source.param} has {size} {what}; at most {most} are allowed.",
                                 source.param)  # fmt: skip

    check(len(source.text), MOST_CHARACTERS, "characters")
    check(source.text.count('"$ref"'), MOST_RULES, "references")
    if source.kind == "grammar":
        check(sum(":" in line for line in source.text.splitlines()), MOST_RULES, "rules")


def definition(source: GrammarSource) -> str:
    """A description in the library's own form.

    Raises:
        Refused: it cannot be read.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text = source.text
    try:
        if source.kind == "json":
            return str(LLMatcher.grammar_from_json_schema(text, _JSON_STYLE, {"lenient": False}))
        if source.kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if source.kind == "choice":
            spelled = (json.dumps(word, ensure_ascii=False) for word in json.loads(text))
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(spelled)))
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # whatever a converter makes of foreign input
        raise Refused(sentence(str(error))) from None


def sentence(text: str) -> str:
    """The library's message, on one line and never long."""
    words = " ".join(text.split("<non-verbose/>")[0].split())
    return re.sub(r"[^\x20-\x7e]", "?", words)[:300].rstrip(". ") or "it is empty"


def children(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas right within a schema, with where they stand."""
    if not isinstance(schema, dict):
        return
    found: list[tuple[str, Any]] = []
    for key in _NAMED:
        if isinstance(inner := schema.get(key), dict):
            found += [(f"{key}.{name}", child) for name, child in inner.items()]
    for key in _LISTED:
        if isinstance(inner := schema.get(key), list):
            found += [(f"{key}.{i}", child) for i, child in enumerate(inner)]
    found += [(key, schema[key]) for key in _SINGLE if key in schema]
    yield from ((name, child) for name, child in found if isinstance(child, dict))
