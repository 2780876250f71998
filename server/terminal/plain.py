"""Questions from a pipe, answers into one: text and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from time import perf_counter
from typing import Any, TextIO

from server.terminal.answer import Answer
from server.terminal.link import Link, Trouble
from server.terminal.safe import safe
from server.terminal.wishes import Wishes


async def answer_plainly(
    link: Link, wishes: Wishes, system: str, questions: Iterable[str], out: TextIO
) -> None:
    """Answers the questions one after another, as one conversation; each answer ends with a line
    feed, and is written as it comes.

    Args:
        system: instructions that stand before the conversation; empty = none.

    Raises:
        Trouble: a question could not be answered.
    """
    messages: list[dict[str, str]] = []
    if system:
        messages.append({"role": "system", "content": system})
    for question in questions:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question.strip()})
        answer = Answer(perf_counter())
        try:
            await _write(link, {**wishes.body(), "messages": messages}, answer, out)
        except Trouble:
            if answer.text:
                out.write("\n")
            raise
        out.write("\n" if not answer.text.endswith("\n") else "")
        out.flush()
        messages.append({"role": "assistant", "content": answer.text})


async def _write(link: Link, body: dict[str, Any], answer: Answer, out: TextIO) -> None:
    written = 0
    async with aclosing(link.ask(body, answer)) as chunks:
        async for _ in chunks:
            for piece in answer.pieces[written:]:
                out.write(safe(piece.text))
            written = len(answer.pieces)
            out.flush()
