"""As many threads as get cores: on machines of known size, with neighbours that come and go."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.build import BuiltEngine
from engine.model.threads import ThreadWatch, try_out
from engine.prepare import settle_threads
from tests.control.test_adaptive import make_stats
from tests.fakes import ask, make_config, make_engine, tiny
from tests.test_async_engine import PROMPT, Bench, read, text
from tests.test_core_limits import greedy_text


class Machine:
    """Cores that the engine's threads share fairly with other threads, and a clock."""

    def __init__(self, cores: int, neighbours: int = 0) -> None:
        self.cores, self.neighbours = cores, neighbours
        self.now = 0.0
        self.threads = 0
        self.times: dict[int, tuple[float, float]] = {}
        self.history: list[int] = []

    def watch(self, most: int) -> ThreadWatch:
        return ThreadWatch(most, lambda: dict(self.times), lambda: self.now, self.apply)

    def apply(self, threads: int) -> None:
        self.threads = threads
        self.history.append(threads)

    def tick(self) -> float:
        """A clock that goes on by a third of a second whenever it is asked."""
        self.now += 0.34
        return self.now

    def read_on(self) -> dict[int, tuple[float, float]]:
        """What threads have got that work all the time."""
        share = min(1.0, self.cores / (max(1, self.threads) + self.neighbours))
        for i in range(self.threads):
            ran, waited = self.times.get(threading.get_native_id() + i, (0.0, 0.0))
            spent = 0.34 * share, 0.34 * (1 - share)
            self.times[threading.get_native_id() + i] = ran + spent[0], waited + spent[1]
        return dict(self.times)

    def work(self, watch: ThreadWatch, seconds: float, busy: float = 1.0) -> None:
        """Passes of 20 ms; `busy` of the time."""
        mine = threading.get_native_id()
        until = self.now + seconds
        while self.now < until:
            share = min(1.0, self.cores / (self.threads + self.neighbours))
            for i in range(self.threads):
                ran, waited = self.times.get(mine + i, (0.0, 0.0))
                spent = 0.02 * busy
                self.times[mine + i] = ran + share * spent, waited + (1 - share) * spent
            self.now += 0.02
            watch.look()


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_all_threads_compute_while_nobody_else_does(cores: int) -> None:
    machine = Machine(cores)
    watch = machine.watch(cores)
    machine.work(watch, 100)
    assert machine.history == [cores]
    assert watch.settled
    assert watch.waiting == (None if cores == 1 else 0.0)


@pytest.mark.parametrize("neighbours", [1, 2, 5])
def test_two_threads_become_one_beside_a_neighbour(neighbours: int) -> None:
    machine = Machine(2, neighbours)
    watch = machine.watch(2)
    machine.work(watch, 0.6)
    assert machine.history == [2, 1]


def test_one_core_taken_costs_one_thread() -> None:
    machine = Machine(8, 1)
    watch = machine.watch(8)
    machine.work(watch, 4)
    assert watch.threads == 7


def test_more_threads_than_cores_shrink_to_the_cores() -> None:
    """As where a quota cannot be seen."""
    machine = Machine(4)
    watch = machine.watch(16)
    machine.work(watch, 4)
    assert watch.threads == 4


def test_a_little_waiting_is_no_reason() -> None:
    """The server's own event loop takes some time too; a second thread is worth more."""
    machine = Machine(2)
    watch = machine.watch(2)
    machine.neighbours = 1
    machine.work(watch, 0.06)  # at the beginning of each window
    machine.neighbours = 0
    machine.work(watch, 0.2)
    assert machine.history == [2]
    assert watch.waiting


def test_threads_come_back_when_the_neighbours_have_gone() -> None:
    machine = Machine(8, 8)
    watch = machine.watch(8)
    machine.work(watch, 30)
    low = watch.threads
    assert low <= 2
    machine.neighbours = 0
    machine.work(watch, 75)
    assert watch.threads == 8
    assert watch.settled


