"""The meter's arithmetic, what it admits not to know, and its confidence range."""

from __future__ import annotations

import random

import pytest

from engine.cache.pages import PageTable
from engine.control.baseline import Baseline, Basis
from engine.control.calibration import Calibration
from engine.control.latency import CostModel, Load
from engine.control.speedup import Meter
from engine.sequence import Sequence
from engine.types import Request

FLAT = Calibration(((1, 0.010), (512, 0.010)), 0.0, 0.0, 0.0)


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 0, 0)


def make_meter(curve: Calibration = FLAT, plain: float = 0.02, batch: int = 4) -> Meter:
    """A meter that has seen twenty plain steps of `plain` seconds at `batch`."""
    baseline = Baseline(CostModel(curve, 512))
    for _ in range(20):
        baseline.observe(decode(batch), plain)
    return Meter(baseline)


def make_sequence() -> Sequence:
    return Sequence(Request("r", (1,)), 0, 0, 0, PageTable(""), "lookup", 8, 100)


def test_the_baseline_is_what_plain_steps_took_not_what_the_model_says() -> None:
    meter = make_meter(plain=0.02)
    gain = meter.speculative(decode(4), decode(4), emitted=12, seconds=0.03)
    assert gain.equal_seconds == pytest.approx(12 / 4 * 0.02)
    assert gain.seconds == 0.03
    assert gain.basis is Basis.MEASURED


def test_prefill_is_credited_once() -> None:
    """Plain decoding would have needed three steps, of which one carries the prefill."""
    curve = Calibration(((1, 0.010), (101, 0.110)), 0.0, 0.0, 0.0)
    meter = make_meter(curve, plain=CostModel(curve, 512).plain_seconds(decode(4)))
    whole = Load(4, 5, 104, 0, 0)
    gain = meter.speculative(decode(4), whole, emitted=12, seconds=0.12)
    plain, full = 0.013, 0.113
    assert gain.equal_seconds == pytest.approx(full + 2 * plain, rel=0.05)


def test_plain_steps_count_as_themselves_less_what_was_spent_for_nothing() -> None:
    meter = make_meter()
    gain = meter.plain(0.05, spent=0.001)
    assert gain.equal_seconds == pytest.approx(0.049)
    for _ in range(100):
        meter.plain(0.05, spent=0.0)
    ratio = meter.speedup().ratio
    assert ratio is not None
    assert ratio == pytest.approx(1.0, abs=0.001)


def test_it_is_a_ratio_of_sums() -> None:
    meter = make_meter()
    for emitted, seconds in ((4, 0.04), (20, 0.04)) * 50:
        meter.speculative(decode(4), decode(4), emitted, seconds)
    ratio = meter.speedup().ratio
    assert ratio == pytest.approx((1 * 0.02 + 5 * 0.02) / 0.08)
    assert meter.equal_seconds / meter.seconds == pytest.approx(ratio)


def test_unknown_is_said_and_the_start_is_made_up_for() -> None:
    baseline = Baseline(CostModel(FLAT, 512))
    meter = Meter(baseline)
    for _ in range(100):
        gain = meter.speculative(decode(1), decode(1), 3, 0.02)
        assert gain.basis is Basis.UNKNOWN
    assert meter.speedup().ratio is None
    assert meter.speedup().basis is Basis.UNKNOWN
    assert meter.seconds == 0.0
    for _ in range(8):
        baseline.observe(decode(1), 0.01)
        meter.plain(0.01, 0.0)
    for _ in range(20):
        meter.speculative(decode(1), decode(1), 3, 0.02)
    assert meter.seconds == pytest.approx(120 * 0.02 + 8 * 0.01)  # nothing is left out
    assert meter.unknown_seconds == 0.0
    assert meter.speedup().ratio == pytest.approx((120 * 0.03 + 0.08) / 2.48)


def test_a_start_that_never_ends_is_bounded() -> None:
    meter = Meter(Baseline(CostModel(FLAT, 512)))
    for _ in range(3000):
        meter.speculative(decode(1), decode(1), 3, 0.02)
    assert len(meter._early) == 1024
    assert meter.unknown_seconds == pytest.approx((3000 - 1024) * 0.02)


def test_a_batch_size_that_was_never_plain_is_marked_as_modelled() -> None:
    meter = make_meter(batch=4)
    for _ in range(100):
        assert meter.speculative(decode(16), decode(16), 32, 0.02).basis is Basis.MODELLED
    assert meter.speedup().basis is Basis.MODELLED


def test_a_stale_baseline_is_marked_as_modelled() -> None:
    meter = make_meter(batch=4)
    assert meter.speculative(decode(4), decode(4), 8, 0.02).basis is Basis.MEASURED
    for _ in range(4000):
        last = meter.speculative(decode(4), decode(4), 8, 0.04)
    assert last.basis is Basis.MODELLED


def test_the_baseline_follows_the_machine() -> None:
    baseline = Baseline(CostModel(FLAT, 512))
    for _ in range(50):
        baseline.observe(decode(4), 0.02)
    for _ in range(60):
        baseline.observe(decode(4), 0.03)
    assert baseline.seconds(decode(4)) == pytest.approx(0.03, rel=0.05)


def test_a_pause_in_a_plain_step_does_not_inflate_the_speed_up() -> None:
    baseline = Baseline(CostModel(FLAT, 512))
    for i in range(50):
        baseline.observe(decode(4), 5.0 if i == 25 else 0.02)
    assert baseline.seconds(decode(4)) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("pause", range(4))
def test_a_pause_among_the_first_steps_does_not_either(pause: int) -> None:
    """Nor in the first step of another batch size."""
    baseline = Baseline(CostModel(FLAT, 512))
    for i in range(4):
        baseline.observe(decode(4), 5.0 if i == pause else 0.02)
    assert baseline.known
    assert baseline.seconds(decode(4)) == pytest.approx(0.02, rel=0.1)
    baseline.observe(decode(8), 5.0)
    assert baseline.seconds(decode(8)) == pytest.approx(0.02, rel=0.1)
    for _ in range(4):
        baseline.observe(decode(8), 0.03)  # what it really takes is soon believed
    assert baseline.seconds(decode(8)) == pytest.approx(0.03, rel=0.1)


def test_requests_are_measured_each_for_itself() -> None:
    meter = make_meter(batch=2)
    lucky, unlucky = make_sequence(), make_sequence()
    assert meter.of_request(lucky) is None
    for _ in range(10):
        meter.speculative(decode(2), decode(2), 6, 0.03)
        meter.credit([(lucky, 5), (unlucky, 1)])
    assert meter.of_request(lucky) == pytest.approx(5 * 0.02 / 0.03)
    assert meter.of_request(unlucky) == pytest.approx(0.02 / 0.03)
    meter.release(lucky)
    assert meter.of_request(lucky) is None
    assert meter.num_requests == 1


def test_the_confidence_range_holds_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(60):
        rng = random.Random(seed)
        meter = make_meter(batch=1)
        for _ in range(64 * 10):
            meter.speculative(decode(1), decode(1), rng.randint(1, 5), rng.uniform(0.025, 0.035))
        speedup = meter.speedup()
        assert speedup.low is not None
        assert speedup.high is not None
        hits += speedup.low <= 3 * 0.02 / 0.03 <= speedup.high
    # 95 % nominal; fewer than 51 of 60 would have odds below one in a thousand.
    assert hits >= 51


def test_there_is_no_range_before_there_are_enough_steps() -> None:
    meter = make_meter()
    for _ in range(100):
        meter.speculative(decode(4), decode(4), 8, 0.02)
    assert meter.speedup().ratio is not None
    assert meter.speedup().low is None
