"""A conversation on a terminal: questions, answers as they come, and commands."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

from rich.console import Console, Group
from rich.text import Text

from server.terminal.answer import Answer
from server.terminal.interrupt import unless_stopped
from server.terminal.link import Link, Trouble
from server.terminal.numbers import running, summary
from server.terminal.safe import safe
from server.terminal.view import Look, Scroll, drawing
from server.terminal.wishes import Wishes


class Reader(Protocol):
    """Where questions come from."""

    async def read(self) -> str:
        """The next one.

        Raises:
            EOFError: there will be no more.
            KeyboardInterrupt: it was given up.
        """


@dataclass(slots=True)
class Chat:
    """A conversation with a model.

    Args:
        link: to a server that has been learned about.
        system: instructions that stand before the conversation; empty = none.
    """

    link: Link
    console: Console
    reader: Reader
    look: Look
    wishes: Wishes = field(default_factory=Wishes)
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        """A quiet line of our own."""
        self.console.print(Text(sentence, "dim"), highlight=False)

    def complain(self, sentence: str) -> None:
        """What went wrong."""
        self.console.print(Text(sentence, "red"), highlight=False)

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """A request with these messages."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.wishes.body(), "messages": before + messages}

    async def ask(self, text: str) -> None:
        """Sends a message and shows the answer; a message without one is taken back."""
        question = {"role": "user", "content": text}
        answer = Answer(perf_counter())
        self.console.print()
        try:
            answer.stopped = not await unless_stopped(self._answer(question, answer))
        except Trouble as trouble:
            self.complain(str(trouble))
        answer.ended = perf_counter()
        if not answer.text:
            if answer.stopped:
                self.say("stopped before the first token")
            return
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        legend = self.look.palette.legend()
        if self.look.plain_text and legend.plain:
            self.console.print(legend)
        self.say(summary(answer))
        if answer.finish_reason == "length" and answer.tokens == self.wishes.max_tokens:
            self.say(f"cut at {answer.tokens} tokens; /set max_tokens 4096 allows more")

    async def _answer(self, question: dict[str, str], answer: Answer) -> None:
        scroll = Scroll(self.console, self.look, answer.pieces)

        def frame() -> Group:
            scroll.advance()
            return Group(scroll.rest(), Text(running(answer), "dim"))

        try:
            async with drawing(self.console, frame):
                asked = self.body([*self.messages, question])
                async with aclosing(self.link.ask(asked, answer)) as chunks:
                    async for _ in chunks:
                        pass
        finally:
            scroll.end()

    def show_again(self) -> None:
        """The last answer in its present look."""
        if self.answers:
            self.console.print()
            scroll = Scroll(self.console, self.look, self.answers[-1].pieces)
            scroll.end()
            if self.look.plain_text and self.look.palette.legend().plain:
                self.console.print(self.look.palette.legend())

    def change_look(self, *, colours: bool, refused: bool) -> None:
        """Shows answers in another way from now on, and the last one again."""
        self.look = replace(self.look, colours=colours, refused=refused)
        if (colours or refused) and not self.link.traces:
            self.complain("This server does not tell who guessed a token.")
        self.show_again()

    def greet(self) -> None:
        """Says who is there, and how to go on."""
        drafters = ", ".join(self.link.drafters) or "unknown"
        line = Text.assemble(
            (safe(self.link.model), "bold"),
            (f"  at {self.link.url}, drafters: {safe(drafters)}", "dim"),
        )
        self.console.print(line, highlight=False)
        self.say("Enter sends, Alt-Enter begins a line, Ctrl-C stops an answer. /help shows more.")