def test_trying_in_vain_becomes_rare() -> None:
    """Each attempt costs a window of slow passes."""
    machine = Machine(2, 2)
    watch = machine.watch(2)
    machine.work(watch, 600)
    attempts = machine.history.count(2)
    assert 8 <= attempts <= 16
    assert watch.threads == 1
    machine.neighbours = 0  # and then it is found soon all the same
    machine.work(watch, 61)
    assert watch.threads == 2
    machine.neighbours = 2
    machine.work(watch, 1)
    assert watch.threads == 1
    machine.work(watch, 6)  # a new neighbour may go soon
    assert machine.history[-3:] == [1, 2, 1]


def test_a_server_with_little_to_do_is_judged_by_what_it_does() -> None:
    machine = Machine(2, 2)
    watch = machine.watch(2)
    machine.work(watch, 1.0, busy=0.1)
    assert watch.waiting is None  # not enough to go by
    machine.work(watch, 3.0, busy=0.1)
    assert watch.threads == 1


def test_where_nothing_is_known_nothing_is_changed() -> None:
    applied: list[int] = []
    watch = ThreadWatch(4, dict, time.monotonic, applied.append)
    watch._looked -= 10
    watch.look()
    assert applied == [4]
    assert watch.waiting is None


def test_statistics_say_how_many_compute() -> None:
    machine = Machine(2, 2)
    watch = machine.watch(2)
    machine.work(watch, 0.6)
    noted = watch.note(make_stats())
    assert (noted.threads, noted.waiting_threads) == (1, watch.waiting)


def test_the_kernel_tells_what_threads_of_a_pass_got() -> None:
    """For real: the threads that torch starts are found, and they have run; so are others that
    this process had before."""
    found = []

    def compute() -> None:
        watch = ThreadWatch(3, apply=torch.set_num_threads)
        matrix = torch.ones(700, 700)
        for _ in range(10):
            matrix @ matrix
        found.append(watch._read())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    (times,) = found
    assert sum(ran > 0 for ran, _ in times.values()) >= 3


def test_trying_out_ends_and_leaves_this_thread_alone() -> None:
    before = torch.get_num_threads()
    threads, waiting = try_out(2)
    assert 1 <= threads <= 2
    assert waiting is None or waiting >= 0
    assert torch.get_num_threads() == before


def test_the_engine_looks_after_every_step_and_says_what_it_found() -> None:
    """Threads are given up between two steps; what is said stays the same."""
    bench = Bench()
    plain = bench.built
    crowded = Machine(2, 2)

    def build(*_: object) -> BuiltEngine:
        crowded.now = 1.0
        watch = ThreadWatch(2, crowded.read_on, crowded.tick, crowded.apply)
        return dataclasses.replace(plain, threads=watch)

    bench.engine = AsyncEngine(make_config(), on_step=bench.steps.append, build=build)

    async def body(_: Bench) -> None:
        said = text(await read(bench.engine.submit(ask("r", PROMPT, 12, ignore_eos=True))))
        assert said == greedy_text(PROMPT, 12)

    bench.run(body)
    assert crowded.history[:2] == [2, 1]
    assert [stats.threads for stats in bench.steps[:3]] == [1, 1, 1]
    assert bench.steps[0].waiting_threads == pytest.approx(1.0)


def test_a_start_finds_out_how_many_threads_get_cores_before_it_measures() -> None:
    built = make_engine(tiny())
    crowded = Machine(2, 2)
    watch = ThreadWatch(2, crowded.read_on, crowded.tick, crowded.apply)
    settle_threads(watch, built.engine.parts.target, built.engine.parts.pool)
    assert watch.settled
    assert crowded.history == [2, 1]
    assert built.engine.parts.pool.num_used == 0
    settle_threads(None, built.engine.parts.target, built.engine.parts.pool)  # nobody asks
