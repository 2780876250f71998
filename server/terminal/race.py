"""A race: the same question with speculation on and off, side by side and at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from server.terminal.answer import Answer
from server.terminal.link import Link, Trouble
from server.terminal.numbers import summary, times
from server.terminal.palette import Palette
from server.terminal.view import Guarded, Tail, coloured, drawing

#: Narrower terminals have one lane above the other.
_SIDE_BY_SIDE = 72

#: Lines of a lane while it runs, if the screen has them.
_LANE_LINES = 16

#: With fewer tokens than this, chance and the first token are most of the time.
_ENOUGH_TOKENS = 16


@dataclass(slots=True)
class Racer:
    """One of the two."""

    name: str
    asked: Mapping[str, Any]
    answer: Answer = field(default_factory=lambda: Answer(perf_counter()))
    trouble: Trouble | None = None


@dataclass(slots=True)
class Race:
    """Two answers to one question.

    Args:
        body: of the question, without `speculation`; greedy or with a seed, so that both must
            say the same.
        asked: what it asks of speculation.
    """

    link: Link
    body: Mapping[str, Any]
    asked: Mapping[str, Any]
    palette: Palette
    on: Racer = field(init=False)
    off: Racer = field(init=False)

    def __post_init__(self) -> None:
        self.on = Racer("speculation on", {**self.asked, "enabled": True})
        self.off = Racer("speculation off", {"enabled": False})

    async def run(self, console: Console) -> None:
        """Runs it and shows it; the lanes stay on the screen, with the verdict."""
        started = perf_counter()
        try:
            async with drawing(
                console, lambda: self._lanes(console, min(_LANE_LINES, console.size.height - 8))
            ):
                for racer in (self.on, self.off):
                    racer.answer.began = started
                await asyncio.gather(self._follow(self.on), self._follow(self.off))
        finally:  # also of a race that was stopped
            for racer in (self.on, self.off):
                racer.answer.stopped = racer.answer.ended is None
            console.print(self._lanes(console, None))
            legend = self.palette.legend()
            if legend.plain:
                console.print(legend)
            console.print(Text(self.verdict(), "bold"))

    async def _follow(self, racer: Racer) -> None:
        try:
            body = {**self.body, "speculation": dict(racer.asked)}
            async with aclosing(self.link.ask(body, racer.answer)) as chunks:
                async for _ in chunks:
                    pass
        except Trouble as trouble:
            racer.trouble = trouble
        racer.answer.ended = perf_counter()

    def _lanes(self, console: Console, height: int | None) -> RenderableType:
        panels = [self._panel(racer, height) for racer in (self.on, self.off)]
        if console.width < _SIDE_BY_SIDE:
            return Group(*panels)
        lanes = Table.grid(expand=True)
        lanes.add_column(ratio=1)
        lanes.add_column(ratio=1)
        lanes.add_row(*panels)
        return lanes

    def _panel(self, racer: Racer, height: int | None) -> Panel:
        answer = racer.answer
        text = Guarded(coloured(answer.pieces, self.palette, refused=False))
        seconds = (answer.ended or perf_counter()) - answer.began
        numbers = [f"{seconds:.2f} s"]
        if answer.tokens:
            numbers.append(f"{answer.tokens} tokens")
        if answer.rate is not None:
            numbers.append(f"{answer.rate:.1f} tokens/s")
        return Panel(
            text if height is None else Tail(text, max(3, height)),
            title=f"[bold]{racer.name}[/]",
            subtitle=" · ".join(numbers),
            title_align="left",
            subtitle_align="right",
            border_style="dim" if answer.ended is None else "green",
            height=None if height is None else max(5, height + 2),
        )

    # -- what came out ---------------------------------------------------------------------

    @property
    def same(self) -> bool:
        """Whether both said the same, letter by letter."""
        return self.on.answer.text == self.off.answer.text

    @property
    def factor(self) -> float | None:
        """The plain answer's seconds over the other's; None unless both came to the same end."""
        on, off = self.on.answer, self.off.answer
        if self.on.trouble or self.off.trouble or not self.same:
            return None
        if on.seconds is None or off.seconds is None or on.stopped or off.stopped:
            return None
        return off.seconds / on.seconds if (on.tokens or 0) >= _ENOUGH_TOKENS else None

    def verdict(self) -> str:
        """What came out, in a sentence or two."""
        on, off = self.on.answer, self.off.answer
        for racer in (self.on, self.off):
            if racer.trouble is not None:
                return f"No result, since {racer.name} failed: {racer.trouble}"
        if on.seconds is None or off.seconds is None:
            return "Stopped: no result."
        if not self.same:
            return (
                "The texts differ, so there is no factor. Greedy and seeded answers of a server "
                "whose numerics are exact never do: specserve audit looks into it."
            )
        own = f" By the server's own measure: {times(on.speedup)}." if on.speculation else ""
        text = (
            f"The same text, letter by letter: {on.seconds:.2f} s with speculation, "
            f"{off.seconds:.2f} s without, side by side. "
        )
        if self.factor is None:
            return f"{text}Factor unknown: fewer than {_ENOUGH_TOKENS} tokens tell nothing.{own}"
        return f"{text}{self.factor:.2f} times as fast.{own}"

    def details(self) -> str:
        """Both answers' numbers, a line each."""
        return "\n".join(f"{racer.name}: {summary(racer.answer)}" for racer in (self.on, self.off))
