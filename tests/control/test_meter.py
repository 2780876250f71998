"""The meter's arithmetic, what it admits not to know, and its confidence range."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.cache.pages import TARGET, PageTable
from engine.calibration import Calibration
from engine.control.costs import CostModel
from engine.draft.drafter import Verdict
from engine.load import Load
from engine.meter.baseline import Baseline
from engine.meter.gain import Basis, Gain
from engine.meter.meter import Meter
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence
from engine.types import Request
from tests.control.test_adaptive import make_stats

FLAT = Calibration(((1, 0.010), (512, 0.010)), 0.0, 0.0, 0.0)


def decode(batch: int) -> Load:
    return Load(batch, batch, batch, 0, 0)


def make_meter(curve: Calibration = FLAT, plain: float = 0.02, batch: int = 4) -> Meter:
    """A meter that has seen twenty plain steps of `plain` seconds at `batch`."""
    meter = Meter(CostModel(curve, 512))
    for _ in range(20):
        meter.baseline.observe(decode(batch), plain)
    return meter


def make_sequence() -> Sequence:
    sequence = Sequence(Request("r", (1,)), 0, 0, 0, PageTable(""), "lookup", 8, 10_000)
    sequence.append([5])
    sequence.table.num_cached[TARGET] = 1
    return sequence


def observe(
    meter: Meter, emitted: list[int], seconds: float, drafted: bool = True, prefill: int = 0
) -> Gain:
    """A step that emits so many tokens for each of some new sequences."""
    return observe_of(meter, [make_sequence() for _ in emitted], emitted, seconds, drafted, prefill)


def observe_of(
    meter: Meter,
    sequences: list[Sequence],
    emitted: list[int],
    seconds: float,
    drafted: bool = True,
    prefill: int = 0,
) -> Gain:
    """The same for given sequences."""
    parts = [ScheduledSequence(sequence, 1, True, 8) for sequence in sequences]
    verdicts = [Verdict([5] * n, 8 if drafted else 0, n - 1) for n in emitted]
    if prefill:
        parts.append(ScheduledSequence(make_sequence(), prefill, False))
        verdicts.append(Verdict([], 0, 0))
    plan = StepPlan(tuple(parts), 0, 0, 0)
    return meter.observe(plan, verdicts, make_stats(seconds, sum(emitted)))


def test_the_baseline_is_what_plain_steps_took_not_what_the_model_says() -> None:
    meter = make_meter(plain=0.02)
    gain = observe(meter, [3] * 4, 0.03)
    assert gain.equal_seconds == pytest.approx(12 / 4 * 0.02)
    assert gain.seconds == 0.03
    assert gain.basis is Basis.MEASURED


def test_prefill_is_credited_once() -> None:
    """Plain decoding would have needed three steps, of which one carries the prefill."""
    curve = Calibration(((1, 0.010), (101, 0.110)), 0.0, 0.0, 0.0)
    meter = make_meter(curve, plain=CostModel(curve, 512).plain_seconds(decode(4)))
    gain = observe(meter, [3] * 4, 0.12, prefill=100)
    plain, full = 0.013, 0.113
    assert gain.equal_seconds == pytest.approx(full + 2 * plain, rel=0.05)


def test_plain_steps_count_as_themselves_less_what_was_spent_for_nothing() -> None:
    """Choosing, drafts that were never offered, and observing the step before."""
    meter = make_meter()
    plan = StepPlan((ScheduledSequence(make_sequence(), 1, True, 8),), 0, 0, 0)
    stats = replace(make_stats(0.05), choose_seconds=0.001, draft_seconds=0.002)
    gain = meter.observe(plan, [Verdict([5], 0, 0)], stats)
    assert (gain.equal_seconds, gain.seconds) == (pytest.approx(0.047), 0.05)
    stats = replace(make_stats(0.05), between_seconds=0.01, learn_seconds=0.004)
    gain = meter.observe(plan, [Verdict([5], 0, 0)], stats)
    assert (gain.equal_seconds, gain.seconds) == (pytest.approx(0.056), pytest.approx(0.06))
    for _ in range(1000):
        observe(meter, [1], 0.05, drafted=False)
    assert meter.speedup().ratio == pytest.approx(1.0, abs=0.001)


def test_it_is_a_ratio_of_sums() -> None:
    meter = make_meter()
    for emitted in (1, 5) * 50:
        observe(meter, [emitted] * 4, 0.04)
    ratio = meter.speedup().ratio
    assert ratio == pytest.approx((1 * 0.02 + 5 * 0.02) / 0.08)
    assert meter.equal_seconds / meter.seconds == pytest.approx(ratio)


def test_unknown_is_said_and_the_start_is_made_up_for() -> None:
    meter = Meter(CostModel(FLAT, 512))
    for _ in range(100):
        assert observe(meter, [3], 0.02).basis is Basis.UNKNOWN
    assert meter.speedup().ratio is None
    assert meter.speedup().basis is Basis.UNKNOWN
    assert meter.seconds == 0.0
    for _ in range(8):
        observe(meter, [1], 0.01, drafted=False)
    for _ in range(20):
        observe(meter, [3], 0.02)
    assert meter.seconds == pytest.approx(120 * 0.02 + 8 * 0.01)  # nothing is left out
    assert meter.unknown_seconds == 0.0
    assert meter.speedup().ratio == pytest.approx((120 * 0.03 + 0.08) / 2.48)


def test_a_start_that_never_ends_is_bounded() -> None:
    meter = Meter(CostModel(FLAT, 512))
    for _ in range(3000):
        observe(meter, [3], 0.02)
    assert len(meter._early) == 1024
    assert meter.unknown_seconds == pytest.approx((3000 - 1024) * 0.02)


def test_a_batch_size_that_was_never_plain_is_marked_as_modelled() -> None:
    meter = make_meter(batch=4)
    for _ in range(100):
        assert observe(meter, [2] * 16, 0.02).basis is Basis.MODELLED
    assert meter.speedup().basis is Basis.MODELLED


def test_a_stale_baseline_is_marked_as_modelled() -> None:
    meter = make_meter(batch=4)
    assert observe(meter, [2] * 4, 0.02).basis is Basis.MEASURED
    for _ in range(4000):
        last = observe(meter, [2] * 4, 0.04)
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
    lucky.accepted_tokens = 40
    assert meter.of_request(lucky) is None
    for _ in range(10):
        observe_of(meter, [lucky, unlucky], [5, 1], 0.03)
    assert meter.of_request(lucky) == pytest.approx(5 * 0.02 / 0.03)
    assert meter.of_request(unlucky) == pytest.approx(0.02 / 0.03)
    meter.leave_out_prompt(unlucky)
    assert meter.of_request(unlucky) is None
    meter.release(lucky)
    assert meter.of_request(lucky) is None
    assert meter.num_requests == 0


def test_an_answer_without_accepted_drafts_has_gained_nothing() -> None:
    """Its steps were faster than usual by chance, or because a neighbour's drafts were long."""
    meter, sequence = make_meter(batch=1), make_sequence()
    for _ in range(10):
        observe_of(meter, [sequence], [1], 0.015)
    assert meter.of_request(sequence) is None
    sequence.accepted_tokens = 1
    assert meter.of_request(sequence) == pytest.approx(0.02 / 0.015)


