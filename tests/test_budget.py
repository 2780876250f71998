"""How prompts share a step, and what they may cost those who stream answers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.pages import TARGET
from engine.calibration import ASSUMED, Calibration
from engine.control.costs import VerifyCost
from engine.pace import PassCost
from engine.scheduler import StepPlan
from engine.sequence import Sequence, Status
from tests.desk import Desk, served, start
from tests.machine import Machine


def seconds_of(plan: StepPlan, *, plain: bool = False) -> float:
    """Seconds of a step, or of its decoding sequences alone."""
    parts = [
        (p.num_feed, p.sequence.table.num_cached[TARGET] + p.num_feed)
        for p in plan.scheduled
        if not plain or (p.samples and p.num_feed == 1 and p.sequence.num_generated)
    ]
    rows, read = sum(n for n, _ in parts), sum(context for _, context in parts)
    pairs, loud = sum(n * context for n, context in parts), sum(p.samples for p in plan.scheduled)
    return Machine().seconds(rows, len(parts), read, pairs, max(0, rows - loud))


def desk_with(cost: PassCost | None, **changes: int | float) -> Desk:
    sizes: dict[str, int | float] = {"num_pages": 300, "page_size": 128, "budget": 512, "most": 64}
    return Desk(**(sizes | changes), cost=cost)  # type: ignore[arg-type]


def steps_until(desk: Desk, done: Callable[[], bool]) -> list[tuple[float, float]]:
    """Steps until something is true: seconds of each pass, and of its decodes alone."""
    times = []
    while not done():
        plan = desk.scheduler.plan()
        times.append((seconds_of(plan), seconds_of(plan, plain=True)))
        desk.finish(plan)
        assert len(times) < 20_000
    return times


# -- streams beside prompts ------------------------------------------------------------------


@pytest.mark.parametrize("stretch", [1.5, 2.0, 3.0])
def test_a_long_prompt_stretches_running_streams_no_further_than_it_may(stretch: float) -> None:
    desk = desk_with(Machine(), stretch=stretch)
    streams = [desk.add(20, max_tokens=8000)[0] for _ in range(2)]
    start(desk, streams)
    (long,) = desk.add(6500)
    times = steps_until(desk, lambda: long.num_generated > 0)
    ratios = sorted(step / plain for step, plain in times)
    # At the end of the prompt a token costs about a plain step, and one goes into every step.
    late = Machine().seconds(1, 1, 6500, 6500) - Machine().base / 1e3
    assert ratios[-1] <= max(stretch, 1 + late / times[0][1]) + 1e-9
    assert ratios[len(ratios) // 2] > 0.75 * stretch  # what is allowed is used
    assert all(s.num_generated > len(times) for s in streams)


def test_late_chunks_of_a_prompt_are_smaller_since_they_cost_more() -> None:
    desk = desk_with(Machine())
    start(desk, desk.add(20, max_tokens=8000))
    (long,) = desk.add(6500)
    fed = []
    while not long.num_generated:
        fed += [p.num_feed for p in desk.step().scheduled if p.sequence is long]
    assert fed[0] > 10
    assert fed[0] > fed[len(fed) // 4] > fed[-2] >= 1
    assert fed[:-1] == sorted(fed[:-1], reverse=True)


def test_without_streams_a_prompt_has_the_whole_pass() -> None:
    desk = desk_with(Machine())
    (long,) = desk.add(6500)
    fed = [desk.step().scheduled[0].num_feed for _ in range(13)]
    assert fed == [512] * 12 + [6500 - 12 * 512]
    assert long.num_generated


def test_without_a_bound_prompts_take_what_they_can() -> None:
    for cost in (Machine(), None):
        desk = desk_with(cost, stretch=0)
        start(desk, desk.add(20, max_tokens=100))
        desk.add(6500)
        assert desk.step().scheduled[1].num_feed == 511


def test_unmeasured_passes_are_bounded_in_tokens() -> None:
    class Unknown:
        def seconds(self, *_: int) -> None:
            return None

    for cost in (None, Unknown()):
        for stretch, fed in ((1.0, 1), (2.0, 33), (3.0, 66)):
            desk = desk_with(cost, stretch=stretch)
            start(desk, desk.add(20, max_tokens=100))
            desk.add(6500)
            assert desk.step().scheduled[1].num_feed == fed


def test_a_calibration_bounds_steps_and_an_assumption_does_not() -> None:
    full = VerifyCost(Calibration(((1, 0.01), (32, 0.02), (64, 0.04)), 1e-3, 1e-6, 1e-7), 64)
    assert full.seconds(16, 2, 1000, 5000) == pytest.approx(0.01 * (1 + 15 / 31) + 3.5e-3)
    assert VerifyCost(ASSUMED, 64).seconds(2, 1, 9, 9) is None


def test_rows_of_a_prompt_are_priced_without_the_logits_that_they_are_not_given() -> None:
    """With a large vocabulary most of a draft token's price is its logits, and a prompt would be
    read at a fraction of the speed that it may be read at."""
    silent = ((1, 0.01), (64, 0.02), (256, 0.06))
    for prompt, expected in (((), 63), (silent, 111)):
        calibration = Calibration(((1, 0.01), (64, 0.03), (256, 0.11)), 0, 0, 0, prompt=prompt)
        desk = desk_with(VerifyCost(calibration, 512), stretch=3.0)
        start(desk, desk.add(20, max_tokens=8000))
        (long,) = desk.add(6500)
        fed = [p.num_feed for p in desk.step().scheduled if p.sequence is long]
        assert calibration.prompt_seconds(1 + expected) == pytest.approx(0.03)  # three times 0.01
        assert fed[0] == pytest.approx(expected, abs=1)


def test_streams_that_draft_leave_a_prompt_the_same_share_of_the_time() -> None:
    """A step with drafts takes longer, and brings more tokens: both halves of it grow."""
    fed = {}
    machine = Machine(read=0.0, pair=0.0)
    for drafts in (0, 8):
        desk = desk_with(machine, stretch=2.0)
        streams = [desk.add(20, max_tokens=8000, max_draft=drafts)[0] for _ in range(4)]
        start(desk, streams)
        (long,) = desk.add(6500)
        for stream in streams:
            stream.last_draft = drafts
        [fed[drafts]] = [p.num_feed for p in desk.step().scheduled if p.sequence is long]
    plain, drafting = machine.seconds(4, 4, 0, 0), machine.seconds(36, 4, 0, 0)
    assert fed[8] / fed[0] == pytest.approx(drafting / plain, rel=0.1)


def first_tokens(drafts: int, accepted: int) -> tuple[float, float]:
    """Eight clients that ask again as soon as they are answered: mean seconds until the first
    token, and requests a second."""
    machine = Machine(read=1e-5, pair=1e-5)
    desk, now, dice = desk_with(machine, num_pages=2000, page_size=16), 0.0, random.Random(1)
    asked: dict[Sequence, float] = {}
    waited: dict[Sequence, float] = {}
    while len(waited) < 120:
        while len(desk.scheduler.running) + len(desk.scheduler.waiting) < 8:
            lengths = dice.randint(75, 225), dice.randint(50, 150)
            asked[desk.add(lengths[0], max_tokens=lengths[1], max_draft=drafts)[0]] = now
        plan = desk.scheduler.plan()
        parts = [
            (p.num_feed + p.granted_drafts, p.sequence.table.num_cached[TARGET] + p.num_feed)
            for p in plan.scheduled
        ]
        rows, loud = (
            sum(n for n, _ in parts),
            sum(p.samples + p.granted_drafts for p in plan.scheduled),
        )
        read, pairs = sum(context for _, context in parts), sum(n * context for n, context in parts)
        now += machine.seconds(rows, len(parts), read, pairs, rows - loud)
        desk.finish(plan, accepted)
        for sequence in served(plan):
            if sequence.num_generated:
                waited.setdefault(sequence, now - asked[sequence])
    return sum(waited.values()) / len(waited), len(waited) / now


def test_with_speculation_first_tokens_hardly_come_later() -> None:
    """They wait for longer steps; but prompts must not starve where answers are quick, and new
    ones therefore come sooner."""
    (plain, throughput), (drafting, more) = first_tokens(0, 0), first_tokens(4, 3)
    assert more > 1.3 * throughput
    assert drafting < 1.6 * plain


# -- prompts beside prompts ------------------------------------------------------------------


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("cost", [Machine(), None])
def test_a_short_prompt_does_not_wait_for_long_ones(streams: int, cost: Machine | None) -> None:
    """However many there are, and wherever in their prompts they are."""
    for waiting in (1, 3, 12):
        desk = desk_with(cost, num_pages=800)
        start(desk, [desk.add(20, max_tokens=9000)[0] for _ in range(streams)])
        for _ in range(waiting):
            desk.add(6500)
        for moment in (1, 7, 12):
            for _ in range(moment):
                desk.step()
            (one,) = desk.add(1, max_tokens=1)
            desk.step()
            assert one.status is Status.FINISHED
            (short,) = desk.add(40, max_tokens=1)
            for _ in range(15 if streams else 1):
                desk.step()
            assert short.status is Status.FINISHED


@pytest.mark.parametrize("cost", [Machine(), None])
@pytest.mark.parametrize("streams", [0, 2])
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(
    streams: int, cost: Machine | None
) -> None:
    """It is read at half the speed at worst."""
    desk = desk_with(cost, num_pages=400)
    start(desk, [desk.add(20, max_tokens=9000)[0] for _ in range(streams)])
    (long,) = desk.add(1200, max_tokens=1)
    alone = len(steps_until(desk, lambda: long.num_generated > 0))
    (late,) = desk.add(1200)
    steps = 0
    while not late.num_generated:
        for _ in range(6):
            desk.add(90, max_tokens=1)
        desk.step()
        steps += 1
        assert steps <= 2.1 * alone + 2
    assert len(desk.scheduler.waiting) + len(desk.scheduler.running) > 5  # there were enough


def test_of_two_alike_the_first_is_read_first() -> None:
    """Sharing evenly would let both wait for the second's end."""
    desk = desk_with(None)
    first, second = desk.add(600)[0], desk.add(600)[0]
    assert [p.num_feed for p in desk.step().scheduled] == [512]
    assert {p.sequence: p.num_feed for p in desk.step().scheduled} == {first: 88, second: 424}


