"""Who gets which tokens into a step: fair, within its limits, and never stuck."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.errors import ConfigurationError
from engine.sequence import Sequence, Status
from tests.desk import Desk, served, start

# -- one step --------------------------------------------------------------------------------


def test_continuous_batching() -> None:
    """A new request joins those that run, in the step after its arrival."""
    desk = Desk()
    (first,) = desk.add(5)
    desk.step()
    (second,) = desk.add(6)
    plan = desk.step()
    assert served(plan) == [first, second]
    assert [p.num_feed for p in plan.scheduled] == [1, 6]
    assert all(p.samples for p in plan.scheduled)
    assert plan.prefill_tokens == 5
    assert desk.drain() < 10


def test_an_idle_step_plans_nothing() -> None:
    plan = Desk().step()
    assert plan.scheduled == ()
    assert plan.prefill_tokens == 0


def test_a_long_prompt_is_cut_and_does_not_hold_up_decoders() -> None:
    desk = Desk(budget=10)
    decoders = [desk.add(3, max_tokens=30)[0] for _ in range(4)]
    start(desk, decoders)
    (long,) = desk.add(100)
    fed = []
    while not long.num_generated:
        before = [s.num_generated for s in decoders]
        plan = desk.step()
        assert [s.num_generated for s in decoders] == [n + 1 for n in before]
        fed += [p.num_feed for p in plan.scheduled if p.sequence is long]
    assert sum(fed) == 100
    assert fed[:-1] == [6] * 16  # all that the decoders leave


def test_decoders_with_long_drafts_do_not_starve_a_prompt() -> None:
    """Drafts get at most half of what is left while a prompt wants it."""
    desk = Desk(budget=16, num_pages=200)
    decoders = [desk.add(3, max_tokens=60, max_draft=30)[0] for _ in range(2)]
    start(desk, decoders)
    (long,) = desk.add(50, max_draft=30)
    steps = 0
    while not long.num_generated:
        plan = desk.step()
        steps += 1
        drafts = sum(p.granted_drafts for p in plan.scheduled)
        if not long.num_generated:
            assert drafts <= 7
            assert next(p.num_feed for p in plan.scheduled if p.sequence is long) >= 7
    assert steps <= 8
    plan = desk.step()
    assert sum(p.granted_drafts for p in plan.scheduled) == 16 - 3  # now they may have it all


def test_what_prompts_leave_goes_to_drafts() -> None:
    desk = Desk(budget=32)
    (decoder,) = desk.add(3, max_tokens=60, max_draft=20)
    start(desk, [decoder])
    desk.add(2)
    plan = desk.step()
    assert {p.sequence.ticket: p.granted_drafts for p in plan.scheduled} == {0: 20, 1: 0}


def test_drafts_share_a_small_budget_evenly() -> None:
    desk = Desk(budget=14, most=4)
    decoders = [desk.add(2, max_tokens=50, max_draft=8)[0] for _ in range(4)]
    start(desk, decoders)
    plan = desk.step()
    drafts = [p.granted_drafts for p in plan.scheduled]
    assert sum(drafts) == 10
    assert max(drafts) - min(drafts) <= 1


@pytest.mark.parametrize("left", range(1, 6))
def test_a_draft_leaves_room_for_the_token_that_follows_it(left: int) -> None:
    desk = Desk()
    (sequence,) = desk.add(3, max_tokens=left + 1, max_draft=4)
    desk.step()
    assert sequence.room == left
    plan = desk.step(accepted=99)
    assert [p.granted_drafts for p in plan.scheduled] == [min(4, left - 1)]
    assert sequence.num_generated <= left + 1


# -- order -----------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    """Nobody overtakes a request that does not fit yet, however small."""
    desk = Desk(num_pages=10, page_size=4)
    (first,) = desk.add(20, max_tokens=10)
    desk.step()
    (large,) = desk.add(24, max_tokens=4)
    (small,) = desk.add(1, max_tokens=2)
    while first.status is not Status.FINISHED:
        desk.step()
        assert small.first_scheduled is None
        assert not small.num_generated
    desk.step()
    assert large.status is Status.RUNNING
    desk.drain()


def test_priority_goes_first() -> None:
    desk = Desk(most=1)
    low = desk.add(3, max_tokens=2, priority=5)[0]
    normal = desk.add(3, max_tokens=2)[0]
    high = desk.add(3, max_tokens=2, priority=-1)[0]
    order: list[Sequence] = []
    while desk.scheduler.waiting or desk.scheduler.running:
        order += [s for s in served(desk.step()) if s not in order]
    assert order == [high, normal, low]


def test_many_choices_do_not_block_the_door() -> None:
    """Requests that come after one with n = 64 wait for a few of its choices, not for all."""
    desk = Desk(num_pages=400, most=4, budget=16)
    many = desk.add(4, max_tokens=4, n=64)
    desk.step()
    late = [desk.add(4, max_tokens=4)[0] for _ in range(3)]
    while not all(s.status is Status.FINISHED for s in late):
        desk.step()
    assert sum(s.status is Status.FINISHED for s in many) < 16
    desk.drain()


def test_choices_share_the_pages_of_their_prompt() -> None:
    desk = Desk(num_pages=64, page_size=4, budget=40)
    choices = desk.add(18, max_tokens=3, n=5)
    start(desk, choices[:1])
    desk.step()
    first = choices[0].table.pages[:4]
    assert all(s.table.pages[:4] == first for s in choices)
    assert desk.pool.num_used == 4 + 5
    desk.drain()


def test_choices_start_together_once_their_prompt_is_read() -> None:
    """One reads the prompt; the rest need not queue up one a step behind each other. A prompt
    shorter than a page has nothing to share, so nobody waits for it."""
    desk = Desk(most=8, budget=64)
    choices = desk.add(21, max_tokens=9, n=6)
    assert len(desk.step().scheduled) == 1
    assert len(desk.step().scheduled) == 6
    assert all(s.num_generated for s in choices)
    short = Desk(most=8, budget=64)
    short.add(3, max_tokens=9, n=6)
    assert len(short.step().scheduled) == 6


def test_choices_do_not_wait_without_prefix_reuse() -> None:
    desk = Desk(reuse=False, budget=64)
    desk.add(8, n=4)
    assert len(desk.step().scheduled) == 4


# -- when pages run out ----------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back() -> None:
    desk = Desk(num_pages=6, page_size=2)
    old = desk.add(2, max_tokens=8)[0]
    young = desk.add(2, max_tokens=8)[0]
    while not desk.step().preemptions:
        pass
    assert young.status is Status.WAITING
    assert young.preemptions == 1
    assert old.status is Status.RUNNING
    tokens = list(young.tokens)
    desk.drain()
    assert old.preemptions == 0
    assert young.tokens[: len(tokens)] == tokens
    assert young.num_generated == old.num_generated == 8


def test_low_priority_is_preempted_before_the_young() -> None:
    desk = Desk(num_pages=6, page_size=2)
    low = desk.add(2, max_tokens=8, priority=1)[0]
    young = desk.add(2, max_tokens=8)[0]
    while not desk.step().preemptions:
        pass
    assert low.preemptions == 1
    assert young.preemptions == 0
    desk.drain()


def test_nobody_is_admitted_in_the_step_of_a_preemption() -> None:
    """Or the pages just taken would go to a newcomer, and so on without end."""
    desk = Desk(num_pages=12, page_size=2, most=2)
    desk.add(2, max_tokens=20)
    young = desk.add(10, max_tokens=12)[0]
    desk.step()
    urgent = desk.add(1, max_tokens=4, priority=-1)[0]
    plan = desk.step()
    while not plan.preemptions:
        plan = desk.step()
    assert young.preemptions
    assert urgent not in served(plan)
    assert urgent in served(desk.step())
    desk.drain()


def test_drafts_shrink_before_anybody_is_preempted() -> None:
    desk = Desk(num_pages=8, page_size=1)
    first = desk.add(1, max_tokens=4, max_draft=8)[0]
    second = desk.add(1, max_tokens=4, max_draft=8)[0]
    desk.step()
    drafts = []
    while desk.scheduler.running:
        plan = desk.step()
        drafts += [p.granted_drafts for p in plan.scheduled]
        assert plan.preemptions == 0
    assert first.num_generated == second.num_generated == 4
    assert max(drafts) > 0
    tight = Desk(num_pages=6, page_size=1)
    for _ in range(2):
        tight.add(1, max_tokens=5, max_draft=8)
    tight.step()
    plan = tight.step()  # each wants 3, and there are two pages left
    assert [p.granted_drafts for p in plan.scheduled] == [2, 0]
    assert plan.preemptions == 0


def test_admission_leaves_a_page_for_everyone_who_runs() -> None:
    """Else the newcomer would be thrown out again in the next step."""
    desk = Desk(num_pages=6, page_size=2)
    desk.add(4, max_tokens=8)
    desk.step()
    assert desk.pool.num_available == 4
    blocked = desk.add(6, max_tokens=1)[0]
    desk.step()
    assert blocked.status is Status.WAITING
    desk.drain()
    assert blocked.preemptions == 0


def test_a_sequence_may_fill_the_whole_pool() -> None:
    for size in (1, 2, 3, 5):
        desk = Desk(num_pages=6, page_size=size, budget=8)
        (sequence,) = desk.add(6 * size - 3, max_tokens=3, max_draft=4)
        desk.add(1, max_tokens=1)
        desk.drain()
        assert sequence.preemptions == 0
        (full,) = desk.add(6 * size, max_tokens=0)
        desk.drain()
        assert full.status is Status.FINISHED


def test_removing_a_waiting_a_running_and_a_preempted_sequence() -> None:
    desk = Desk(num_pages=6, page_size=2, most=2)
    running, preempted, waiting = (desk.add(2, max_tokens=8)[0] for _ in range(3))
    while not preempted.preemptions:
        desk.step()
    for sequence in (waiting, preempted, running):
        desk.scheduler.remove(sequence)
        assert sequence.status is Status.FINISHED
        desk.check_state()
    assert desk.pool.num_used == 0


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_batch_tokens is 3, below max_sequences"):
        SchedulerConfig(max_batch_tokens=3, max_sequences=4)
    with pytest.raises(ConfigurationError, match="max_sequences is 0"):
        SchedulerConfig(max_sequences=0)


# -- never stuck -----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.integers(1, 5),
    num_pages=st.integers(4, 20),
    most=st.integers(1, 5),
    extra=st.integers(0, 12),
    reuse=st.booleans(),
    acceptance=st.integers(0, 4),
)
def test_everybody_is_served(
    seed: int,
    page_size: int,
    num_pages: int,
    most: int,
    extra: int,
    reuse: bool,
    acceptance: int,
) -> None:
    """Random arrivals, removals, lengths and drafts: limits hold in every step, every step
    moves something, and everybody gets all their tokens."""
    dice = random.Random(seed)
    desk = Desk(num_pages, page_size, most + extra, most, reuse)
    capacity = num_pages * page_size
    everyone: list[Sequence] = []
    removed: set[Sequence] = set()
    for _ in range(dice.randint(1, 25)):
        if dice.random() < 0.6:
            length = dice.randint(1, min(capacity, 30))
            prompt = tuple(dice.randrange(2) for _ in range(length))
            everyone += desk.add(
                prompt,
                dice.randint(0, capacity - length),
                n=dice.choice([1, 1, 2, 4]),
                priority=dice.choice([0, 0, 0, 1]),
                max_draft=dice.randint(0, 6),
            )
        alive = [s for s in everyone if s.status is not Status.FINISHED]
        if alive and dice.random() < 0.1:
            victim = dice.choice(alive)
            desk.scheduler.remove(victim)
            removed.add(victim)
        had_work = bool(desk.scheduler.running or desk.scheduler.waiting)
        plan = desk.step(dice.randint(0, acceptance))
        assert bool(plan.scheduled) == had_work
    for _ in range(20_000):
        if not (desk.scheduler.running or desk.scheduler.waiting):
            break
        assert desk.step(dice.randint(0, acceptance)).scheduled, "stuck"
    assert desk.pool.num_used == 0
    for sequence in everyone:
        assert sequence.status is Status.FINISHED
        assert sequence in removed or sequence.room == 0
