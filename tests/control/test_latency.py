"""The cost model learns the machine, step by step in the literal sense."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from engine.control.calibration import ASSUMED, Calibration
from engine.control.cells import cell_of
from engine.control.draft_time import DraftTime
from engine.control.latency import CostModel, Load, PassTime


def load(rows: int, context: int = 0, sequences: int = 1) -> Load:
    return Load(batch=sequences, sequences=sequences, rows=rows, context=context, attention=0)


KNOWN = Calibration(((1, 0.01), (8, 0.0135), (64, 0.05)), 1e-5, 1e-7, 1e-8)
FLAT = Calibration(((1, 0.01), (512, 0.01)), 0.0, 0.0, 0.0)


def test_cells_are_single_counts_first_and_eighths_of_an_octave_later() -> None:
    cells = [cell_of(n) for n in range(1, 4097)]
    assert cells[:16] == list(range(16))
    assert cells == sorted(cells)
    assert max(b - a for a, b in pairwise(cells)) == 1  # none is skipped
    for edge in (16, 32, 64, 128, 256, 512):
        assert cell_of(edge) != cell_of(edge + 1)  # tiles end at powers of two


def test_a_step_that_calibration_missed_is_learnt_without_smearing() -> None:
    model = PassTime(FLAT, 256)
    rng = random.Random(2)
    for _ in range(600):
        rows = rng.choice((8, 32, 60, 64, 66, 72, 96))
        model.update(load(rows), (0.01 if rows <= 64 else 0.02) * rng.uniform(0.98, 1.02))
    table = model.table(load(0), 100)
    assert table[64] == pytest.approx(0.01, rel=0.05)
    assert table[66] == pytest.approx(0.02, rel=0.05)


def test_the_table_never_falls() -> None:
    model = PassTime(FLAT, 256)
    rng = random.Random(3)
    for _ in range(500):
        model.update(load(rng.randint(1, 200)), rng.uniform(0.005, 0.02))
    assert (np.diff(model.table(load(0), 256)) >= 0).all()


def test_pauses_and_first_calls_do_not_poison_it() -> None:
    model = PassTime(FLAT, 256)
    for i in range(200):
        rows = 1 + i % 4
        first = i < 4
        paused = i % 17 == 5
        model.update(load(rows), 3.0 if first or paused else 0.012)
    assert model.seconds(load(2)) == pytest.approx(0.012, rel=0.05)


def test_a_machine_that_slows_down_is_followed_everywhere() -> None:
    """Also at sizes that are not visited again."""
    model = PassTime(FLAT, 256)
    for i in range(400):
        model.update(load((1, 4, 8, 64)[i % 4]), 0.01)
    for i in range(120):
        model.update(load((1, 4)[i % 2]), 0.02)
    assert model.seconds(load(4)) == pytest.approx(0.02, rel=0.05)
    assert model.seconds(load(64)) > 0.016


def test_without_a_calibration_the_scale_is_found_at_once() -> None:
    model = PassTime(ASSUMED, 256)
    for rows in (1, 1, 1, 2):
        model.update(load(rows), 3e-4)
    assert model.seconds(load(1)) == pytest.approx(3e-4, rel=0.1)


def test_context_is_told_from_tokens() -> None:
    model = PassTime(Calibration(((1, 0.01), (512, 0.05)), 0.0, 5e-7, 0.0), 512)
    rng = random.Random(4)
    for i in range(1500):
        context = 100 * (i % 40)
        model.update(load(4, context), (0.01 + 2e-6 * context) * rng.uniform(0.98, 1.02))
    assert model.seconds(load(4, 4000)) == pytest.approx(0.018, rel=0.1)
    assert model.seconds(load(4, 0)) == pytest.approx(0.010, rel=0.15)


def test_it_answers_beyond_the_most_that_a_pass_may_have() -> None:
    model = PassTime(Calibration(((1, 0.01), (64, 0.02)), 0.0, 0.0, 0.0), 64)
    table = model.table(load(60), 10)
    assert len(table) == 11
    assert (np.diff(table) >= 0).all()
    model.update(load(500), 0.1)  # no error


def test_memory_is_bounded() -> None:
    model = PassTime(FLAT, 4096)
    for rows in range(1, 20_000):
        model.update(load(rows), 0.01)
    assert len(model._cells) <= 16 + 8 * 8


def test_draft_rounds_of_a_model_are_learnt_from_totals() -> None:
    """One call, rounds and sequences are not measured apart, but follow from varied lengths."""
    drafter = DraftTime()
    rng = random.Random(5)

    def truth(lengths: list[int]) -> float:
        return 1e-3 + 2e-3 * max(lengths) + 1e-4 * sum(lengths)

    for _ in range(1500):
        lengths = [rng.randint(1, 6) for _ in range(rng.choice((1, 2, 4, 8)))]
        drafter.update(lengths, truth(lengths) * rng.uniform(0.97, 1.03))
    for lengths in ([1], [6], [3, 3, 3, 3], [6] * 8):
        assert drafter.seconds_of(lengths) == pytest.approx(truth(lengths), rel=0.2)
    counts = np.array([[0.0, 1.0], [0.0, 6.0], [0.0, 6.0]])
    assert drafter.seconds(counts)[0] == 0.0
    assert drafter.seconds(counts)[1] == pytest.approx(drafter.seconds_of([6]))


#: A draft model's pass: 1 ms for one sequence, 3 ms for 21.
SMALL = Calibration(((1, 1e-3), (21, 3e-3)), 0.0, 0.0, 0.0)


def test_rounds_of_a_measured_model_are_known_before_the_first() -> None:
    drafter = DraftTime(SMALL)
    around = 2e-4  # of putting batches together
    assert drafter.seconds_of([1]) == pytest.approx(1e-3, abs=around)
    assert drafter.seconds_of([4]) == pytest.approx(4e-3, abs=4 * around)
    assert drafter.seconds_of([4] * 11) == pytest.approx(4 * 2e-3, abs=7 * around)
    # Sequences leave a round when their draft is long enough.
    assert drafter.seconds_of([4, 1]) < drafter.seconds_of([4, 4])
    counts = np.array([[[0.0, 1.0], [1.0, 11.0]], [[0.0, 4.0], [1.0, 4.0]], [[0.0, 4], [1, 44]]])
    expected = [[0.0, drafter.seconds_of([4])], [drafter.seconds_of([1])] * 2]
    expected[1][1] = drafter.seconds_of([4] * 11)
    assert drafter.seconds(counts) == pytest.approx(np.array(expected))
    assert drafter.read_seconds == pytest.approx(1e-4, rel=0.2)


def test_a_measured_model_that_is_slower_in_service_is_followed() -> None:
    """Samples of one kind must not spoil what is known of the others."""
    drafter, known = DraftTime(SMALL), DraftTime(SMALL)
    for _ in range(60):
        drafter.update([2] * 8, 1.5 * known.seconds_of([2] * 8))
    for lengths in ([1], [8], [2] * 8, [8] * 8, [3] * 20):
        assert drafter.seconds_of(lengths) == pytest.approx(
            1.5 * known.seconds_of(lengths), rel=0.1
        )


def test_what_catching_up_takes_is_not_mistaken_for_drafting() -> None:
    """Long reads come rarely, and two drafters have times of their own."""
    costs = CostModel()
    model, lookup = costs.draft("model"), costs.draft("lookup")
    for step in range(300):
        read = 400 if step % 50 == 20 else 0
        model.update([4, 4], 8e-3 + 5e-5 * read, read)
        lookup.update([4], 4e-5)
    assert model.seconds_of([4, 4]) == pytest.approx(8e-3, rel=0.15)
    assert lookup.seconds_of([4]) == pytest.approx(4e-5, rel=0.15)
    assert 2e-5 < model.read_seconds < 2e-4


def test_overhead_is_measured_not_assumed_to_be_nothing() -> None:
    costs = CostModel()
    for i in range(400):
        batch = (1, 8, 32)[i % 3]
        costs.observe_overhead(batch, 0, 1e-3 + 1e-4 * batch)
    for _ in range(200):
        costs.observe_overhead(8, 16, 1e-3 + 8e-4 + 16 * 5e-5)
    assert costs.overhead(8) == pytest.approx(1.8e-3, rel=0.1)
    assert costs.extra * 16 == pytest.approx(8e-4, rel=0.3)
    assert costs.plain_seconds(load(8, sequences=8)) > 1.8e-3


def test_what_drafts_add_outside_passes_is_found_in_much_noise() -> None:
    """Half of the steps with drafts take less time outside the pass than a usual plain one does,
    and some are pauses."""
    costs, rng = CostModel(), random.Random(5)

    def noisy(mean: float) -> float:
        return 0.1 if rng.random() < 0.01 else mean * rng.choice([0.5, 0.7, 1.0, 1.2, 1.6])

    for _ in range(1000):
        costs.observe_overhead(32, 0, noisy(3.2e-3))
        costs.observe_overhead(32, 20, noisy(3.2e-3 + 0.65e-3))
    assert costs.overhead(32) == pytest.approx(3.2e-3, rel=0.15)
    assert 0.2e-3 < 20 * costs.extra < 1.6e-3


def test_the_description_is_plain_data() -> None:
    costs = CostModel(draft_calibrations={"model": SMALL})
    costs.draft("lookup")
    costs.draft("model")
    described = costs.describe()
    # Milliseconds only: the factor on a model's passes is none.
    assert max(max(terms) for terms in described["draft_ms_terms"].values()) < 1.0  # type: ignore[attr-defined]
    assert set(described["pass_ms_by_tokens"]) >= {1, 8, 256}  # type: ignore[call-overload]
    assert all(math.isfinite(v) for v in described["pass_ms_by_tokens"].values())  # type: ignore[attr-defined]


def test_a_skewed_noise_makes_nothing_drift() -> None:
    """On a shared machine times err upwards only. Ten thousand plain steps must not blow up what
    was learnt of the few with drafts."""
    model, pick = PassTime(KNOWN, 64), random.Random(0)
    plain, drafted = Load(1, 1, 1, 100, 100), Load(1, 1, 7, 100, 700)
    for step in range(12_000):
        load = drafted if step % 50 == 0 and step < 2_000 else plain
        truth = 0.010 if load is plain else 0.013
        model.update(load, truth * (1.0 + pick.expovariate(4.0)))
    assert model.seconds(plain) == pytest.approx(0.0125, rel=0.1)
    assert model.seconds(drafted) / model.seconds(plain) == pytest.approx(1.3, rel=0.1)


def test_a_machine_that_slows_down_and_recovers_is_followed() -> None:
    """Nobody drafts meanwhile: the costs of drafts are scaled with those of plain steps."""
    model, pick = PassTime(KNOWN, 64), random.Random(1)
    plain, drafted = Load(1, 1, 1, 100, 100), Load(1, 1, 7, 100, 700)

    def run(steps: int, slow: float, share: float) -> None:
        for _ in range(steps):
            load = drafted if pick.random() < share else plain
            truth = 0.010 if load is plain else 0.013
            model.update(load, slow * truth * (1.0 + pick.expovariate(10.0)))

    run(1_000, 1.0, 0.2)
    for slow in (1.6, 1.0, 1.8, 0.9, 1.0) * 4:
        run(400, slow, 0.0)
        assert model.seconds(drafted) / model.seconds(plain) == pytest.approx(1.3, rel=0.12)
