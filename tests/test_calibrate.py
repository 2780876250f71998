"""Timing passes on a real runner: on pages that are backed, and anew for other code."""

from __future__ import annotations

from collections.abc import Iterator
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
from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.control.adaptive import AdaptivePlanner
from engine.control.options import PlannerOptions
from engine.control.report import measuring
from engine.errors import ConfigurationError
from engine.model import version
from engine.model.version import passes_version
from engine.prepare import measure, warm_up
from tests.drafters import ScriptedDrafter
from tests.fakes import FakeRunner, load_fake, make_engine

PAGES, PAGE_SIZE = 24, 4


class Recorder(FakeRunner):
    """Notes the pages that every pass may read."""

    def __init__(self) -> None:
        super().__init__(PAGES, PAGE_SIZE)
        self.contexts: list[list[int]] = []
        self.pages: list[set[int]] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes nothing: what is timed is up to others."""
        self.contexts.append(batch.context_lengths.tolist())
        self.pages.append(set(batch.page_tables.flatten().tolist()))
        assert batch.positions.max() < batch.page_tables.shape[1] * PAGE_SIZE
        return torch.zeros(batch.num_logits, 1)


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
    options = measure(PlannerOptions(8), config, [load_fake()] * 2, [target, draft], pool)
    assert target.contexts
    assert draft.contexts
    assert options.calibration is not None
    assert options.draft_calibrations["model"].measured
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    planner = AdaptivePlanner(options)
    rounds = options.draft_calibrations["model"].rows_seconds(1)
    assert planner.costs.draft("model").round_seconds > rounds
    alone = measure(PlannerOptions(8), config, [load_fake()], [target], pool)
    assert alone.calibration == options.calibration  # from the cache
    assert not alone.draft_calibrations


def test_the_warm_up_is_no_experience() -> None:
    """First calls take long, and a machine that starts several servers is busy."""
    built = make_engine(drafter="lookup", mode="auto")
    warm_up(built.engine, built.rules)
    planner = measuring(built.engine.parts.planner)
    assert planner is not None
    assert (planner.steps, planner.baseline.samples, planner.costs.target.samples) == (0, 0, 0)
    assert planner.meter.seconds == 0.0
    assert planner.acceptance.outcomes == 0
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
        def forward(self, batch: Batch) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            out = super().forward(batch)
            getattr(out, "logits", out).fill_(outcome)
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
