"""One answer while it comes: its tokens, who guessed them, and what it took.

What the server does not tell is None, and shown as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of about a token.

    Args:
        drafter: who guessed it; None = the model said it, or nobody tells.
        refused: guesses in whose place it stands.
    """

    text: str
    drafter: str | None = None
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """A streamed answer.

    Args:
        began: `time.perf_counter()` when it was asked for.
    """

    began: float
    pieces: list[Piece] = field(default_factory=list)
    drafted: int | None = None
    accepted: int | None = None
    finish_reason: str | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False
    ended: float | None = None
    _first: float | None = None  # when text came first ...
    _last: float | None = None  # ... and last
    _at_first: int | None = None  # tokens that came with the first text
    _told: int | None = None  # tokens by the server's own count
    _traced: int = 0  # tokens by the traces of the chunks

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)

    def feed(self, event: Mapping[str, Any], now: float) -> None:
        """Takes one chunk of the stream, read at `now`."""
        if usage := event.get("usage"):
            self._told = usage.get("completion_tokens", self._told)
        if speculation := event.get("speculation"):
            self.speculation = speculation
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._take(choice, now)

    def _take(self, choice: Mapping[str, Any], now: float) -> None:
        delta, trace = choice.get("delta") or {}, choice.get("trace")
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if trace is not None:
            self._trace(trace)
        elif text:
            self.pieces.append(Piece(text))
        if text or trace is not None:
            if self._first is None:
                self._first = now
                self._at_first = self._told if self._told is not None else self._traced or None
            self._last = now

    def _trace(self, trace: Mapping[str, Any]) -> None:
        for token in trace["tokens"]:
            refused = tuple(token.get("refused", ()))
            self.pieces.append(Piece(token["text"], token["drafter"], refused))
        self._traced += len(trace["tokens"])
        self.drafted = (self.drafted or 0) + trace["drafted"]
        self.accepted = (self.accepted or 0) + trace["accepted"]

    # -- numbers ---------------------------------------------------------------------------

    @property
    def tokens(self) -> int | None:
        """Tokens so far, by the server's count or else by its traces."""
        return self._told if self._told is not None else self._traced or None

    @property
    def first_seconds(self) -> float | None:
        """From the question to the first text."""
        return None if self._first is None else self._first - self.began

    @property
    def seconds(self) -> float | None:
        """From the question to the end."""
        return None if self.ended is None else self.ended - self.began

    @property
    def decoding(self) -> tuple[int, float] | None:
        """Tokens after those that came first, and the seconds they took."""
        if self._first is None or self._last is None or self._at_first is None:
            return None
        later, seconds = (self.tokens or 0) - self._at_first, self._last - self._first
        return (later, seconds) if later > 0 and seconds > 0 else None

    @property
    def rate(self) -> float | None:
        """Tokens a second, from the first text on."""
        return None if self.decoding is None else self.decoding[0] / self.decoding[1]

    @property
    def passes(self) -> int | None:
        """Passes of the model; known at the end."""
        return self.speculation.get("target_passes") or None

    @property
    def tokens_per_pass(self) -> float | None:
        """As the server counts it; known at the end."""
        return self.speculation.get("tokens_per_pass")

    @property
    def speedup(self) -> float | None:
        """The server's own measure, by the clock against plain decoding."""
        return self.speculation.get("speedup")

    @property
    def guesses(self) -> tuple[int, int] | None:
        """Draft tokens that were kept, and that were checked: None = nobody tells."""
        drafted = self.speculation.get("drafted", self.drafted)
        accepted = self.speculation.get("accepted", self.accepted)
        return None if drafted is None or accepted is None else (accepted, drafted)
