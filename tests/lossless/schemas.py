"""JSON schemas of the kinds that people send."""

from __future__ import annotations

from typing import Any


def obj(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    """An object of just these properties."""
    required = [name for name in properties if name not in optional]
    closed = {"additionalProperties": False, **more}
    return {"type": "object", "properties": properties, "required": required, **closed}


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_SHORT = {"type": "string", "maxLength": 6}

SCHEMAS: dict[str, Any] = {
    "flat": obj({"name": _STRING, "age": _INTEGER, "ok": {"type": "boolean"}}),
    "optional": obj({"a": _INTEGER, "b": _SHORT, "c": {"type": "null"}}, "a", "b", "c"),
    "nested": obj(
        {
            "name": _SHORT,
            "address": obj({"street": _SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
            "tags": {"type": "array", "items": _SHORT, "maxItems": 3},
        }
    ),
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "const": obj({"kind": {"const": "fixed"}, "n": {"enum": [1, 2, 3]}}),
    "union": {"anyOf": [obj({"cat": _SHORT}), obj({"dog": {"type": "integer", "minimum": 0}})]},
    "tagged": {
        "anyOf": [
            obj({"type": {"const": "circle"}, "radius": {"type": "number"}}),
            obj({"type": {"const": "square"}, "side": {"type": "number"}}),
        ]
    },
    "types": obj({"v": {"type": ["string", "null", "integer"]}}),
    "numbers": obj(
        {
            "small": {"type": "integer", "minimum": -5, "maximum": 17},
            "share": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 100},
        }
    ),
    "patterns": obj(
        {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "word": {"type": "string", "pattern": "^(a|bc)*d$", "maxLength": 12},
            "any": {"type": "string", "minLength": 2, "maxLength": 5},
        }
    ),
    "formats": obj(
        {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
            "at": {"type": "string", "format": "ipv4"},
        }
    ),
    "array": {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [_SHORT, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "all of": {"allOf": [obj({"a": _INTEGER, "b": _SHORT}), {"type": "object"}]},
    "map": {"type": "object", "additionalProperties": _INTEGER, "maxProperties": 2},
    "open": {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
    "definitions": {
        "$defs": {"point": obj({"x": _INTEGER, "y": _INTEGER})},
        **obj({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "recursive": {
        "$defs": {
            "node": obj(
                {
                    "value": _INTEGER,
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                }
            )
        },
        "$ref": "#/$defs/node",
    },
    "tree": obj({"name": _SHORT, "children": {"type": "array", "items": {"$ref": "#"}}}),
    "unicode": obj({"naïve": {"enum": ["日本", "🦊", 'quo"te', "back\\slash"]}}),
    "annotated": obj(
        {"a": {"type": "string", "title": "A", "description": "x", "default": "y", "maxLength": 3}},
        title="T",
        description="D",
    ),
    "large": obj({f"field_{i}": {"type": "boolean"} for i in range(8)}),
    "any": {},
    "yes": {"type": "boolean"},
}
