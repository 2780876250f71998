"""As many compute threads as really get a core each.

The threads of a pass wait for each other hundreds of times, so the slowest of them sets the pace:
one that has no core, because somebody else's work runs there, makes all of them stand still. n
threads of which e are waiting for a core at any time do about the work of n (1 - e) alone, one
fewer that all have cores that of n - 1. So where e > 1 / n, one thread fewer is faster.

The kernel says how long a thread was ready to run and had no core. That is looked at several times
a second while there is work. Where it says nothing (not Linux), nothing is changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.stats import StepStats

logger = logging.getLogger(__name__)

#: Name of the engine's thread; those that its parallel regions start inherit it.
_NAME = "specserve-step"

#: Seconds of work that a judgement takes.
_WINDOW = 0.25

#: Seconds until more threads are tried again, doubled each time in vain.
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 60.0

#: Longest that it is tried out, seconds.
_TRIAL = 2.0

#: By thread, the seconds that it has run, and that it was ready to and had no core.
CoreTimes = Mapping[int, tuple[float, float]]


class ThreadWatch:
    """Sets torch's and the kernels' number of threads, and lowers it while cores are taken.

    Belongs to the thread that makes it, and must be made before that thread has computed anything
    in parallel.

    Args:
        most: threads while all of them get cores.
        read: the core times of the threads that compute, by their ids.
        clock: monotonic seconds.
        apply: sets the number of threads of the calling thread's parallel regions.
    """

    def __init__(
        self,
        most: int,
        read: Callable[[], CoreTimes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        apply: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self.most = most
        self.waiting: float | None = None  # threads that waited for a core, on average
        self.settled = most == 1  # whether it has looked, and found nothing to change
        self._read = read or _named_times()
        self._clock = clock
        self._apply = apply
        self._mine = threading.get_native_id()
        self._looked = clock()
        self._times = self._read()
        self._pause = _FIRST_PAUSE
        self._retry = 0.0
        self._trying = False
        self._set(most)

    def look(self) -> None:
        """Called between passes, as often as there are any: looks whether threads had cores, and
        changes their number if another is better."""
        now = self._clock()
        if self.most == 1 or now - self._looked < _WINDOW:
            return
        self._looked = now
        times = self._read()
        used = {i: _since(self._times.get(i), spent) for i, spent in times.items()}
        ran, waited = used.get(self._mine, (0.0, 0.0))
        if ran + waited < _WINDOW:  # not enough work since then
            return
        self._times = times
        self.waiting = sum(wait for _, wait in used.values()) / (ran + waited)
        before = self.threads
        self._decide(self.waiting, now)
        self.settled = self.threads == before

    def note(self, stats: StepStats) -> StepStats:
        """The same statistics, with how many threads compute and how many wait."""
        return replace(stats, threads=self.threads, waiting_threads=self.waiting)

    def _decide(self, waiting: float, now: float) -> None:
        if self.threads > 1 and waiting * self.threads > 1.0:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._trying else _FIRST_PAUSE
            self._retry, self._trying = now + self._pause, False
            self._set(max(1, self.threads - max(1, round(waiting))))
            logger.info(
                "%.1f threads had to wait for a core: %d of %d threads compute",
                *(waiting, self.threads, self.most),
            )
        elif self.threads == self.most:
            self._trying = False
        elif self._trying or now >= self._retry:
            self._trying = True
            self._set(self.threads + 1)

    def _set(self, threads: int) -> None:
        self.threads = threads
        self._apply(threads)


def _since(before: tuple[float, float] | None, after: tuple[float, float]) -> tuple[float, float]:
    ran, waited = before or (0.0, 0.0)
    return after[0] - ran, after[1] - waited


def _named_times() -> Callable[[], CoreTimes]:
    """Names the calling thread; returns what reads the times of all threads of that name."""
    tasks = Path("/proc/self/task")
    named: dict[str, bool] = {}
    try:
        (tasks / str(threading.get_native_id()) / "comm").write_text(_NAME)
    except OSError:
        return dict

    def read() -> CoreTimes:
        found: dict[int, tuple[float, float]] = {}
        for task in os.listdir(tasks):
            try:
                if task not in named:
                    named[task] = (tasks / task / "comm").read_text().strip() == _NAME
                if named[task]:
                    ran, waited, _ = (tasks / task / "schedstat").read_text().split()
                    found[int(task)] = int(ran) / 1e9, int(waited) / 1e9
            except (OSError, ValueError):  # it has just ended; or there is no such file
                continue
        return found

    return read


def try_out(most: int) -> tuple[int, float | None]:
    """Computes for a moment; how many threads that settles on.

    Returns:
        Threads, and how many of them had no core on average when last looked at; None = unknown.
    """
    found: list[tuple[int, float | None]] = []

    def compute() -> None:
        watch, matrix = ThreadWatch(most), torch.ones(512, 512)
        until = time.monotonic() + _TRIAL
        while not watch.settled and time.monotonic() < until:
            matrix @ matrix
            watch.look()
        found.append((watch.threads, watch.waiting))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return found[0]
