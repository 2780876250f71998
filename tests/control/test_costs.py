"""What a step costs: calibrated, and followed while serving."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from engine.calibration import ASSUMED, Calibration
from engine.control.costs import CostModel, Terms, VerifyCost
from engine.load import Load, cell_of

CURVE = Calibration(((1, 0.010), (16, 0.013), (64, 0.040), (256, 0.150)), 1e-4, 1e-7, 1e-8)


def load(rows: int, sequences: int = 1, context: int = 0) -> Load:
    return Load(sequences, sequences, rows, context, context * rows // max(sequences, 1))


def test_a_calibration_is_believed_as_it_is() -> None:
    cost = VerifyCost(CURVE, 512)
    assert cost.predict(load(1)) == pytest.approx(0.010 + 1e-4)
    assert cost.predict(load(64, 4, 1000)) == pytest.approx(0.040 + 4e-4 + 1e-4 + 1.6e-4)


def test_the_table_goes_on_from_the_load_and_never_falls() -> None:
    cost, base = VerifyCost(CURVE, 512), load(4, 4, 400)
    table = cost.table(base, 40)
    assert table[0] == pytest.approx(cost.predict(base))
    # A further row of a sequence attends to its context, too.
    assert table[12] == pytest.approx(cost.predict(Load(4, 4, 16, 400, 400 + 12 * 100)))
    assert (np.diff(table) >= 0).all()
    assert len(cost.table(load(500), 100)) == 101  # beyond the most that a pass may have


def test_rows_without_logits_have_a_price_of_their_own() -> None:
    """A prompt beside drafts: the head's part of the price goes with the rows that need it, also
    after the machine has slowed down and one octave has turned out dearer."""
    prompt = ((1, 0.010), (16, 0.011), (64, 0.020), (256, 0.075))
    cost = VerifyCost(replace(CURVE, prompt=prompt), 512)
    mixed = replace(load(64, 4, 1000), silent=56)
    assert cost.predict(load(64, 4, 1000)) == pytest.approx(0.040 + 4e-4 + 1e-4 + 1.6e-4)
    body = 0.020 - 0.010 * (1 + 0.1 * 7 / 15)
    assert cost.predict(mixed) == pytest.approx(CURVE.rows_seconds(8) + body + 6.6e-4)
    for _ in range(300):
        cost.update(load(8, 4, 1000), 0.02)
        cost.update(mixed, 0.05)
    assert cost.predict(load(8, 4, 1000)) == pytest.approx(0.02, rel=0.03)
    assert cost.predict(mixed) == pytest.approx(0.05, rel=0.03)
    table = cost.table(mixed, 500)
    assert table[0] == pytest.approx(cost.predict(mixed))
    assert (np.diff(table) >= 0).all()
    assert len(table) == 501


def test_a_machine_that_slows_down_is_followed_at_every_size() -> None:
    cost = VerifyCost(CURVE, 512)
    for _ in range(100):
        cost.update(load(8), 3.0 * (CURVE.rows_seconds(8) + 1e-4))
    for rows in (1, 8, 64, 256):
        ratio = float(cost.table(load(rows), 0)[0]) / (CURVE.rows_seconds(rows) + 1e-4)
        assert ratio == pytest.approx(3.0, rel=0.35)
    assert float(cost.table(load(8), 0)[0]) == pytest.approx(3.0 * 0.0115, rel=0.1)


def test_one_size_that_is_dearer_than_measured_is_learnt_for_itself() -> None:
    cost, dice = VerifyCost(CURVE, 512), random.Random(0)
    for _ in range(600):
        for rows, factor in ((1, 1.0), (16, 1.5), (256, 1.0)):
            seconds = factor * (CURVE.rows_seconds(rows) + 1e-4)
            cost.update(load(rows), seconds * math.exp(dice.gauss(0.0, 0.05)))
    for rows, factor in ((1, 1.0), (16, 1.5), (256, 1.0)):
        found = float(cost.table(load(rows), 0)[0]) / (CURVE.rows_seconds(rows) + 1e-4)
        assert found == pytest.approx(factor, rel=0.1), rows


def test_noise_that_errs_upwards_does_not_make_it_drift() -> None:
    """Ten thousand plain steps whose times have a heavy tail: the price of rows that nobody met
    stays what it was, beside that of the rows that were."""
    cost, dice = VerifyCost(CURVE, 512), random.Random(1)
    for _ in range(10_000):
        tail = 1.0 + (dice.random() < 0.05) * dice.expovariate(1.0)
        cost.update(load(1), (CURVE.rows_seconds(1) + 1e-4) * tail)
    table = cost.table(load(1), 63)
    assert table[0] == pytest.approx(0.0101, rel=0.1)
    assert table[63] / table[0] == pytest.approx(0.0401 / 0.0101, rel=0.15)


def test_a_pause_moves_it_by_little() -> None:
    cost = VerifyCost(CURVE, 512)
    for _ in range(50):
        cost.update(load(1), 0.0101)
    cost.update(load(1), 5.0)
    assert cost.predict(load(1)) == pytest.approx(0.0101, rel=0.05)


def test_an_assumption_takes_its_scale_from_the_first_passes() -> None:
    cost = VerifyCost(ASSUMED, 512)
    for seconds in (2.0, 0.3, 0.3, 0.31, 0.3):  # the first call takes too long
        cost.update(load(1), seconds)
    assert cost.predict(load(1)) == pytest.approx(0.3, rel=0.1)
    assert cost.seconds(1, 1, 0, 0) is None  # and is no bound for prompts


@pytest.mark.parametrize("measured", [True, False])
def test_draft_costs_are_learnt(measured: bool) -> None:
    """A draft model whose rounds take a millisecond, and as much for its batch each."""
    rounds = {"model": Calibration(((1, 5e-4), (64, 6e-4)), 0.0, 0.0, 0.0)} if measured else {}
    costs, dice = CostModel(CURVE, 512, rounds), random.Random(2)
    draft = costs.draft("model")
    for _ in range(400):
        lengths = [dice.randint(1, 8) for _ in range(dice.randint(1, 8))]
        draft.update(lengths, 2e-4 + 1e-3 * max(lengths), 0)
    assert draft.has_rounds
    for lengths in ([1], [8], [4] * 8):
        # Of a model that was never measured the terms are told apart less well.
        close = 0.3 if measured else 0.6
        assert draft.seconds_of(lengths) == pytest.approx(2e-4 + 1e-3 * max(lengths), rel=close)


def test_catching_up_is_no_price_of_rounds() -> None:
    costs = CostModel(CURVE, 512, {"model": Calibration(((1, 5e-4), (64, 6e-4)), 0.0, 0.0, 0.0)})
    draft = costs.draft("model")
    for _ in range(300):
        draft.update([4], 4e-3, 0)
        draft.update([4], 4e-3 + 1e-4 * 500, 500)
    assert draft.seconds_of([4]) == pytest.approx(4e-3, rel=0.2)
    assert draft.each_seconds[2] == pytest.approx(1e-4, rel=0.3)


def test_what_drafts_add_outside_passes_is_found_in_noise() -> None:
    """A draft token adds 0.1 ms to steps whose other time scatters by ten times that."""
    costs, dice = CostModel(CURVE, 512), random.Random(3)
    for _ in range(3000):
        costs.observe_overhead(4, 0, 2e-3 * dice.uniform(0.7, 1.3))
        tokens = dice.randint(1, 8)
        costs.observe_overhead(4, tokens, 2e-3 * dice.uniform(0.7, 1.3) + 1e-4 * tokens)
    assert costs.overhead(4) == pytest.approx(2e-3, rel=0.1)
    assert costs.extra == pytest.approx(1e-4, rel=0.4)
    for _ in range(500):
        costs.observe_overhead(4, 8, 0.0)
    assert costs.extra >= 0.0


def test_terms_stay_above_nothing_and_only_those_involved_move() -> None:
    terms = Terms((1.0, 2.0, 3.0), known=True)
    for _ in range(200):
        terms.update((1.0, 1.0, 0.0), 30.0)
    assert terms.weights[2] == 3.0
    assert terms.predict((1.0, 1.0, 0.0)) == pytest.approx(30.0, rel=0.05)
    for _ in range(500):
        terms.update((1.0, 0.0, 0.0), 1e-9)
    assert terms.weights[0] > 0.0


def test_cells_are_single_counts_and_then_eight_to_an_octave() -> None:
    cells = [cell_of(count) for count in range(1, 1025)]
    assert cells[:16] == list(range(16))
    assert cells == sorted(cells)
    assert len(set(cells)) == 16 + 8 * 6
