"""Runs the blocks of a plan one after another and keeps every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, Protocol
from uuid import uuid4

from loadtest.asking import Asking, Message, build_body
from loadtest.client import Client
from loadtest.measure import Answer
from loadtest.plan import Block, Lane, Prompt

#: Connection failures in a row after which a block gives up: the server is gone.
DEAD_AFTER = 20

#: Seconds between two looks at how late the event loop is.
_LAG_INTERVAL = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """One answer and what was asked; `turn` counts from 0 within a conversation."""

    index: int
    turn: int
    category: str
    answer: Answer


@dataclass(slots=True)
class BlockResult:
    """What one block measured.

    Args:
        seconds: the window: from the block's start to its last answer.
        complete: False when the run was interrupted within it; such blocks are not compared.
        max_in_flight: most conversations under way at once.
        lag: seconds by which 99 % of the client's own timers were late at most.
    """

    block: Block
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    max_in_flight: int = 0
    lag: float = 0.0


class Progress(Protocol):
    """Told what happens while the run goes on."""

    def block_started(self, block: Block) -> None: ...

    def answered(self, answer: Answer) -> None: ...

    def block_finished(self, result: BlockResult) -> None: ...


@dataclass(frozen=True, slots=True)
class Runner:
    """Sends the prompts of each block, closed loop or open loop. Needs a running event loop.

    Args:
        prompts: at least one; request i asks prompt i, counted round and round.
        run_id: makes the cache salts of this run its own.
    """

    client: Client
    asking: Asking
    prompts: Sequence[Prompt]
    progress: Progress
    run_id: str = field(default_factory=lambda: uuid4().hex)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Ends the run now: cuts what is in flight and keeps what is finished."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    async def warm_up(self, lane: Lane, requests: int, concurrency: int) -> None:
        """Sends unmeasured requests, so that no lane pays for first-time work."""
        todo = iter(range(requests))

        async def worker() -> None:
            for index in todo:
                prompt = self.prompts[-1 - index % len(self.prompts)]
                body = build_body(self.asking, lane, prompt, index, [("user", prompt.turns[0])])
                await self.client.ask(lane.target, self.asking.path, body)

        await self._unless_stopped(_all(worker() for _ in range(concurrency)))

    async def run(
        self, blocks: Sequence[Block], duration: float | None = None
    ) -> list[BlockResult]:
        """Runs `blocks` in order; ends early on `stop` or when the time is used up.

        Args:
            duration: seconds for the whole run, shared evenly by the blocks still to come.
                When a block's share is used up it starts nothing new and lets its requests
                finish. None = no limit.
        """
        results: list[BlockResult] = []
        end = float("inf") if duration is None else perf_counter() + duration
        for number, block in enumerate(blocks):
            now = perf_counter()
            if self.stopped or now >= end:
                break
            self.progress.block_started(block)
            run = _BlockRun(self, block, deadline=now + (end - now) / (len(blocks) - number))
            async with _watch_lag(run.result):
                await self._measure(run)
            results.append(run.result)
            self.progress.block_finished(run.result)
        return results

    async def _measure(self, run: _BlockRun) -> None:
        started = perf_counter()
        result = run.result
        result.complete = await self._unless_stopped(run.load(started))
        ends = [record.answer.started + record.answer.seconds for record in result.records]
        # An interrupted window lasts until now: its unfinished requests took time as well.
        last = max(ends, default=started) if result.complete else perf_counter()
        result.seconds = last - started

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits `work`, or cancels it on `stop`. Returns whether it came to its end."""
        task = asyncio.ensure_future(work)
        stopper = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopper}, return_when=asyncio.FIRST_COMPLETED)
            finished = task.done()
        finally:
            stopper.cancel()
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return finished


class _BlockRun:
    """One block while it runs.

    Args:
        deadline: `perf_counter()` after which nothing new starts.
    """

    def __init__(self, runner: Runner, block: Block, deadline: float) -> None:
        self.result = BlockResult(block)
        self._runner = runner
        self._block = block
        self._deadline = deadline
        self._in_flight = 0
        self._broken = 0  # connection failures in a row

    async def load(self, started: float) -> None:
        """Sends all requests of the block and waits for their answers."""
        if self._block.level.kind == "concurrency":
            await self._closed_loop()
        else:
            await self._open_loop(started)

    def _over(self) -> bool:
        return perf_counter() >= self._deadline or self._broken >= DEAD_AFTER

    async def _closed_loop(self) -> None:
        """A fixed number of conversations is always under way, until the indices run out."""
        indices = iter(self._block.indices)

        async def worker() -> None:
            for index in indices:
                if self._over():
                    return
                await self._converse(index, None)

        await _all(worker() for _ in range(int(self._block.level.value)))

    async def _open_loop(self, started: float) -> None:
        """Conversations start at Poisson arrivals, the same in all lanes of a round."""
        rng = Random(f"{self._runner.asking.seed}:{self._block.level}:{self._block.round}")
        due = started
        async with asyncio.TaskGroup() as group:
            for index in self._block.indices:
                due += rng.expovariate(self._block.level.value)
                if due >= self._deadline:
                    return
                await asyncio.sleep(max(0.0, due - perf_counter()))
                if self._over():
                    return
                group.create_task(self._converse(index, due))

    async def _converse(self, index: int, due: float | None) -> None:
        """Sends the turns of one conversation one after another; ends where one fails.

        Times of the first turn count from `due`, when it should have started, so that a
        client that falls behind does not flatter the server.
        """
        runner, target = self._runner, self._block.lane.target
        prompt = runner.prompts[index % len(runner.prompts)]
        messages: list[Message] = []
        self._in_flight += 1
        self.result.max_in_flight = max(self.result.max_in_flight, self._in_flight)
        try:
            for turn, text in enumerate(prompt.turns[: runner.asking.max_turns]):
                messages.append(("user", text))
                body = build_body(runner.asking, self._block.lane, prompt, index, messages)
                if runner.asking.isolate_cache:
                    body["cache_salt"] = f"{runner.run_id}: {self._block}"
                answer = await runner.client.ask(target, runner.asking.path, body, due)
                self._keep(Record(index, turn, prompt.category, answer))
                if answer.error is not None:
                    return
                messages.append(("assistant", answer.text))
                due = None
        finally:
            self._in_flight -= 1

    def _keep(self, record: Record) -> None:
        self.result.records.append(record)
        self._broken = self._broken + 1 if record.answer.error == "connection" else 0
        self._runner.progress.answered(record.answer)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in work:
            group.create_task(coroutine)


@asynccontextmanager
async def _watch_lag(result: BlockResult) -> AsyncIterator[None]:
    """Measures how late timers fire: a busy client adds its own delay to every time it takes."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before = perf_counter()
            await asyncio.sleep(_LAG_INTERVAL)
            lags.append(perf_counter() - before - _LAG_INTERVAL)

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        result.lag = sorted(lags)[int(0.99 * len(lags))] if lags else 0.0
