"""How models write tool calls: by the chat template, and as a grammar that requires them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.text.description import JSON_STYLE


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One family's way to write calls.

    Args:
        begin: what stands before a call, or before a list of them; "" = the call itself, at the
            very beginning of the text.
        end: what stands behind it.
        arguments: the key of a call's arguments.
        listed: whether `begin` opens a JSON list of calls.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False


FORMATS = {
    "hermes": CallFormat("<tool_call>\n", "\n</tool_call>"),
    "mistral": CallFormat("[TOOL_CALLS]", "", listed=True),
    "llama3": CallFormat("", "", arguments="parameters"),
    "json": CallFormat("", ""),
}


def format_of(template: str) -> str | None:
    """The name of the format that a chat template teaches; None if it knows no tools."""
    if not re.search(r"\btools\b", template):
        return None
    for sign, name in (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral")):
        if sign in template:
            return name
    return "llama3" if '"parameters": dictionary' in template else "json"


def calls_grammar(
    form: CallFormat,
    tools: Mapping[str, Any],
    *,
    required: bool,
    many: bool,
    special: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A Lark grammar of answers that call tools.

    Args:
        form: how calls are written.
        tools: JSON schemas of the arguments, by name.
        required: whether the answer must be a call; else it may be text, with or without calls.
        many: whether there may be several calls.
        special: control tokens by their text: written as tokens, since no text spells them.
        answer: the JSON schema of answers that call none; None = they are any text.
    """
    begin, end = form.begin.rstrip("\n"), form.end.strip("\n")
    opened = _literal(begin, special)
    gap = ' "\\n"' if form.begin.endswith("\n") else ""
    closed = ('"\\n" ' if form.end.startswith("\n") else "") + _literal(end, special)
    if form.listed:
        calls = f'{gap} "[" call' + (' (", " call)*' if many else "") + ' "]"'
    else:
        again = f' ("\\n" {opened}{gap} call {closed})*' if many and begin else ""
        calls = f"{gap} call {closed}{again}"
    if required:
        lines = [f"start: {opened}{calls}"]
    elif answer is not None:
        styled = json.dumps({"x-guidance": JSON_STYLE, **answer})
        lines = [f"start: answer | {opened}{calls}", f"answer: %json {styled}"]
    else:
        lines = _with_text(begin, opened, calls, special)
    lines.append("call: " + " | ".join(f"c{i}" for i in range(len(tools))))
    for i, (name, schema) in enumerate(tools.items()):
        head = _quoted(f'{{"name": {json.dumps(name)}, "{form.arguments}": ')
        if answer is not None and not begin:  # the lexer has to tell it from other JSON
            parts = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{form.arguments}"', ": ")
            head = " ".join(map(_quoted, parts))
        styled = json.dumps({**schema, "x-guidance": JSON_STYLE})
        lines += [f'c{i}: {head} a{i} "}}"', f"a{i}: %json {styled}"]
    return "\n".join(lines) + "\n"


def _literal(text: str, special: Mapping[str, int]) -> str:
    if text in special:
        return f"<[{special[text]}]>"
    return _quoted(text) if text else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _with_text(begin: str, opened: str, calls: str, special: Mapping[str, int]) -> list[str]:
    """Rules of an answer that is text, and may then call tools."""
    if begin in special:  # text cannot spell it
        return [f"start: TEXT? | TEXT? {opened}{calls}", r"TEXT: /(.|\n)+/"]
    if not begin:  # text that begins as calls do would be one
        return [f"start: TEXT |{calls}", r"TEXT: /[^{](.|\n)*/"]
    sign = re.escape(begin).replace("/", r"\/")
    return [
        f"start: TEXT | before{calls}",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{sign}(.|\n)*/",
        rf"before[lazy]: /(.|\n)*{sign}/",
    ]
