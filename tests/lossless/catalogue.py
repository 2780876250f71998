"""Two hundred descriptions of the kinds that people send, and what says whether a text is of one.

They come in families with parameters, so that a kind is tried at its edges: bounds of nothing and
of one, a single alternative, names and values that need quoting. Whether a text is of a schema is
the `jsonschema` package's to say, of an expression Python's `re`.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema

from tests.lossless.schemas import SCHEMAS, obj

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Description:
    """One of them.

    Attributes:
        name: family and parameters.
        kind: as in `GrammarSource`.
        text: the description, as it is compiled.
        fits: whether a text is of it.
    """

    name: str
    kind: Kind
    text: str
    fits: Callable[[str], bool]


STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
NULL: dict[str, Any] = {"type": "null"}
SHORT: dict[str, Any] = {"type": "string", "maxLength": 4}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}

_CHECKER = jsonschema.FormatChecker(())


def _checks(name: str, check: Callable[[str], object]) -> None:
    """A format, which a text has unless `check` raises ValueError or says False."""

    def fits(value: object) -> bool:
        return not isinstance(value, str) or check(value) is not False

    _CHECKER.checks(name, ValueError)(fits)


_checks("date", datetime.date.fromisoformat)
_checks("date-time", lambda text: datetime.datetime.fromisoformat(_plain_second(text)))
_checks("time", lambda text: datetime.time.fromisoformat(_plain_second(text)))
_checks("ipv4", ipaddress.IPv4Address)
_checks("ipv6", ipaddress.IPv6Address)
_checks("uuid", lambda text: bool(re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-.{12}", text)))
_checks("email", lambda text: bool(re.fullmatch(r"[^\n]+@[^@\n]+", text)))
_checks("hostname", lambda text: bool(re.fullmatch(r"[A-Za-z0-9.-]{1,253}", text)))
_checks("uri", lambda text: bool(urlsplit(text).scheme))


def _plain_second(text: str) -> str:
    """A time as `datetime` reads it: no leap second, six digits after it, and capitals."""
    text = re.sub(r"(:\d\d):60", r"\1:59", text.upper())
    return re.sub(r"(\.\d{1,6})\d*", lambda found: found[1].ljust(7, "0"), text)


def _of_schema(schema: Any) -> Callable[[str], bool]:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=_CHECKER)

    def fits(text: str) -> bool:
        try:  # 0.07 is a multiple of 0.01 in decimals only
            return bool(validator.is_valid(json.loads(text, parse_float=Decimal)))
        except ValueError:
            return False

    return fits


def _schemas() -> Iterator[tuple[str, Any]]:
    yield from SCHEMAS.items()
    yield from _integers()
    yield from _numbers()
    yield from _strings()
    yield from _arrays()
    yield from _objects()
    yield from _choices()
    yield from _references()
    yield from _requests()


def _integers() -> Iterator[tuple[str, Any]]:
    bounds: list[tuple[int | None, int | None]] = [
        (0, 0), (7, 7), (-1, 1), (0, 9), (10, 99), (95, 105), (-100, -7), (-1000, 1000), (1, None),
        (None, -1), (999, 100001), (2**31 - 2, 2**31 + 2),
    ]  # fmt: skip
    for low, high in bounds:
        limits = {"minimum": low, "maximum": high}
        given = {name: value for name, value in limits.items() if value is not None}
        yield f"integer from {low} to {high}", {"type": "integer", **given}
    yield "integer between", {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}
    for step in (2, 3, 7, 10, 25):
        yield f"multiple of {step}", {"type": "integer", "multipleOf": step, "maximum": 200,
                                      "minimum": -200}  # fmt: skip


def _numbers() -> Iterator[tuple[str, Any]]:
    for low, high in ((0, 1), (-1.5, 1.5), (0.25, 0.75), (99.9, 100.1), (-0.001, 0.001)):
        yield f"number from {low} to {high}", {"type": "number", "minimum": low, "maximum": high}
    yield "number between", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10}
    yield "number above", {"type": "number", "exclusiveMinimum": 1.25}
    yield "number at most", {"type": "number", "maximum": -2}
    for step in (0.5, 0.01, 0.25):
        limits = {"minimum": 0, "maximum": 3}
        yield f"multiple of {step}", {"type": "number", "multipleOf": step, **limits}


def _strings() -> Iterator[tuple[str, Any]]:
    for low, high in ((0, 0), (1, 1), (0, 3), (2, 2), (3, 8), (5, None)):
        limits = {"minLength": low} | ({} if high is None else {"maxLength": high})
        yield f"string of {low} to {high}", {"type": "string", **limits}
    patterns = (
        "^a$", "^$", "^(yes|no)$", "^[a-c]{3}$", "^[^a-z]{1,3}$", r"^\d{4}-\d{2}$", r"^\w+$",
        r"^\S{2,4}$", "^x?y*z+$", "ab", "^ab", "ab$", "^(a|b)*c$", "^(ab){2,3}$", r"^\$[0-9]+\.00$",
        r"^[\"\\\\]{2}$", "^é+$", "^[α-ω]{2}$", "^🦊{1,2}$", r"^a.c$", "^(?:a|(?:b|c)d)$",
    )  # fmt: skip
    for pattern in patterns:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern}
    yield "pattern and length", {"type": "string", "pattern": "^[ab]*$", "minLength": 2,
                                 "maxLength": 4}  # fmt: skip
    yield "two patterns", {"allOf": [{"type": "string", "pattern": "^[a-f]+$"},
                                     {"type": "string", "pattern": "^.{2,4}$"}]}  # fmt: skip
    for name in ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri"):
        yield f"format {name}", {"type": "string", "format": name}


def _arrays() -> Iterator[tuple[str, Any]]:
    for low, high in ((0, 0), (0, 1), (1, 1), (2, 2), (1, 3), (3, 5), (6, 9)):
        limits = {"minItems": low, "maxItems": high}
        yield f"array of {low} to {high}", {"type": "array", "items": DIGIT, **limits}
    yield "array of at least two", {"type": "array", "items": BOOLEAN, "minItems": 2}
    for depth in (2, 3, 4):
        schema: Any = DIGIT
        for _ in range(depth):
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        yield f"array in array, {depth}", schema
    yield "pairs", {"type": "array", "maxItems": 2, "items": {
        "type": "array", "prefixItems": [SHORT, DIGIT], "items": False, "minItems": 2}}  # fmt: skip
    yield "tuple with a rest", {"type": "array", "prefixItems": [BOOLEAN], "items": DIGIT,
                                "minItems": 2, "maxItems": 4}  # fmt: skip
    yield "tuple that may be short", {"type": "array", "prefixItems": [NULL, BOOLEAN, DIGIT],
                                      "items": False}  # fmt: skip
    yield "array of enums", {"type": "array", "items": {"enum": ["a", "ab", "abc"]}, "minItems": 2,
                             "maxItems": 3}  # fmt: skip
    yield "array of unions", {"type": "array", "items": {"anyOf": [DIGIT, NULL, SHORT]},
                              "minItems": 1, "maxItems": 3}  # fmt: skip


def _objects() -> Iterator[tuple[str, Any]]:
    for depth in (2, 4, 7):
        schema: Any = BOOLEAN
        for level in range(depth):
            schema = obj({f"level_{level}": schema})
        yield f"object in object, {depth}", schema
    for count in (2, 3, 5):
        names = [f"p{i}" for i in range(count)]
        yield f"{count} optional", obj(dict.fromkeys(names, DIGIT), *names)
        yield f"last of {count} required", obj(dict.fromkeys(names, DIGIT), *names[:-1])
        yield f"first of {count} required", obj(dict.fromkeys(names, DIGIT), *names[1:])
    for count in (12, 30):
        yield f"{count} properties", obj({f"flag_{i}": BOOLEAN for i in range(count)})
    yield "no properties", obj({})
    yield "any object", {"type": "object"}
    keys = ("ключ", "名前", "a b", 'quo"ted', "back\\slash", "tab\tkey", "🦊", "", "a/b", "~",
            "$ref", "Ünï", "a.b", "x'y")  # fmt: skip
    for key in keys:
        yield f"key {key!r}", obj({key: DIGIT})
    yield "map of strings", {"type": "object", "additionalProperties": SHORT, "maxProperties": 1}
    yield "listed and others", {"type": "object", "properties": {"id": DIGIT}, "required": ["id"],
                                "additionalProperties": BOOLEAN}  # fmt: skip
    yield "names by a pattern", {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT},
                                 "additionalProperties": False}  # fmt: skip
    yield "required but not listed", {"type": "object", "required": ["only"],
                                      "additionalProperties": DIGIT}  # fmt: skip


def _choices() -> Iterator[tuple[str, Any]]:
    enums: list[list[Any]] = [
        ["one"], ["a", "ab", "abc"], [1, 10, 100], [None, False, 0, ""], [1.5, -2, 3e5],
        ["日本", "中国"], ["é", "è", "🦊"], ['"', "\\", "\n"], [[], [1], [1, 2]],
        [{"a": 1}, {"a": 2}],
        [f"value number {i}" for i in range(40)],
    ]  # fmt: skip
    for enum in enums:
        yield f"enum of {len(enum)}, {enum[0]!r}", {"enum": enum}
    for const in ("text", 5, None, True, [1, "a"], {"k": [None]}, "ß\u2028\t", -0.5):
        yield f"const {const!r}", {"const": const}
    yield "const in object", obj({"version": {"const": 2}, "kind": {"const": "é"}})
    yield "typed enum", {"type": "string", "enum": ["red", "green"]}
    yield "any of types", {"anyOf": [DIGIT, BOOLEAN, NULL, SHORT]}
    yield "any of patterns", {"anyOf": [{"type": "string", "pattern": "^a+$"},
                                        {"type": "string", "pattern": "^b+$"}]}  # fmt: skip
    yield "one of types", {"oneOf": [DIGIT, NULL, BOOLEAN]}
    yield "one of tagged", {"oneOf": [obj({"t": {"const": "a"}, "x": DIGIT}),
                                      obj({"t": {"const": "b"}, "y": BOOLEAN})]}  # fmt: skip
    yield "any of any of", {"anyOf": [{"anyOf": [NULL, DIGIT]}, {"anyOf": [BOOLEAN, SHORT]}]}
    yield "any of one", {"anyOf": [obj({"a": DIGIT})]}
    yield "all of bounds", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]}
    yield "all of objects", {"allOf": [obj({"a": DIGIT}, additionalProperties=True),
                                       obj({"b": DIGIT}, additionalProperties=True)]}  # fmt: skip
    yield "many alternatives", {"anyOf": [obj({f"kind_{i}": DIGIT}) for i in range(12)]}
    for types in (["string", "null"], ["integer", "boolean"], ["null", "array"]):
        yield f"types {types}", {"type": types, "maxLength": 3, "maxItems": 1}
    yield "nullable in object", obj({"a": {"type": ["integer", "null"]}, "b": {"type": "null"}})


def _references() -> Iterator[tuple[str, Any]]:
    node = {"value": DIGIT, "next": {"anyOf": [NULL, {"$ref": "#"}]}}
    yield "list by reference", obj(node)
    yield (
        "two that know each other",
        {
            "$defs": {
                "even": {"anyOf": [NULL, obj({"odd": {"$ref": "#/$defs/odd"}})]},
                "odd": obj({"even": {"$ref": "#/$defs/even"}}),
            },
            "$ref": "#/$defs/even",
        },
    )
    yield "expression", {
        "$defs": {
            "e": {
                "anyOf": [
                    DIGIT,
                    {"type": "array", "prefixItems": [{"enum": ["+", "-"]}, {"$ref": "#/$defs/e"},
                     {"$ref": "#/$defs/e"}], "items": False, "minItems": 3},
                ]
            }
        },
        "$ref": "#/$defs/e",
    }  # fmt: skip
    yield "menu", {
        "definitions": {
            "item": obj(
                {
                    "label": {"enum": ["open", "save"]},
                    "items": {"type": "array", "items": {"$ref": "#/definitions/item"},
                              "maxItems": 2},
                },
                "items",
            )
        },
        "type": "array",
        "items": {"$ref": "#/definitions/item"},
        "minItems": 1,
        "maxItems": 2,
    }  # fmt: skip
    yield "names to escape", {"$defs": {"a/b~c": DIGIT}, **obj({"x": {"$ref": "#/$defs/a~1b~0c"}})}
    for links in (2, 10):
        chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
        yield f"chain of {links}", {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{links}": DIGIT}}


def _requests() -> Iterator[tuple[str, Any]]:
    """What applications ask for."""
    money = {"type": "number", "minimum": 0, "multipleOf": 0.01, "maximum": 1000}
    yield (
        "invoice",
        obj(
            {
                "number": {"type": "string", "pattern": "^R-[0-9]{4}$"},
                "lines": {
                    "type": "array",
                    "items": obj({"sku": {"enum": ["A1", "B2"]}, "count": DIGIT, "price": money}),
                    "minItems": 1,
                    "maxItems": 2,
                },
                "paid": BOOLEAN,
            }
        ),
    )
    yield (
        "contact",
        obj(
            {
                "name": SHORT,
                "mail": {"anyOf": [NULL, {"type": "string", "format": "email"}]},
                "born": {"type": "string", "format": "date"},
            },
            "mail",
        ),
    )
    yield (
        "call of a tool",
        obj(
            {
                "name": {"enum": ["get_weather", "get_time"]},
                "arguments": obj({"city": {"enum": ["Paris", "Oslo"]}, "days": DIGIT}, "days"),
            }
        ),
    )
    yield (
        "verdict",
        obj(
            {
                "reason": SHORT,
                "score": {"type": "integer", "minimum": 1, "maximum": 5},
                "ok": BOOLEAN,
            }
        ),
    )
    yield (
        "entities",
        {
            "type": "array",
            "items": obj({"text": SHORT, "label": {"enum": ["PER", "ORG", "LOC"]}, "start": DIGIT}),
            "minItems": 1,
            "maxItems": 2,
        },
    )
    point = {"type": "array", "items": {"type": "number", "minimum": -9, "maximum": 9},
             "minItems": 2, "maxItems": 2}  # fmt: skip
    yield (
        "shapes",
        {
            "oneOf": [
                obj({"type": {"const": "Point"}, "at": point}),
                obj({"type": {"const": "Line"}, "from": point, "to": point}),
            ]
        },
    )
    yield (
        "settings",
        obj(
            {
                "theme": {"enum": ["dark", "light"]},
                "sizes": obj({"font": {"enum": [10, 12, 14]}, "line": {"const": 1.5}}),
                "on": {"type": "array", "items": BOOLEAN, "minItems": 4, "maxItems": 4},
            }
        ),
    )


def _others() -> Iterator[Description]:
    """What the other fields of a request take."""
    expressions = (
        "a+b", "[0-9]{3}-(abc|x+)!", "(yes|no|maybe)", r"\d{4}-\d\d-\d\d", r"[^\n]{2,6}\.", "x*",
        r"(?i)yes", "(a|ab)(c|bcd)", "日本(語|人)?", r"-?(0|[1-9]\d*)(\.\d+)?", "🦊{2}",
        r"\[\]|\{\}", r"[a-z]+@[a-z]+\.(com|org)", r"\S+ \S+", "(ab?c){2}",
    )  # fmt: skip
    for text in expressions:
        yield Description(f"regex {text}", "regex", text, _of_expression(text))
    lists = (
        ["yes", "no"], ["a", "ab", "abc"], ["日本", "🦊 fox"], ['may"be', "back\\slash"],
        [f"choice {i}" for i in range(50)], ["only"], [" ", "  "], ["Yes.", "Yes"],
    )  # fmt: skip
    for words in lists:
        yield Description(f"choice {words[0]}", "choice", json.dumps(words), words.__contains__)
    grammars = (
        ('start: "a" ("b" | "c")+ "."', r"a[bc]+\."),
        ('start: WORD ("," WORD)*\nWORD: /[a-c]+/', r"[a-c]+(,[a-c]+)*"),
        ('start: NUMBER OP NUMBER\nOP: "+" | "-"\nNUMBER: /[0-9]{1,3}/', r"\d{1,3}[+-]\d{1,3}"),
        ('start: "FROM " name ";"\nname: /[a-z]{1,4}/', "FROM [a-z]{1,4};"),
        ('start: item{2,3}\nitem: "<" /[xy]/ ">"', "(<[xy]>){2,3}"),
        ('start: a?\na: "é" | "🦊"', "(é|🦊)?"),
        ('root ::= "a" ("b" | "c") "."', r"a[bc]\."),
        ('root ::= [a-z] [0-9]*', "[a-z][0-9]*"),
        ('root ::= word (" " word)? \nword ::= "the" | "fox"', "(the|fox)( (the|fox))?"),
    )  # fmt: skip
    for text, same in grammars:
        yield Description(f"grammar {text[:24]!r}", "grammar", text, _of_expression(same))
    for text, opening, closing in (
        ('start: s\ns: "(" s ")" | "x"', "(", ")"),
        ('root ::= s\ns ::= "[" s "]" | "x"', "[", "]"),
    ):
        fits = _is_nested(opening, closing)
        yield Description(f"grammar of brackets {opening}", "grammar", text, fits)


def _of_expression(text: str) -> Callable[[str], bool]:
    pattern = re.compile(text)
    return lambda answer: pattern.fullmatch(answer) is not None


def _is_nested(opening: str, closing: str) -> Callable[[str], bool]:
    def fits(answer: str) -> bool:
        depth = len(answer) // 2
        return answer == opening * depth + "x" + closing * depth

    return fits


DESCRIPTIONS: tuple[Description, ...] = (
    *(Description(n, "json", json.dumps(s), _of_schema(s)) for n, s in _schemas()),
    *_others(),
)
