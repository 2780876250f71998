"""Timing passes on a real runner: on pages that are backed, and anew for other code."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import calibrate
from engine.batch import Batch
from engine.build import assemble
from engine.cache.pages import PagePool
from engine.calibrate import PassTimer, load_calibration
from engine.calibration import Calibration
from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.control.costs import VerifyCost
from engine.draft.entry import PagedModel
from engine.errors import ConfigurationError
from engine.load import Load
from engine.model import version
from engine.model.passes import Pass
from engine.model.version import passes_version
from engine.prepare import measure, warm_up
from engine.status import adaptive
from tests.drafters import ScriptedDrafter
from tests.fakes import FakeRunner, load_fake, make_engine

PAGES, PAGE_SIZE = 24, 4


class Recorder(FakeRunner):
    """Notes the pages that every pass may read."""

    def __init__(self, seconds: float = 1e-4) -> None:
        super().__init__(PAGES, PAGE_SIZE)
        self.seconds = seconds
        self.contexts: list[list[int]] = []
        self.pages: list[set[int]] = []

    def forward(self, batch: Batch, _features: tuple[int, ...] = ()) -> Pass:
        """Computes nothing: what is timed is up to others."""
        self.contexts.append(batch.context_lengths.tolist())
        self.pages.append(set(batch.page_tables.flatten().tolist()))
        assert batch.positions.max() < batch.page_tables.shape[1] * PAGE_SIZE
        return Pass(torch.zeros(batch.num_logits, 1), lambda: self.seconds)


@pytest.fixture
def pool() -> Iterator[PagePool]:
    """All of its pages free, before and after."""
    pool = PagePool(PAGES, PAGE_SIZE)
    yield pool
    assert pool.num_used == 0
    pool.check([])


def test_every_page_was_read_before_it_is_timed(pool: PagePool) -> None:
    runner = Recorder()
    timer = PassTimer(runner, pool, sequences=3, tokens=32)
    assert runner.contexts == [[32, 32, 32]]
    for rows, sequences, context in ((1, 1, 8), (8, 3, 16), (16, 1, 30), (5, 3, 100)):
        assert timer.seconds(rows, sequences, context) > 0.0
    assert runner.contexts[1:] == [[9], [19, 19, 18], [32], [32, 32, 32]]
    assert all(pages <= runner.pages[0] for pages in runner.pages)
    timer.close()


@pytest.mark.parametrize("longest", [1, 7, 64, 10_000])
def test_what_is_cached_counts_for_the_same_code_only(
    longest: int, pool: PagePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    runner = Recorder()

    def load() -> int:
        before = len(runner.contexts)
        calibration = load_calibration(
            "model", "float32", runner, pool, most_rows=64, longest=longest
        )
        assert calibration.measured
        return len(runner.contexts) - before

    assert load() > 3
    assert load() == 0
    monkeypatch.setattr(calibrate, "passes_version", lambda: "of other kernels")
    assert load() > 3
    assert max(max(contexts) for contexts in runner.contexts) <= longest


def test_a_calibration_that_ran_out_of_time_is_made_again_at_the_next_start(
    pool: PagePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine that was busy at one start told is not believed for ever; yet it is known
    what a prompt costs meanwhile."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    for seconds, kept in ((2.0, 0), (1e-4, 1)):
        made = load_calibration("m", "float32", Recorder(seconds), pool, most_rows=64, longest=90)
        assert made.whole is bool(kept)
        assert VerifyCost(made, 512).seconds(40, 1, 40, 1600, 39) is not None
        assert len(list(tmp_path.glob("calibration/*"))) == kept


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-70],
        lambda content: content.replace(b"0.0", b"9.9", 1),
        lambda content: b"\xff" + content,
    ],
    ids=["empty", "half", "without-checksum", "other-numbers", "no-text"],
)
def test_a_damaged_calibration_is_measured_anew(
    damage: Callable[[bytes], bytes],
    pool: PagePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    runner = Recorder()

    def load() -> Calibration:
        return load_calibration("model", "float32", runner, pool, most_rows=8, longest=32)

    load()
    [path] = (tmp_path / "calibration").iterdir()
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    before = len(runner.contexts)
    made = load()
    assert len(runner.contexts) > before
    before = len(runner.contexts)
    assert load() == made
    assert len(runner.contexts) == before


def test_a_full_disk_costs_the_calibration_nothing_but_its_place(
    pool: PagePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    directory = tmp_path / "calibration"
    directory.mkdir()
    left = directory / ".making-killed"  # by a process that ended while it wrote
    left.touch()
    os.utime(left, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, most[1]))
    try:
        made = load_calibration("model", "float32", Recorder(), pool, most_rows=8, longest=32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert made.measured
    assert list(directory.iterdir()) == []


def test_the_version_covers_kernels_and_runners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {passes_version(), passes_version()}
    assert len(versions) == 1
    monkeypatch.setattr(version, "__file__", str(tmp_path / "model" / "version.py"))
    for name in ("runner.py", "kernels/attention.h", "kernels/kernels.cpp"):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        versions.add(passes_version())
        path.write_text("changed")
        versions.add(passes_version())
    assert len(versions) == 7


def test_the_draft_model_is_measured_too(
    pool: PagePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its rounds cost is not to be learnt from the first requests."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    target, draft = Recorder(), Recorder()
    speculation = SpeculationConfig(drafter="model", draft_model=ModelConfig("small"))
    config = EngineConfig(ModelConfig("large"), speculation=speculation)
    large, small = PagedModel(load_fake(), target, 0), PagedModel(load_fake(), draft, 1)
    costs = measure(config, large, {"model": small}, pool)
    assert target.contexts
    assert draft.contexts
    assert costs.calibrated
    assert costs.draft("model").runs_model
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    alone = measure(config, large, {}, pool)
    load = Load(1, 1, 4, 16, 64)
    assert alone.target.predict(load) == costs.target.predict(load)  # from the cache
    assert not alone.draft("model").runs_model


def test_the_warm_up_is_no_experience() -> None:
    """First calls take long, and a machine that starts several servers is busy."""
    built = make_engine(drafter="lookup", mode="auto")
    warm_up(built.engine, built.rules)
    planner, meter = adaptive(built.engine.parts.planner), built.engine.parts.meter
    assert planner is not None
    assert (planner.steps, meter.baseline.samples, planner.costs.target.samples) == (0, 0, 0)
    assert meter.seconds == 0.0
    assert planner.acceptance.num_sequences == 0
    assert not built.engine.has_work


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (RuntimeError("no kernel"), "The step that served this request failed: RuntimeError"),
        (torch.nan, "logits at position .* are not finite numbers"),
    ],
)
def test_a_warm_up_that_fails_says_what_failed(outcome: Any, said: str) -> None:
    class Failing(FakeRunner):
        def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            out = super().forward(batch, features)
            out.logits.fill_(outcome)
            return out

    built = assemble(EngineConfig(ModelConfig("fake")), replace(load_fake(), make_runner=Failing))
    with pytest.raises(ConfigurationError, match=f"the model fails in the warm-up: .*{said}"):
        warm_up(built.engine, built.rules)


def test_the_warm_up_tries_every_drafter() -> None:
    """Else the first request that one drafts for pays for its first calls."""
    first, second = (ScriptedDrafter(lambda _, length: [1] * length) for _ in range(2))
    second.name = "second"
    built = make_engine(drafters=(first, second))
    warm_up(built.engine, built.rules)
    assert first.proposals > 0
    assert second.proposals > 0
