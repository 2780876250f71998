"""How an answer looks: Markdown, or token by token in the colours of who guessed it.

What is finished is printed and scrolls away like any output; only the last, unfinished part of an
answer and a line of numbers are drawn again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from server.terminal.answer import Piece
from server.terminal.palette import REFUSED, Palette
from server.terminal.safe import safe

_REDRAW_SECONDS = 0.1

#: HTML is shown as it was said: left out, it would be missing.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


@dataclass(frozen=True, slots=True)
class Guarded:
    """A renderable whose text a terminal cannot take for orders, even if Markdown's own escapes
    (such as `&#8238;`) have made it."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield Segment(safe(segment.text), segment.style)


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines of a renderable that is too high for the screen.

    Args:
        height: most lines.
    """

    content: RenderableType
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options, pad=False)
        for line in lines[-self.height :]:
            yield from line
            yield Segment.line()


def markdown(text: str, *, light: bool = False) -> Guarded:
    """A model's Markdown. Addresses of links are written out and lead nowhere by a click."""
    theme = "ansi_light" if light else "ansi_dark"
    made = Markdown("", code_theme=theme, hyperlinks=False)
    made.parsed = _PARSER.parse(safe(text))
    return Guarded(made)


def finished(text: str) -> int:
    """How much of Markdown that still grows will not change any more: the characters of all
    blocks but the last one that has begun in a whole line."""
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _PARSER.parse(whole) if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in whole.split("\n")[: max(starts, default=0)])


def coloured(pieces: Iterable[Piece], palette: Palette, *, refused: bool) -> Text:
    """An answer token by token.

    Args:
        refused: whether to show, faintly, what was guessed wrongly.
    """
    text = Text(overflow="fold")
    for piece in pieces:
        for guess in piece.refused if refused else ():
            text.append(safe(guess).replace("\n", "↵"), REFUSED)
        style = palette.of(piece.drafter) if piece.drafter is not None else ""
        text.append(safe(piece.text), style)
    return text


@dataclass(frozen=True, slots=True)
class Look:
    """How answers are shown.

    Args:
        colours: token by token, instead of Markdown.
        refused: with refused guesses.
    """

    palette: Palette
    colours: bool = False
    refused: bool = False

    @property
    def plain_text(self) -> bool:
        """Whether tokens stand as they were said, without Markdown."""
        return self.colours or self.refused

    def show(self, pieces: Sequence[Piece]) -> RenderableType:
        """A part of an answer."""
        if self.plain_text:
            return coloured(pieces, self.palette, refused=self.refused)
        return markdown("".join(piece.text for piece in pieces), light=self.palette.light)


class Scroll:
    """Shows an answer while it grows.

    Args:
        pieces: of the answer; more are added meanwhile.
    """

    def __init__(self, console: Console, look: Look, pieces: Sequence[Piece]) -> None:
        self._console = console
        self._look = look
        self._pieces = pieces
        self._shown = 0  # pieces, or characters of Markdown

    def advance(self) -> None:
        """Prints what will not change any more."""
        rest = self._rest()
        if self._look.plain_text:
            ends = [i for i, piece in enumerate(rest, 1) if piece.text.endswith("\n")]
            if ends:
                self._print(self._look.show(rest[: ends[-1]]))
                self._shown += ends[-1]
        elif ready := finished(rest[0].text):
            self._print(self._look.show([Piece(rest[0].text[:ready])]))
            self._console.print()
            self._shown += ready

    def rest(self) -> RenderableType:
        """What may still change."""
        return self._look.show(self._rest())

    def end(self) -> None:
        """Prints all that is left."""
        rest = self._rest()
        if "".join(piece.text for piece in rest).strip():
            shown = self._look.show(rest)
            if isinstance(shown, Text):
                shown.rstrip()
            self._print(shown)

    def _rest(self) -> Sequence[Piece]:
        if self._look.plain_text:
            return self._pieces[self._shown :]
        text = safe("".join(piece.text for piece in self._pieces))
        return [Piece(text[self._shown :])]

    def _print(self, shown: RenderableType) -> None:
        if isinstance(shown, Text) and shown.plain.endswith("\n"):
            shown.right_crop(1)  # printing ends a line by itself
        self._console.print(shown, highlight=False)


@asynccontextmanager
async def drawing(console: Console, frame: Callable[[], RenderableType]) -> AsyncIterator[None]:
    """Draws `frame` again and again at the foot of the screen; it is gone at the end."""

    def whole() -> RenderableType:
        return Tail(frame(), max(4, console.size.height - 2))

    with Live(
        console=console,
        auto_refresh=False,
        transient=True,
        get_renderable=whole,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="visible",
    ) as live:

        async def draw() -> None:
            while True:
                live.refresh()
                await asyncio.sleep(_REDRAW_SECONDS)

        drawer = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawer
