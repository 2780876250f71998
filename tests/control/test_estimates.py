"""Outliers do not poison; lasting changes pass."""

from __future__ import annotations

import random

import pytest

from engine.control.estimates import Level, NonNegativeLinear, Slope


def test_a_level_ignores_isolated_outliers() -> None:
    level = Level(1.0)
    for i in range(100):
        level.add(100.0 if i % 10 == 3 else 2.0)
    assert level.value == pytest.approx(2.0, rel=0.01)


def test_a_level_survives_a_slow_first_call() -> None:
    level = Level(1.0)
    for sample in (500.0, 1.1, 1.1, 1.1, 1.1, 1.1):
        level.add(sample)
    assert level.value == pytest.approx(1.1, rel=0.15)


def test_a_level_follows_a_lasting_change() -> None:
    level = Level(1.0)
    for _ in range(50):
        level.add(1.0)
    for _ in range(15):
        level.add(3.0)
    assert level.value == pytest.approx(3.0, rel=0.15)


def test_a_linear_model_finds_its_terms() -> None:
    rng = random.Random(1)
    model = NonNegativeLinear((1.0, 1.0))
    for _ in range(2000):
        features = (1.0, float(rng.randint(0, 10)))
        model.update(features, (0.02 + 0.003 * features[1]) * rng.uniform(0.97, 1.03))
    assert model.predict((1.0, 0.0)) == pytest.approx(0.02, rel=0.15)
    assert model.predict((1.0, 10.0)) == pytest.approx(0.05, rel=0.1)


def test_a_linear_model_stays_non_negative_and_ignores_pauses() -> None:
    model = NonNegativeLinear((1.0, 1.0))
    for i in range(300):
        model.update((1.0, 4.0), 5.0 if i % 20 == 7 else 0.01)
    assert all(weight > 0 for weight in model.weights)
    assert model.predict((1.0, 4.0)) == pytest.approx(0.01, rel=0.05)


def test_terms_that_were_not_involved_do_not_move() -> None:
    model = NonNegativeLinear((0.5, 0.25), known=True)
    for _ in range(20):
        model.update((1.0, 0.0), 2.0)
    assert model.weights[1] == 0.25
    assert model.weights[0] > 1.0


def test_a_negative_measurement_cannot_break_it() -> None:
    model = NonNegativeLinear((1e-5, 1e-5))
    for _ in range(50):
        model.update((1.0, 1.0), -1.0)
    for _ in range(200):
        model.update((1.0, 1.0), 1e-3)
    assert model.predict((1.0, 1.0)) == pytest.approx(1e-3, rel=0.1)


def test_a_slope_is_right_on_average_and_never_negative() -> None:
    rng = random.Random(2)
    slope = Slope(0.0, 1.0)
    values = []
    for step in range(3000):
        units = rng.randint(1, 30)
        slope.add(0.5 * units + rng.gauss(0.0, 20.0), units)
        values += [slope.value] if step > 300 else []
    assert sum(values) / len(values) == pytest.approx(0.5, rel=0.1)
    for _ in range(300):
        slope.add(-1.0, 1.0)
    assert slope.value == 0.0
