"""What the questions of a chat ask for, and `/set`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("on or off")
    return text == "on"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Fields of every request; None leaves one to the server, which checks the ranges."""

    temperature: float | None = 0.0
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    speculation: bool | None = None
    drafter: str | None = None
    num_speculative_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        """Their part of a request's body."""
        plain = {
            name: getattr(self, name) for name in ("temperature", "max_tokens", "top_p", "seed")
        }
        asked = {
            "enabled": self.speculation,
            "drafter": self.drafter,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        body = {name: value for name, value in plain.items() if value is not None}
        if wished := {name: value for name, value in asked.items() if value is not None}:
            body["speculation"] = wished
        return body


_READERS: Mapping[str, Callable[[str], Any]] = {
    "temperature": _number,
    "max_tokens": _whole,
    "top_p": _number,
    "seed": _whole,
    "speculation": _switch,
    "drafter": str,
    "num_speculative_tokens": _whole,
}

NAMES = tuple(_READERS)


def with_set(wishes: Wishes, name: str, value: str) -> Wishes:
    """The wishes with one more: a value, or `-` to leave it to the server.

    Raises:
        ValueError: there is no such wish, or it takes something else; says so.
    """
    if name not in _READERS:
        raise ValueError(f"There is no {name!r} to set; choose from {', '.join(NAMES)}.")
    if value == "-":
        return replace(wishes, **{name: None})
    try:
        return replace(wishes, **{name: _READERS[name](value)})
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be {value!r}; it takes {error}, or - for the server's own."
        ) from None
