"""Tool calls in text: whatever the cuts of a stream, the same calls come out."""

from __future__ import annotations

import itertools
import json

import pytest

from server.text.call_reader import CallPiece, CallReader
from server.text.calls import FORMATS, format_of

WEATHER = '{"name": "weather", "arguments": {"place": "a {\\"b\\"} ]", "days": [1, {"x": 2}]}}'
ARGUMENTS = '{"place": "a {\\"b\\"} ]", "days": [1, {"x": 2}]}'
ROWS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "f", '
        '"arguments": {}}\n</tool_call>',
        "Let me see.\n",
        [("weather", ARGUMENTS), ("f", "{}")],
    ),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", "<tool_call>\nnonsense", "<tool_call>\nnonsense", []),
    ("hermes", '<tool_call>{"no": 1}</tool_call>', '<tool_call>{"no": 1}', []),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>',
        "",
        [("late", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>\n{WEATHER[:-4]}", "", [("weather", ARGUMENTS[:-3])]),
    (
        "mistral",
        f'[TOOL_CALLS][{WEATHER}, {{"name": "f", "arguments": {{"a": 1}}}}]',
        "",
        [("weather", ARGUMENTS), ("f", '{"a": 1}')],
    ),
    ("mistral", "[TOOL] text", "[TOOL] text", []),
    ("llama3", WEATHER.replace("arguments", "parameters"), "", [("weather", ARGUMENTS)]),
    ("json", f"\n {WEATHER}", "", [("weather", ARGUMENTS)]),
    ("json", 'text {"name": "f"}', 'text {"name": "f"}', []),
    ("json", '{"answer": 5}', '{"answer": 5}', []),
    ("json", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
]


def read(name: str, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(FORMATS[name])
    content, pieces = "", list[CallPiece]()
    for more, found in (*map(reader.push, parts), reader.finish()):
        content += more
        pieces += found
    calls = []
    for index, group in itertools.groupby(pieces, lambda piece: piece.index):
        own = list(group)
        assert index == len(calls)
        assert own[0].name is not None
        assert all(piece.name is None for piece in own[1:])
        calls.append((own[0].name, "".join(piece.arguments for piece in own)))
    assert reader.calls == len(calls)
    return content, calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), ROWS)
def test_calls_are_found_wherever_the_stream_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(name, [text]) == (content, calls)
    assert read(name, list(text)) == (content, calls)
    for cut in range(len(text)):
        assert read(name, [text[:cut], text[cut:]]) == (content, calls), text[:cut]


def test_arguments_stream_as_they_come() -> None:
    reader = CallReader(FORMATS["hermes"])
    seen = []
    for character in f"<tool_call>\n{WEATHER}":
        seen += reader.push(character)[1]
    assert len(seen) > 20
    assert json.loads("".join(piece.arguments for piece in seen))["days"] == [1, {"x": 2}]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% for t in tools %}{"name": f, "parameters": dictionary of x}{% endfor %}', "llama3"),
        ("{% for t in tools %}{{ t }}{% endfor %}", "json"),
    ],
)
def test_the_format_is_told_by_the_template(template: str, name: str | None) -> None:
    assert format_of(template) == name
