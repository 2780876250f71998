"""The numerics self-test: honest about kernels that depend on the batch, and harmless."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.build import check_numerics
from engine.cache.pages import PagePool
from engine.model.selftest import SHAPES, InvarianceReport, check_invariance
from server.cli.doctor import doctor
from server.cli.settings import Settings
from server.metrics.registry import Metrics
from tests.fakes import Around, load_fake, make_engine, tiny
from tests.server.support import make_info
from tests.tiny_models import CONTEXT, VOCAB, load


def check(runner: Any, pool: PagePool | None = None, **more: Any) -> InvarianceReport:
    pool = pool or PagePool(runner.store.num_pages, runner.store.page_size)
    report = check_invariance(runner, pool, VOCAB, CONTEXT, **more)
    pool.check([])
    assert pool.num_used == 0
    return report


class Uneven(Around):
    """A runner whose logits depend on how many rows share the pass, and how many times it ran.

    Args:
        push: what is added to a logit in passes of more rows than one.
    """

    def __init__(self, runner: Any, push: float) -> None:
        super().__init__(runner)
        self._push = push
        self.shapes: set[int] = set()

    def change(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        rows = batch.input_ids.numel()
        self.shapes.add(rows)
        if rows > 1:
            logits[:, 5] += self._push
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "runner"), [("smollm", "native"), ("qwen3", "torch")])
def test_our_kernels_are_invariant(family: str, runner: str, dtype: torch.dtype) -> None:
    report = check(load(family, dtype, runner).make_runner(100, 4))
    assert report.invariant
    assert report.rows_compared > 100
    assert report.max_difference == report.turns_per_thousand == 0
    assert "do not depend on the batch" in str(report)


def test_every_shape_is_tried() -> None:
    runner = Uneven(load_fake().make_runner(100, 4), 0.0)
    assert check(runner).invariant
    assert runner.shapes >= set(SHAPES)


def test_a_difference_of_one_bit_is_found() -> None:
    report = check(Uneven(load_fake().make_runner(100, 4), 1e-6), seconds=0.0)
    assert not report.invariant
    assert report.mismatching_rows > report.rows_compared / 2
    assert 0 < report.max_difference < 1e-5
    assert report.turns_per_thousand == 0


def test_turned_tokens_are_counted_per_thousand() -> None:
    report = check(Uneven(load_fake().make_runner(100, 4), 100.0), seconds=0.0)
    assert report.turned_rows > report.rows_compared / 2
    assert report.turns_per_thousand == 1000 * report.turned_rows / report.rows_compared
    assert f"{report.turns_per_thousand:.1f} of 1,000" in str(report)


def test_more_time_gives_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # a clock that goes on by a second with each look
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("engine.model.selftest.time", clock)
    short = check(Uneven(load_fake().make_runner(100, 4), 1e-3), seconds=0.0)
    long = check(Uneven(load_fake().make_runner(100, 4), 1e-3), seconds=3.0)
    assert long.rows_compared >= 2 * short.rows_compared


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_a_tiny_cache_is_no_obstacle(pages: int) -> None:
    assert check(load("llama").make_runner(pages, 4)).invariant


def test_a_short_context_is_respected() -> None:
    runner, pool = load("llama").make_runner(50, 4), PagePool(50, 4)
    assert check_invariance(runner, pool, VOCAB, 7).invariant


def test_an_engine_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    sound = check_numerics(make_engine(tiny()))
    assert sound.info.row_invariant is True
    assert "bit for bit" in sound.info.numerics
    assert not caplog.records
    uneven = check_numerics(make_engine(wrap=lambda runner: Uneven(runner, 1e-3)))
    assert uneven.info.row_invariant is False
    assert "of 1,000 greedy tokens" in uneven.info.numerics
    assert caplog.records[-1].levelname == "WARNING"
    uneven.engine.check()


@pytest.mark.parametrize(("found", "sample"), [(True, "1.0"), (False, "0.0"), (None, None)])
def test_metrics_show_it_and_unknown_is_no_value(found: bool | None, sample: str | None) -> None:
    text = Metrics("m").render(make_info(row_invariant=found), step_age=0.0).decode()
    lines = [line for line in text.splitlines() if line.startswith("specserve_row_invariant{")]
    expected = [] if sample is None else [f'specserve_row_invariant{{model_name="m"}} {sample}']
    assert lines == expected


def test_doctor_runs_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.tiny_models import make_model

    directory = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    lines: list[str] = []
    doctor(Settings(model=str(directory), dtype="float32", threads=1), lines.append)
    [line] = [line for line in lines if line.startswith("ok    numerics")]
    assert "bit for bit" in line
