"""Who may use the tokenizer next: short texts pass long ones, and nothing waits without bound."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from engine.errors import Overloaded

T = TypeVar("T")

#: Texts up to this length are quicker done than handed to a thread.
AT_ONCE_CHARACTERS = 4096
#: Longer texts go into the other lane.
SHORT_CHARACTERS = 64 * 1024
#: One lane holds at most so many characters, unless they are one request's.
MOST_CHARACTERS = 8 * 1024 * 1024

#: What a tokenizer reads in a second, before it was measured.
_FIRST_RATE = 1e6
_RATE_WEIGHT = 0.3


class Lanes:
    """Two threads for work on texts: one takes only short texts, the other takes the rest.

    The tokenizer's native code lets go of the interpreter's lock, so a long text in one thread
    holds up neither the event loop nor the other lane.
    """

    def __init__(self) -> None:
        self._short = _Lane("tokenizer-short")
        self._long = _Lane("tokenizer-long")

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes time in proportion to `characters`.

        Raises:
            Overloaded: too much waits already.
        """
        return (await self.run_all([(characters, work)]))[0]

    async def run_all(self, parts: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """The results of several works of one request, each with its characters. Others may come
        in between, so a batch of texts holds them up no longer than its longest does.

        Raises:
            Overloaded: too much waits already.
        """
        characters = sum(count for count, _ in parts)
        if characters <= AT_ONCE_CHARACTERS:
            return [work() for _, work in parts]
        lane = self._short if characters <= SHORT_CHARACTERS else self._long
        return cast(list[T], await lane.run_all(parts))


@dataclass(order=True, slots=True)
class _Job:
    due: float
    number: int
    characters: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class _Lane:
    """One thread and what waits for it.

    Jobs go by the time at which they would be done if each had a thread of its own: a shorter
    one passes a longer one, but none that came too late to be done before it. So nobody starves.

    Args:
        name: of the thread.
        clock: seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._jobs: list[_Job] = []
        self._characters = 0  # of all that wait or run
        self._rate = _FIRST_RATE

    async def run(self, characters: int, work: Callable[[], Any]) -> Any:
        return (await self.run_all([(characters, work)]))[0]

    async def run_all(self, parts: Sequence[tuple[int, Callable[[], Any]]]) -> list[Any]:
        """One after the other; together they are admitted or refused."""
        left = sum(characters for characters, _ in parts)
        with self._lock:
            if self._characters and self._characters + left > MOST_CHARACTERS:
                raise self._too_much()
            self._characters += left
        results = []
        try:
            for characters, work in parts:
                left -= characters
                results.append(await self._put(characters, work))
        finally:
            self._leave(left)  # of what nobody waits for any more
        return results

    async def _put(self, characters: int, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        future.add_done_callback(lambda _: self._leave(characters))
        with self._lock:
            due = self._clock() + characters / self._rate
            heapq.heappush(self._jobs, _Job(due, next(self._numbers), characters, work, future))
        self._thread.submit(self._next)
        return await asyncio.wrap_future(future)

    def _too_much(self) -> Overloaded:
        return Overloaded(
            f"The tokenizer still has {self._characters} characters to read; no more than "
            f"{MOST_CHARACTERS} may wait. Try again later, or send shorter texts.",
            retry_after=math.ceil(self._characters / self._rate),
        )

    def _leave(self, characters: int) -> None:
        with self._lock:
            self._characters -= characters

    def _next(self) -> None:
        """Runs the job whose turn it is, in the lane's thread."""
        with self._lock:
            job = heapq.heappop(self._jobs)
        if not job.future.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        started = time.perf_counter()
        try:
            result = job.work()
        except BaseException as error:
            job.future.set_exception(error)
        else:
            self._measure(job.characters / max(time.perf_counter() - started, 1e-9))
            job.future.set_result(result)
        finally:
            del job  # an error holds this frame, which must not hold the text in turn

    def _measure(self, rate: float) -> None:
        self._rate += _RATE_WEIGHT * (rate - self._rate)