def test_what_the_short_ones_leave_goes_to_the_long() -> None:
    desk = desk_with(None)
    long, short = desk.add(6500)[0], desk.add(100)[0]
    assert {p.sequence: p.num_feed for p in desk.step().scheduled} == {long: 412, short: 100}


def test_priority_comes_before_length() -> None:
    desk = desk_with(None)
    short, urgent = desk.add(10, priority=1)[0], desk.add(6500, priority=0)[0]
    assert served(desk.step()) == [urgent]
    assert not short.num_generated


def test_prompts_with_log_probabilities_are_read_in_small_parts_and_share_them() -> None:
    desk = desk_with(None, logprob_rows=32)
    long, short = (desk.add(n, prompt_logprobs=1)[0] for n in (500, 20))
    (other,) = desk.add(300)
    assert {p.sequence: p.num_feed for p in desk.step().scheduled} == {
        long: 16,
        short: 16,
        other: 300,
    }
    assert {p.sequence: p.num_feed for p in desk.step().scheduled} == {
        long: 28,
        short: 4,
        other: 1,
    }


# -- what admission has to do with it ---------------------------------------------------------


def test_equal_beginnings_are_computed_once_though_all_are_admitted_at_once() -> None:
    """Who has to wait for its first tokens finds what was computed meanwhile."""
    desk = desk_with(None, page_size=16)
    common = tuple(range(10_000, 10_400))
    crowd = [desk.add((*common, 7 * i + 1, i), max_tokens=2)[0] for i in range(30)]
    computed = hits = 0
    while not all(s.num_generated for s in crowd):
        plan = desk.step()
        computed += plan.prefill_tokens
        hits += plan.prefix_hit_tokens
    assert computed < 2 * 400 + 30 * 20
    assert hits >= 28 * 400
    assert [s.cached_prompt_tokens for s in crowd[2:]] == [400] * 28
    desk.drain()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), streams=st.integers(0, 4), stretch=st.sampled_from([1, 2, 4]))
def test_everybody_is_served_whatever_a_pass_costs(seed: int, streams: int, stretch: int) -> None:
    dice = random.Random(seed)
    machine = Machine(*(dice.choice([0.0, 0.1, 10.0]) for _ in range(6)))
    desk = desk_with(machine, num_pages=120, page_size=4, budget=40, most=6, stretch=stretch)
    everyone: list[Sequence] = []
    for _ in range(streams):
        everyone += desk.add(dice.randint(1, 9), max_tokens=dice.randint(1, 60))
    for _ in range(30):
        if dice.random() < 0.5:
            everyone += desk.add(dice.randint(1, 120), max_tokens=dice.randint(0, 20))
        desk.step()
    desk.drain()
    assert all(s.status is Status.FINISHED and s.room == 0 for s in everyone)
