"""What a step took: every second of it belongs to one part, and a pass to whoever computed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.build import BuiltEngine
from engine.cache.pages import PagePool
from engine.calibrate import PassTimer, load_calibration
from engine.control.planner import Assignment, FixedPlanner
from engine.core import Engine
from engine.judge import Judge
from engine.laps import Laps
from engine.meter.gain import Gain
from engine.model.passes import Pass
from engine.sampling import Draw, Drawn, RowSampler
from engine.stats import StepStats
from tests.fakes import Around, FakeRunner, Run, ask, make_engine
from tests.tiny_models import EOS, VOCAB

LAUNCH = 1e-5  # seconds until a device has been told what to do


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def working(self, seconds: float, result: Any = None) -> Callable[..., Any]:
        """Work that takes so long."""

        def work(*_: object) -> Any:
            self.now += seconds
            return result

        return work


# -- the stopwatch ---------------------------------------------------------------------------


def test_laps_leave_no_gap() -> None:
    clock = Clock()
    laps = Laps(clock)
    assert laps.time("schedule", clock.working(1.0, "plan")) == "plan"
    clock.now += 0.25  # between two parts: it belongs to the next
    laps.time("commit", clock.working(2.0))
    assert (laps["schedule"], laps["commit"]) == (1.0, 2.25)
    assert (laps.end("schedule"), laps.end("commit")) == (101.0, 103.25)
    assert laps.total == 3.25
    with pytest.raises(KeyError):
        laps["learn"]


def test_laps_know_the_step_before() -> None:
    clock = Clock()
    first = Laps(clock)
    assert (first.between, first.before) == (0.0, {})
    first.time("commit", clock.working(1.0))
    first.time("learn", clock.working(0.5))
    clock.now += 3.0
    second = Laps(clock, first)
    assert second.between == 3.5  # it was over with its commit
    assert second.before["learn"] == 0.5
    third = Laps(clock, second)  # after one that was not committed
    assert (third.between, third.before) == (0.0, {})
    third.time("commit", clock.working(1.0))
    third.rest()
    clock.now += 7.0
    assert Laps(clock, third).between == 0.0


# -- a device --------------------------------------------------------------------------------


class Device(Around):
    """A runner whose passes have merely begun when `forward` returns.

    Args:
        seconds: of a pass with so many rows.
    """

    def __init__(self, runner: Any, clock: Clock, seconds: Callable[[int], float]) -> None:
        super().__init__(runner)
        self.clock, self.seconds, self.done = clock, seconds, clock.now
        self.passes: list[float] = []

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        passed = super().forward(batch, features)
        took = self.seconds(batch.input_ids.numel())
        self.passes.append(took)
        self.done = max(self.done, self.clock.now) + took
        self.clock.now += LAUNCH

        def seconds() -> float:
            self.wait()
            return took

        return dataclasses.replace(passed, seconds=seconds)

    def wait(self) -> None:
        """Until all passes are over."""
        self.clock.now = max(self.clock.now, self.done)


class Waiting(RowSampler):
    """Stands for a sampler on the device: what comes back waits for it."""

    def __init__(self, device: Device) -> None:
        super().__init__(VOCAB)
        self._device = device

    def draw(self, logits: torch.Tensor, draws: Seq[Draw]) -> list[Drawn]:
        self._device.wait()
        self._device.clock.now += 0.002
        return super().draw(logits, draws)


class Planner(FixedPlanner):
    """Takes its time, and notes what it is told of a step's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.told: list[StepStats] = []

    def choose(self, plan: Any) -> Assignment:
        self._clock.now += 0.001
        return super().choose(plan)

    def observe(self, plan: Any, verdicts: Any, stats: StepStats, gain: Gain) -> None:
        self._clock.now += 0.003
        self.told.append(stats)
        super().observe(plan, verdicts, stats, gain)


def on_device(waiting: bool) -> tuple[BuiltEngine, Device, Planner]:
    """An engine with lookup drafts whose target runs on a device."""
    clock = Clock()
    built = make_engine(drafter="lookup")
    parts = built.engine.parts
    device = Device(parts.target, clock, lambda rows: 0.01 + 0.005 * rows)
    planner = Planner(clock)
    judge = Judge(VOCAB, frozenset({EOS}), sampler=Waiting(device) if waiting else None)
    engine = Engine(
        dataclasses.replace(parts, target=device, planner=planner, judge=judge),
        max_model_len=built.engine.max_model_len,
        default_drafters=built.engine.default_drafters,
        max_draft=built.engine.max_draft,
        clock=clock,
    )
    return dataclasses.replace(built, engine=engine), device, planner


@pytest.mark.parametrize("waiting", [False, True])
def test_a_pass_takes_what_its_device_says(waiting: bool) -> None:
    """Whether drawing waits for it or nobody does before its time is asked for."""
    built, device, planner = on_device(waiting)
    prompts = [(5, 6, 7, 8) * 8, (9, 10, 11) * 4, (3,) * 70]  # the last is read in two steps
    requests = [ask(f"r{i}", p, 48, ignore_eos=True) for i, p in enumerate(prompts)]
    done = Run(built, requests).finish()
    assert len(done.stats) == len(device.passes) > 5
    assert [stats.verify_seconds for stats in done.stats] == device.passes
    assert any(sum(stats.drafted_by_position) for stats in done.stats)
    for stats in done.stats:
        parts = stats.plan_seconds + stats.draft_seconds + stats.verify_seconds
        assert stats.seconds == pytest.approx(parts + stats.sample_seconds)
        assert stats.sample_seconds == pytest.approx(0.002 if waiting else 0.0, abs=1e-9)
        assert stats.choose_seconds == pytest.approx(0.001)
        assert stats.plan_seconds == pytest.approx(0.001)
    assert done.stats[0].learn_seconds == 0.0
    for stats in done.stats[1:]:
        assert stats.learn_seconds == pytest.approx(0.003)
    assert [stats.verify_seconds for stats in planner.told] == device.passes


def test_a_device_that_fails_late_fails_before_the_commit() -> None:
    """Its errors come with the first wait, which nothing of the step has outlived."""
    built, device, _ = on_device(waiting=False)
    requests = [ask("r", (5, 6, 7), 6, ignore_eos=True)]
    going = Run(built, requests)
    going.step()
    device.wait = lambda: 1 / 0  # type: ignore[method-assign]
    going.step()
    answer = going.answers["r"]
    assert answer.failed
    assert len(answer.choices[0].tokens) == 1
    going.finish()


def test_calibration_measures_passes_and_not_launches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    pool = PagePool(64, 4)
    fake = FakeRunner(64, 4)
    fake._tokens = [1] * len(fake._tokens)  # what lies in the pages does not matter
    device = Device(fake, Clock(), lambda rows: 0.01 + 0.005 * rows)
    timer = PassTimer(device, pool, sequences=2, tokens=32)
    assert timer.seconds(6, 2, 8) == pytest.approx(0.04)
    timer.close()
    found = load_calibration("model", "float32", device, pool, most_rows=8, longest=64)
    for rows in (1, 2, 4, 8):
        assert found.rows_seconds(rows) == pytest.approx(0.01 + 0.005 * rows, rel=0.01)
