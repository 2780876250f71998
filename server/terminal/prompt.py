"""The line where a person writes: several lines, history, and completion of commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style

from server.terminal.commands import COMMANDS
from server.terminal.history import make_private

_STYLE = Style.from_dict(
    {
        "bottom-toolbar": "noreverse ansibrightblack",
        "prompt": "bold ansigreen",
        "completion-menu.completion": "noreverse bg:default",
    }
)


class Prompt:
    """Reads questions from a terminal.

    Args:
        history: file of what was typed; None = kept in memory alone.
        foot: the line at the foot of the screen.
        keys: for tests; None = the terminal.
        screen: the same.

    Raises:
        OSError: the history cannot be written.
    """

    def __init__(
        self,
        history: Path | None,
        foot: Callable[[], str],
        keys: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        kept: History = InMemoryHistory()
        if history is not None:
            make_private(history)
            kept = FileHistory(str(history))
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", "› ")],
            multiline=True,
            history=kept,
            key_bindings=_bindings(),
            completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
            complete_while_typing=Condition(self._types_a_command),
            prompt_continuation="  ",
            bottom_toolbar=foot,
            style=_STYLE,
            erase_when_done=False,
            reserve_space_for_menu=4,
            input=keys,
            output=screen,
        )

    def _types_a_command(self) -> bool:
        text = self._session.default_buffer.text
        return text.startswith("/") and "\n" not in text

    async def read(self) -> str:
        """The next question, which may have several lines.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        return await self._session.prompt_async()


def _bindings() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J begin a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
