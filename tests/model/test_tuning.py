"""Variants of the kernels: the fastest is picked, noise is not, and none changes a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from engine import calibrate
from engine.cache.pages import PagePool
from engine.calibrate import load_tuning
from engine.model import tuning
from engine.model.fewbit_linear import FewbitPacker
from engine.model.linear import Packer
from engine.model.passes import Pass
from engine.model.quantized import quantize_weight
from engine.model.tuning import DENSE, FEWBIT, Knob, apply, knobs_for, tune
from tests.fakes import FakeRunner

USUAL = {knob.name: knob.values[0] for knob in (*DENSE, *FEWBIT)}


@pytest.fixture(autouse=True)
def _as_usual() -> Iterator[None]:
    yield
    apply(USUAL)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the kernels were told last."""
    told: dict[str, int] = {}
    monkeypatch.setattr(tuning, "apply", lambda choices: told.update(choices))
    return told


def machine(
    told: dict[str, int], best: dict[str, int], noise: float = 0.01
) -> Callable[[int], float]:
    """A pass takes a tenth less for each thing that is as it should be here; it is fast in some
    minutes and slow in others."""
    dice, passes = random.Random(1), iter(range(10_000))

    def seconds(rows: int) -> float:
        wrong = sum(told[name] != value for name, value in best.items())
        slow = 1.5 if next(passes) % 40 >= 20 else 1.0
        return rows * slow * 0.9**-wrong * dice.gauss(1, noise)

    return seconds


def test_the_fastest_is_picked(applied: dict[str, int]) -> None:
    best = {"fewbit_ahead": 32, "fewbit_rows": 3}
    found = tune(machine(applied, best), FEWBIT)
    assert found == {**USUAL, **best} == applied
    assert tune(machine(applied, {"dense_fetched": 1}), DENSE) == {**USUAL, "dense_fetched": 1}


def test_noise_changes_nothing(applied: dict[str, int]) -> None:
    assert tune(machine(applied, {}, noise=0.02), (*DENSE, *FEWBIT)) == USUAL == applied


def test_each_kind_of_weights_has_its_own() -> None:
    assert knobs_for("Q4_1, Q8_0") == FEWBIT
    assert knobs_for("bfloat16") == DENSE
    assert knobs_for("float32, Q6_K") == FEWBIT


def every(knobs: tuple[Knob, ...]) -> list[dict[str, int]]:
    return [{**USUAL, knob.name: value} for knob in knobs for value in knob.values]


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 13])
def test_no_variant_changes_a_number(rows: int) -> None:
    dice = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(96, 160, generator=dice), torch.randn(rows, 160, generator=dice)
    dense = Packer().linear(weight, None)
    fewbit = FewbitPacker().linear(quantize_weight(weight, "Q4_1"))
    expected = dense(x), fewbit(x)
    for choices in every((*DENSE, *FEWBIT)):
        apply(choices)
        assert torch.equal(dense(x), expected[0]), choices
        assert torch.equal(fewbit(x), expected[1]), choices


def test_what_was_picked_is_kept(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, applied: dict[str, int]
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    pool, runner = PagePool(24, 4), FakeRunner(24, 4)
    passed = Pass(torch.zeros(1, 1), lambda: 1e-4)
    monkeypatch.setattr(runner, "forward", lambda _batch: passed)
    monkeypatch.setattr(calibrate.tuning, "tune", lambda *_: {**USUAL, "fewbit_ahead": 4})
    found = load_tuning("m", "float32", runner, pool, "Q4_1")
    monkeypatch.setattr(calibrate.tuning, "tune", lambda *_: pytest.fail("tried again"))
    assert load_tuning("m", "float32", runner, pool, "Q4_1") == found == applied
    assert pool.num_used == 0
