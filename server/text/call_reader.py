"""Tells tool calls from text while an answer streams."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from server.text.calls import CallFormat

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call: its name in its first piece, then its arguments as they come."""

    index: int
    name: str | None
    arguments: str


class _Object:
    """Where a JSON object that grows ends, and the arguments within it."""

    def __init__(self) -> None:
        self.position = self._depth = 0  # characters looked at; open brackets
        self._string = self._escaped = False
        self.arguments: int | None = None  # where they begin, once that is known
        self.arguments_end: int | None = None
        self.sent = 0
        self.end: int | None = None

    def follow(self, text: str) -> None:
        """Looks at what is new of it."""
        for i in range(self.position, len(text)):
            character = text[i]
            if self._string:
                self._string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1 and self.arguments is not None and self.arguments_end is None:
                    self.arguments_end = i + 1
                if self._depth == 0:
                    self.position = self.end = i + 1
                    return
        self.position = len(text)


class CallReader:
    """Reads one answer; what looks like a call and is none stays text.

    Args:
        form: how calls are written.

    Attributes:
        calls: how many have begun.
    """

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held = ""  # not yet told apart
        self._mode = "text" if form.begin else "start"
        self._object = _Object()
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Takes more of the answer; returns text, and pieces of calls, that are certain."""
        return _apart(self.read(text))

    def finish(self) -> tuple[str, list[CallPiece]]:
        """What was held back, once the answer is over."""
        return _apart(self.read("", final=True))

    def read(self, text: str, *, final: bool = False) -> list[str | CallPiece]:
        """Text and pieces of calls that are certain, in the order in which they were written.

        Args:
            text: more of the answer.
            final: it is the last.
        """
        self._held += text
        parts: list[str | CallPiece] = []
        steps = {"start": self._start, "text": self._text, "after": self._after}
        while True:
            mode, held = self._mode, len(self._held)
            if mode == "call":
                self._call(parts, final)
            else:
                parts.append(steps[mode](final))
            if (self._mode, len(self._held)) == (mode, held):
                return [part for part in parts if part != ""]

    def _start(self, final: bool) -> str:
        """At the very beginning, where the call itself may stand."""
        text = self._held.lstrip()
        if text.startswith("{"):
            self._mode = "call"
        elif text or final:
            self._mode = "text"
        return ""

    def _text(self, final: bool) -> str:
        """Text, up to the sign of a call or what may become it."""
        held, begin = self._held, self._begin
        place = held.find(begin) if begin else -1
        if place >= 0:
            self._mode, self._object = "call", _Object()
            self._held = held[place + len(begin) :]
            return self._worth(held[:place])
        keep = 0
        if begin and not final:
            keep = next(
                n for n in range(min(len(held), len(begin)), -1, -1) if held.endswith(begin[:n])
            )
        if self.calls and not final and not held[: len(held) - keep].strip():
            return ""  # what is between calls, unless text follows
        self._held = held[len(held) - keep :]
        return self._worth(held[: len(held) - keep])

    def _worth(self, text: str) -> str:
        return "" if self.calls and not text.strip() else text

    def _call(self, parts: list[str | CallPiece], final: bool) -> None:
        if self._form.listed and self._held.lstrip().startswith("["):
            self._held = self._held.lstrip()[1:]
        one, held = self._object, self._held
        if one.arguments is None and (header := _HEADER.match(held)) is not None:
            name = _read_json(header[1])
            one.arguments = one.sent = header.end()
            parts.append(CallPiece(self.calls, name, ""))
            self.calls += 1
        if not held.lstrip().startswith("{"):
            if held.strip() or final:
                parts.append(self._begin + held)
                self._held, self._mode = "", "text"
            return
        one.follow(held)
        if one.arguments is not None:
            until = one.position if one.arguments_end is None else one.arguments_end
            if until > one.sent:
                parts.append(CallPiece(self.calls - 1, None, held[one.sent : until]))
                one.sent = until
        if one.end is None and not final:
            return
        end = len(held) if one.end is None else one.end
        if one.arguments is None and not self._whole(held[:end], parts):
            parts.append(self._begin + held[:end])
        self._held, self._mode, self._object = held[end:], "after", _Object()

    def _whole(self, text: str, parts: list[str | CallPiece]) -> bool:
        """Reads a call whose fields stand in another order; whether it is one."""
        found = _read_json(text)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return False
        if not self._begin and not found.keys() & {"arguments", "parameters"}:
            return False  # an answer in JSON that names something
        arguments = found.get("arguments", found.get("parameters", {}))
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(CallPiece(self.calls, found["name"], spelled))
        self.calls += 1
        return True

    def _after(self, final: bool) -> str:
        """Behind a call: its end, or the next of a list."""
        text, sign = self._held.lstrip(), self._end
        if self._form.listed:
            if text.startswith(","):
                self._held, self._mode = text[1:], "call"
            elif text or final:
                self._held, self._mode = text.removeprefix("]"), "text"
        elif text.startswith(sign) or final or not sign.startswith(text):
            self._held, self._mode = text.removeprefix(sign), "text"
        return ""


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _apart(parts: list[str | CallPiece]) -> tuple[str, list[CallPiece]]:
    """The text, and the pieces of calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, CallPiece)]
