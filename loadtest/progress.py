"""What a run shows while it goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from loadtest.measure import Answer
from loadtest.plan import UNBOUNDED, Block
from loadtest.runner import BlockResult
from loadtest.stats import successes, throughput


class LiveProgress:
    """Follows a run of `blocks` blocks on `console`; a context manager.

    On a terminal one bar shows the running block and one the whole run; in a log only finished
    blocks are printed.
    """

    def __init__(self, console: Console, blocks: int) -> None:
        self._console = console
        self._blocks = blocks
        self._started = 0
        self._failed = self._all_failed = 0
        self._task: TaskID | None = None
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._whole = self._bars.add_task("all", total=self._blocks, failed=0)
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Prints one plain line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def block_started(self, block: Block) -> None:
        """A block begins."""
        self._started += 1
        self._failed = 0
        expected = len(block.indices) if len(block.indices) < UNBOUNDED else None
        label = f"[{self._started}/{self._blocks}] {block}"
        self._task = self._bars.add_task(label, total=expected, failed=0)

    def answered(self, answer: Answer) -> None:
        """A request of the running block ended."""
        self._failed += answer.error is not None
        if self._task is not None:
            self._bars.update(self._task, advance=1, failed=self._failed)

    def block_finished(self, result: BlockResult) -> None:
        """The running block ended."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._all_failed += sum(record.answer.error is not None for record in result.records)
        self._bars.update(self._whole, advance=1, failed=self._all_failed)
        good = len(successes([result]))
        rate = throughput([result])
        speed = "unknown tok/s" if rate is None else f"{rate:.1f} tok/s"
        self.say(
            f"[{self._started}/{self._blocks}] {result.block}: {good} ok, "
            f"{len(result.records) - good} failed, {speed}, {result.seconds:.1f} s"
        )
