"""One line after another: a question, or a command."""

from __future__ import annotations

from server.terminal import commands
from server.terminal.chat import Chat


async def talk(chat: Chat) -> None:
    """Goes on until the reader has no more, or /exit."""
    chat.greet()
    while True:
        try:
            text = (await chat.reader.read()).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            chat.say("/exit or ctrl-d leaves.")
            continue
        if not text:
            continue
        if not text.startswith("/"):
            await chat.ask(text)
        elif text.startswith("//"):  # a message that begins with a slash
            await chat.ask(text[1:])
        elif not await commands.run(chat, text):
            return
