"""Puts a chat together: at a terminal with all that it offers, in a pipe with text alone."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from rich.console import Console

from server.terminal.chat import Chat
from server.terminal.history import history_file
from server.terminal.link import Link, Trouble
from server.terminal.loop import talk
from server.terminal.palette import Palette, has_light_background
from server.terminal.plain import answer_plainly
from server.terminal.safe import safe
from server.terminal.view import Look
from server.terminal.wishes import Wishes

EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Args:
        url: of the server, without `/v1`.
        key: that it wants; empty = none.
        system: instructions that stand before the conversation; empty = none.
        colours: whether to show from the start who guessed a token.
        history: whether to keep in a file what is typed.
        lines: of a pipe: whether each line is a message.
    """

    url: str
    key: str
    wishes: Wishes
    system: str = ""
    colours: bool = False
    history: bool = True
    lines: bool = False


def converse(options: Options) -> int:
    """Talks until there is no more to say; returns the exit code, 1 if the server failed."""
    try:
        asyncio.run(_converse(options))
    except Trouble as trouble:
        print(f"specserve: {trouble}", file=sys.stderr)
        return EXIT_FAILED
    return 0


async def _converse(options: Options) -> None:
    async with Link(options.url, options.key) as link:
        await link.learn()
        if sys.stdin.isatty() and sys.stdout.isatty():
            await _talk(options, link)
        else:
            questions = sys.stdin if options.lines else iter([sys.stdin.read()])
            await answer_plainly(link, options.wishes, options.system, questions, sys.stdout)


async def _talk(options: Options, link: Link) -> None:
    from server.terminal.prompt import Prompt

    screen = Console()
    colourless = screen.no_color or screen.color_system is None
    look = Look(Palette(has_light_background(), colourless), options.colours)

    def foot() -> str:
        return _foot(chat)

    try:
        prompt = Prompt(history_file() if options.history else None, foot)
    except OSError as error:
        print(f"Without history, which cannot be written: {error}", file=sys.stderr)
        prompt = Prompt(None, foot)
    chat = Chat(link, screen, prompt, look, options.wishes, options.system)
    await talk(chat)


def _foot(chat: Chat) -> str:
    """The line at the foot of the screen."""
    temperature = chat.wishes.temperature
    parts = [
        safe(chat.link.model),
        "greedy" if temperature == 0 else f"temperature {temperature}",
        f"colours {'on' if chat.look.colours else 'off'}",
        "/race  /stats  /colours  /help",
    ]
    return "  ·  ".join(parts)
