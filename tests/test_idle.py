"""Idle work: it runs between requests, and one that fails harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

import pytest

from engine.async_engine import AsyncEngine
from engine.build import BuiltEngine
from engine.idle import IdleWork
from engine.stats import AuditStats, StepStats
from engine.types import Event, Finished, Request
from tests.fakes import ask, make_config, make_engine


class Task:
    """Counts what it is told, and raises in one method."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.calls: list[str] = []
        self.events: list[Event] = []

    def _note(self, method: str) -> None:
        self.calls.append(method)
        if method == self._fails:
            raise ZeroDivisionError(method)

    @property
    def patience(self) -> float | None:
        self._note("patience")
        return 0.01

    def watch(self, request: Request) -> None:
        self._note(f"watch {request.request_id}")

    def observe(self, events: Seq[Event]) -> None:
        self._note("observe")
        self.events += events

    def step(self) -> AuditStats | None:
        self._note("step")
        return AuditStats(1, 0, 0)

    def close(self) -> None:
        self._note("close")


def serve(task: Task, rounds: int = 2) -> tuple[list[list[Event]], list[AuditStats]]:
    """One request after the other, with idle moments between them."""
    found: list[AuditStats] = []
    steps: list[StepStats] = []
    built = make_engine(drafter="lookup")
    built = BuiltEngine(built.engine, built.info, built.rules, task)

    async def run() -> list[list[Event]]:
        engine = AsyncEngine(
            make_config(), on_step=steps.append, on_audit=found.append, build=lambda *_: built
        )
        await engine.start()
        answers = []
        for i in range(rounds):
            answers.append([event async for event in engine.submit(ask(f"r{i}", (3, 4, 3), 6))])
            for _ in range(500):
                if len(found) > 3 * i + 2 or "close" in task.calls:
                    break
                await asyncio.sleep(0.01)
        await engine.stop()
        return answers

    answers = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(steps) == sum(s.decode_sequences for s in steps), "idle steps are no steps"
    return answers, found


def test_the_thread_works_on_a_task_while_there_are_no_requests() -> None:
    task = Task()
    answers, found = serve(task)
    assert len(found) > 3
    assert [e for answer in answers for e in answer] == task.events
    calls = [c for c in task.calls if c != "patience"]
    first, second = calls.index("watch r0"), calls.index("watch r1")
    assert "step" in calls[first:second], "it runs between two requests"
    last = max(i for i, c in enumerate(calls[:second]) if c == "observe")
    assert set(calls[first + 1 : last + 1]) == {"observe"}, "it rests while one is served"
    assert "close" not in calls


@pytest.mark.parametrize("method", ["patience", "watch r0", "observe", "step"])
def test_a_task_that_fails_is_dropped_and_requests_are_served(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(method)
    answers, _ = serve(task)
    for answer in answers:
        assert isinstance(answer[-1], Finished)
    assert task.calls.count(method) == 1
    assert task.calls[-1] == "close", "it gives back what it holds, and is asked no more"
    assert "idle work failed and is dropped" in caplog.text


def test_no_task_is_no_work() -> None:
    idle = IdleWork(None)
    assert idle.patience is None
    assert idle.step() is None
    idle.watch(ask("r", (1,)))
    idle.observe([])