@pytest.mark.parametrize(("steps", "known"), [(3, False), (300, True)])
def test_what_noise_could_explain_is_not_said(steps: int, known: bool) -> None:
    """Plain steps scatter by a third: three steps that were a tenth faster say nothing, three
    hundred do."""
    dice, meter, sequence = random.Random(1), Meter(CostModel(FLAT, 512)), make_sequence()
    for _ in range(200):
        meter.baseline.observe(decode(1), 0.02 * dice.uniform(0.4, 1.6))
    sequence.accepted_tokens = 1
    plain = meter.baseline.seconds(decode(1))
    for _ in range(steps):
        observe_of(meter, [sequence], [1], plain / 1.1)
    found = meter.of_request(sequence)
    assert found == pytest.approx(1.1) if known else found is None


@pytest.mark.parametrize("spent", [0.0, 0.005])
def test_plain_answers_are_compared_with_nothing(spent: float) -> None:
    meter, sequence = make_meter(batch=1), make_sequence()
    plan = StepPlan((ScheduledSequence(sequence, 1, True, 0),), 0, 0, 0)
    for _ in range(3):
        stats = replace(make_stats(0.05), choose_seconds=spent)
        meter.observe(plan, [Verdict([5], 0, 0)], stats)
    assert meter.of_request(sequence) == pytest.approx(1.0 - spent / 0.05)


def test_the_confidence_range_holds_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(60):
        rng = random.Random(seed)
        meter = make_meter(batch=1)
        for _ in range(64 * 10):
            observe(meter, [rng.randint(1, 5)], rng.uniform(0.025, 0.035))
        speedup = meter.speedup()
        assert speedup.low is not None
        assert speedup.high is not None
        hits += speedup.low <= 3 * 0.02 / 0.03 <= speedup.high
    # 95 % nominal; fewer than 51 of 60 would have odds below one in a thousand.
    assert hits >= 51


def test_there_is_no_range_before_there_are_enough_steps() -> None:
    meter = make_meter()
    for _ in range(100):
        observe(meter, [2] * 4, 0.02)
    assert meter.speedup().ratio is not None
    assert meter.speedup().low is None
