"""What the command line says while it works: on stderr, so that stdout carries results only."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_logger = logging.getLogger("specserve.server")

_PLAIN_STEPS = 4  # lines that a download without a terminal takes


class Console:
    """Progress for a person at a terminal, plain lines for a log.

    Args:
        stream: where to; None = stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._bar: Progress | None = None
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_bar()

    def say(self, sentence: str) -> None:
        """One line."""
        self._end_bar()
        print(sentence, file=self._stream, flush=True)

    def progress(self, done: int, total: int) -> None:
        """How far a download is, in bytes."""
        if not total:
            return
        if self._terminal:
            self._draw(done, total)
            return
        step = done * _PLAIN_STEPS // total
        if step > self._steps:
            self._steps = step
            share = 100 * step // _PLAIN_STEPS
            self.say(f"{share} % of {total / 1e6:.0f} MB downloaded")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Says what is being waited for, while it is; yields who may be told how far it is."""
        if not self._terminal:
            self.say(f"{what} ...")
            yield lambda _: None
            return
        self._end_bar()
        with RichConsole(file=self._stream).status(Text(what)) as status:
            yield lambda line: status.update(Text(f"{what}: {line.strip()}", overflow="ellipsis"))

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            columns = (
                TextColumn("downloading"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=RichConsole(file=self._stream), transient=True)
            self._bar.start()
            self._bar.add_task("", total=total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LogConsole(Console):
    """Says everything through the log, where every line of stderr must have the log's form."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())  # not a terminal

    def say(self, sentence: str) -> None:
        """One record."""
        _logger.info(sentence)
