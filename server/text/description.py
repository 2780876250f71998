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
#: Patterns (and formats) that one text must match together.
MOST_PATTERNS = 8
#: The library would go on to refuse alternatives that begin in more places at once.
MOST_CHOICES = 1000

#: One spelling of each value, as Python's `json.dumps` writes it: what is between the values is
#: forced then, and costs a model next to nothing.
JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
#: Classes of regular expressions; they may stand within another class.
_CLASSES = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "W": r"[^\w\p{N}]",
    "S": r"[^\s\x1c-\x1f]",
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
            raise InvalidRequest(
                f"{source.param} has {size} {what}; at most {most} are allowed.", source.param
            )

    check(len(source.text), MOST_CHARACTERS, "characters")
    check(source.text.count('"$ref"'), MOST_RULES, "references")
    if source.kind == "grammar":
        check(sum(":" in line for line in source.text.splitlines()), MOST_RULES, "rules")


def _check_patterns(source: GrammarSource) -> None:
    """Patterns that one string must match together take the library time beyond all limits to
    tell whether any does; it asks for ever from a dozen on."""
    most = 0
    if source.kind == "grammar":
        most = source.text.count("&")
    elif source.kind == "json":
        root, known = json.loads(source.text), dict[int, int]()
        pending = [root]
        while pending:
            node = pending.pop()
            pending += node.values() if isinstance(node, dict) else node
            if isinstance(node, dict):
                most = max(most, _patterns(node, root, known))
            pending = [one for one in pending if isinstance(one, dict | list)]
    if most > MOST_PATTERNS:
        raise Refused(f"it has {most} patterns for one text; at most {MOST_PATTERNS} are allowed")


def _patterns(schema: Any, root: Any, known: dict[int, int]) -> int:
    """How many patterns a string must match at once by a schema.

    Args:
        known: of the schemas that were looked at, by their id.
    """
    if not isinstance(schema, dict):
        return 0
    if id(schema) not in known:
        known[id(schema)] = 0  # of a circle, once
        own = ("pattern" in schema) + ("format" in schema)
        own += _patterns(_target(schema.get("$ref"), root), root, known)
        own += sum(_patterns(child, root, known) for child in _list(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            own += max((_patterns(c, root, known) for c in _list(schema, key)), default=0)
        known[id(schema)] = own
    return known[id(schema)]


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    return inner if isinstance(inner := schema.get(key), list) else []


def _target(reference: Any, root: Any) -> Any:
    """The schema that a reference within the same document names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def definition(source: GrammarSource) -> str:
    """A description in the library's own form.

    Raises:
        Refused: it cannot be read.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text = source.text
    try:
        _check_patterns(source)
        if source.kind == "json":
            return str(LLMatcher.grammar_from_json_schema(text, JSON_STYLE, {"lenient": False}))
        if source.kind == "regex":
            return str(LLMatcher.grammar_from_regex(_narrowed(text)))
        if source.kind == "choice":
            spelled = (json.dumps(word, ensure_ascii=False) for word in json.loads(text))
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(spelled)))
        if source.kind == "grammar":
            text = any_to_lark(text)
        return str(LLMatcher.grammar_from_lark(text))
    except Refused:
        raise
    except Exception as error:  # whatever a converter makes of foreign input
        raise Refused(sentence(str(error))) from None


def _narrowed(expression: str) -> str:
    """An expression whose classes are what every dialect agrees on: digits, letters and spaces are
    those of ASCII, and what is none of them is none in Unicode, whose versions differ."""
    return re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), expression, flags=re.S)


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
