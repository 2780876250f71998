"""What a chat understands that begins with a slash."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rich.table import Table

from server.terminal.chat import Chat
from server.terminal.interrupt import unless_stopped
from server.terminal.numbers import table
from server.terminal.race import Race
from server.terminal.safe import safe
from server.terminal.wishes import NAMES, with_set

#: What a command does with the text behind it; False ends the chat.
_Action = Callable[[Chat, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what may stand behind it, what it is for, and what it does."""

    takes: str
    about: str
    action: _Action


async def run(chat: Chat, line: str) -> bool:
    """Does what a line with a slash says; returns whether the chat goes on."""
    name, _, rest = line[1:].partition(" ")
    if (command := COMMANDS.get(name)) is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean /{near[0]}?" if near else "."
        chat.complain(
            f"There is no /{safe(name)}{hint} A message that begins with a slash needs two."
        )
        return True
    return await command.action(chat, rest.strip())


async def _help(chat: Chat, _: str) -> bool:
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(style="dim")
    for name, command in COMMANDS.items():
        shown.add_row(f"/{name} {command.takes}".rstrip(), command.about)
    chat.console.print(shown, highlight=False, markup=False)
    return True


async def _race(chat: Chat, prompt: str) -> bool:
    """The prompt as the conversation's next message, or its last question once more."""
    messages = chat.messages
    if prompt:
        messages = [*messages, {"role": "user", "content": prompt}]
    elif messages:
        messages = messages[:-1]
    else:
        chat.complain("Nothing has been asked yet; write /race and a question.")
        return True
    body = chat.body(messages)
    wished = {k: v for k, v in body.pop("speculation", {}).items() if k != "enabled"}
    if body.get("temperature") != 0:
        body.setdefault("seed", secrets.randbelow(2**31))  # so that both must say the same
    race = Race(chat.link, body, wished, chat.look.palette)
    chat.console.print()
    await unless_stopped(race.run(chat.console))
    return True


async def _stats(chat: Chat, _: str) -> bool:
    if not chat.answers:
        chat.say("Nothing has been answered yet.")
        return True
    chat.console.print(table(chat.answers, await chat.link.status()), highlight=False)
    return True


async def _colours(chat: Chat, _: str) -> bool:
    on = not chat.look.colours
    chat.say(f"colours {'on' if on else 'off'}")
    chat.change_look(colours=on, refused=chat.look.refused and on)
    return True


async def _refused(chat: Chat, _: str) -> bool:
    on = not chat.look.refused
    chat.say(f"refused guesses {'shown' if on else 'hidden'}")
    chat.change_look(colours=chat.look.colours or on, refused=on)
    return True


async def _system(chat: Chat, text: str) -> bool:
    if text:
        chat.system = "" if text == "-" else text
    chat.say(f"system prompt: {safe(chat.system)}" if chat.system else "no system prompt")
    return True


async def _set(chat: Chat, text: str) -> bool:
    name, _, value = text.partition(" ")
    if name and value.strip():
        try:
            chat.wishes = with_set(chat.wishes, name, value.strip())
        except ValueError as error:
            chat.complain(safe(str(error)))
            return True
    elif name and name not in NAMES:
        chat.complain(f"There is no {name!r} to set; choose from {', '.join(NAMES)}.")
        return True
    for wish in [name] if name else NAMES:
        now = getattr(chat.wishes, wish)
        chat.say(f"{wish}: {'left to the server' if now is None else now}")
    return True


async def _clear(chat: Chat, _: str) -> bool:
    chat.messages.clear()
    chat.say("a new conversation")
    return True


async def _exit(_: Chat, __: str) -> bool:
    return False


COMMANDS = {
    "race": Command(
        "[QUESTION]", "the same question with speculation on and off, side by side", _race
    ),
    "stats": Command("", "speed and guesses of the last answer and of the session", _stats),
    "colours": Command("", "token by token, in the colour of who guessed it", _colours),
    "refused": Command("", "with the guesses that the model refused", _refused),
    "system": Command("[TEXT]", "the system prompt; - for none", _system),
    "set": Command("[NAME VALUE]", f"{', '.join(NAMES)}; - for the server's own", _set),
    "clear": Command("", "begins a new conversation", _clear),
    "help": Command("", "this", _help),
    "exit": Command("", "leaves, as ctrl-d does", _exit),
}
