"""The planner as the engine sees it: modes, limits, reasons, memory, and its own cost."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from engine.cache.pages import TARGET, PageTable
from engine.control.adaptive import AdaptivePlanner
from engine.control.costs import CostModel
from engine.control.planner import FixedPlanner, Mode
from engine.draft.drafter import NoAdvice, Verdict
from engine.meter.gain import Basis, Gain
from engine.meter.meter import Meter
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, Status
from engine.stats import OffReason, StepStats
from engine.status import choices, describe
from engine.types import Request, SamplingParams
from tests.control.fixed import Fixed
from tests.control.simulator import (
    A10,
    LAPTOP,
    Machine,
    World,
    bursty,
    constant,
    planner_for,
)


def make_sequence(
    drafter: str = "lookup", max_draft: int = 8, room: int = 100, prompt: int = 10
) -> Sequence:
    """A decoding sequence."""
    request = Request("r", (1,) * prompt, SamplingParams(max_tokens=1 + room))
    sequence = Sequence(request, 0, 0, 0, PageTable(""), drafter, max_draft, prompt + 1 + room)
    sequence.append([5])
    sequence.table.num_cached[TARGET] = prompt
    return sequence


def make_plan(*parts: ScheduledSequence) -> StepPlan:
    return StepPlan(parts, 0, 0, 0)


def decodes(*sequences: Sequence, budget: int = 8) -> StepPlan:
    return make_plan(
        *(
            ScheduledSequence(s, 1, True, max(0, min(s.draft_limit, s.room - 1, budget)))
            for s in sequences
        )
    )


def make_stats(seconds: float = 0.02, emitted: int = 1, between: float = 0.0) -> StepStats:
    return StepStats(
        seconds=seconds, draft_seconds=0.0, verify_seconds=seconds * 0.9,
        sample_seconds=seconds * 0.1, running=1, waiting=0, prefill_tokens=0,
        decode_sequences=1, emitted_tokens=emitted, drafted_by_position=(),
        accepted_by_position=(), pages_used=0, pages_total=1, preemptions=0,
        prefix_query_tokens=0, prefix_hit_tokens=0, between_seconds=between,
    )  # fmt: skip


class Told(NoAdvice):
    """Says what it was told to say, by drafter."""

    def __init__(self, outlooks: dict[str, Callable[[Sequence], int | None]]) -> None:
        self._outlooks = outlooks

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        return self._outlooks[name](sequence) if name in self._outlooks else 0


def step(
    planner: AdaptivePlanner, plan: StepPlan, right: bool = True, dear: float = 0.0
) -> list[int]:
    """One step in which every draft token is right, or none; each costs `dear` plain steps."""
    chosen = planner.choose(plan)
    verdicts = []
    for part, length in zip(plan.scheduled, chosen.lengths, strict=True):
        accepted = length if right else 0
        emitted = [5] * (accepted + 1) if part.samples else []
        verdicts.append(Verdict(emitted, length, accepted))
    seconds = 0.02 * (1 + dear * sum(chosen.lengths))
    emitted = sum(len(v.emitted) for v in verdicts)
    planner.observe(plan, verdicts, make_stats(seconds, emitted), Gain())
    return chosen.lengths


def make_planner(mode: Mode = Mode.AUTO) -> AdaptivePlanner:
    return planner_for(A10, mode)


def test_without_any_data_it_starts_to_speculate() -> None:
    planner = AdaptivePlanner(8, CostModel())
    assert planner.choose(decodes(make_sequence())).lengths[0] > 0


def test_limits_of_each_sequence_hold() -> None:
    planner = make_planner()
    sequences = [make_sequence(max_draft=n) for n in (0, 1, 2, 8)]
    for _ in range(300):
        for length, sequence in zip(step(planner, decodes(*sequences)), sequences, strict=True):
            assert 0 <= length <= sequence.draft_limit


def test_one_request_does_not_change_another() -> None:
    """A request that switched speculation off leaves its neighbour's drafts as they were."""
    alone, mixed = make_planner(), make_planner()
    first, second = make_sequence(), make_sequence()
    with_off = decodes(second, make_sequence(max_draft=0))
    for _ in range(50):
        step(alone, decodes(first))
        lengths = step(mixed, with_off)
        assert lengths[1] == 0
    assert mixed.choose(with_off).lengths[0] >= 7
    assert alone.choose(decodes(first)).lengths[0] >= 7


def test_every_reason_is_told_and_counted() -> None:
    planner = planner_for(A10, advisor=Told({"quiet": lambda _: None}))
    plan = make_plan(
        *decodes(
            make_sequence(max_draft=0),
            make_sequence(drafter="none", max_draft=0),
            make_sequence(room=1),
            make_sequence(drafter="quiet"),
        ).scheduled,
        ScheduledSequence(make_sequence(), 1, True, 0),
    )
    step(planner, plan)
    assert planner.off_reasons == {
        OffReason.REQUEST: 1,
        OffReason.NO_DRAFTER: 1,
        OffReason.LAST_TOKEN: 1,
        OffReason.NO_PROPOSAL: 1,
        OffReason.NO_BUDGET: 1,
    }


def test_an_empty_proposal_is_no_proposal() -> None:
    planner, sequence = make_planner(), make_sequence()
    plan = decodes(sequence)
    assert planner.choose(plan).lengths[0] > 0
    planner.observe(plan, [Verdict([5], 0, 0)], make_stats(), Gain())
    assert planner.off_reasons == {OffReason.NO_PROPOSAL: 1}
    assert planner.wasted_tokens == 0


def test_a_baseline_of_nothing_judges_nobody() -> None:
    """Where all of a plain step was planning, nothing is left to compare with."""
    planner, plan = make_planner(), decodes(make_sequence())
    for _ in range(3):
        lengths = planner.choose(plan).lengths
        assert any(lengths)
        nothing = Gain(1e-3, 1e-3, Basis.MODELLED, 0.0)
        planner.observe(plan, [Verdict([5], lengths[0], 0)], make_stats(), nothing)


def test_off_is_off() -> None:
    planner, sequence = make_planner(Mode.OFF), make_sequence()
    for _ in range(100):
        assert step(planner, decodes(sequence)) == [0]
    assert planner.off_reasons == {OffReason.SERVER: 100}


def test_fixed_follows_orders_but_for_plain_steps_to_measure() -> None:
    planner, sequence = make_planner(Mode.FIXED), make_sequence()
    lengths = [step(planner, decodes(sequence), right=False)[0] for _ in range(1000)]
    assert set(lengths) == {0, 8}
    assert 8 <= lengths.count(0) <= 50
    assert planner.off_reasons == {OffReason.SHADOW: lengths.count(0)}
    assert planner.wasted_tokens == 8 * lengths.count(8)


def test_pure_prefill_steps_are_none_of_its_business() -> None:
    planner = make_planner()
    plan = make_plan(ScheduledSequence(make_sequence(prompt=64), 64, False))
    assert step(planner, plan) == [0]
    assert not planner.off_reasons


def test_the_last_prefill_chunk_is_not_a_missed_draft() -> None:
    planner = make_planner()
    request = Request("r", (1,) * 8)
    sequence = Sequence(request, 0, 0, 0, PageTable(""), "lookup", 8, 100)
    step(planner, make_plan(ScheduledSequence(sequence, 8, True)))
    assert not planner.off_reasons


def test_a_failed_step_teaches_nothing() -> None:
    planner, sequence = make_planner(), make_sequence()
    planner.choose(decodes(sequence))
    planner.observe(decodes(sequence), [Verdict([5], 8, 0)], make_stats(), Gain())
    assert planner.acceptance.num_sequences == 0
    step(planner, decodes(sequence))
    assert planner.acceptance.num_sequences == 1


def test_what_an_outlook_tells_is_used() -> None:
    """Short matches are wrong, long ones right: only the long ones are drafted from."""
    bucket = 0
    planner = planner_for(LAPTOP, advisor=Told({"lookup": lambda _: bucket}), seed=1)
    sequence = make_sequence()
    drafted = {0: 0, 4: 0}
    for n in range(800):
        bucket = 4 * (n % 2)
        length = step(planner, decodes(sequence), right=bucket == 4, dear=0.2)[0]
        drafted[bucket] += length * (n >= 200)
    assert drafted[4] > 1000
    assert drafted[0] < 60


def test_memory_is_bounded_by_the_sequences_alive() -> None:
    planner = make_planner()
    world = World(A10, bursty, batch=4)
    world.length = 12
    world.run(planner, 4000)  # some 330 sequences
    for _, sequence in world._live:
        planner.release(sequence)
    assert planner.acceptance.num_sequences == 0
    assert planner.prober.num_sequences == 0


def test_a_sequence_that_ended_in_the_step_does_not_come_back() -> None:
    planner, sequence = make_planner(), make_sequence()
    meter = Meter(planner.costs)
    plan = decodes(sequence)
    length = planner.choose(plan).lengths[0]
    sequence.status = Status.FINISHED
    planner.release(sequence)
    verdicts = [Verdict([5] * (length + 1), length, length)]
    planner.observe(plan, verdicts, make_stats(), meter.observe(plan, verdicts, make_stats()))
    assert meter.num_requests == 0
    assert planner.prober.num_sequences == 0
    assert planner.acceptance.num_sequences == 0


def test_time_between_steps_is_saved_with_the_steps() -> None:
    """A draft of one token that takes a fifth of a step and is right every sixth time does not
    pay, unless as much time again goes by between steps, however many tokens they bring."""

    def drafts(between: float) -> int:
        planner, sequence, count = planner_for(A10), make_sequence(), 0
        meter = Meter(planner.costs)
        for number in range(2000):
            plan = decodes(sequence, budget=1)
            [length] = planner.choose(plan).lengths
            accepted = length if number % 6 == 0 else 0
            stats = make_stats(0.02 * (1 + 0.2 * length), 1 + accepted, between)
            verdicts = [Verdict([5] * (1 + accepted), length, accepted)]
            planner.observe(plan, verdicts, stats, meter.observe(plan, verdicts, stats))
            count += length if number >= 1000 else 0
        return count

    assert drafts(between=0.0) < 100
    assert drafts(between=0.02) > 800


def test_the_fixed_planner_learns_nothing() -> None:
    planner, sequence = FixedPlanner(), make_sequence()
    plan = decodes(sequence)
    assert planner.choose(plan).lengths == [8]
    planner.observe(plan, [Verdict([5], 8, 0)], make_stats(), Gain())
    planner.release(sequence)


def test_the_status_is_plain_data_and_says_why() -> None:
    planner = planner_for(LAPTOP)
    log = World(LAPTOP, constant(0.6), batch=2).run(planner, 1500)
    told = json.loads(json.dumps(describe(planner, log.meter, ("lookup",))))
    assert told["mode"] == "auto"
    rows = {row["batch"]: row for row in told["choices"]["lookup"]}
    assert rows[1]["why"] == "worth_it"
    assert rows[1]["draft_tokens"] >= 1
    assert rows[64]["why"] == "not_worth_it"
    assert rows[64]["draft_tokens"] == 0
    assert rows[1]["expected_speedup"] > 1.1
    assert told["acceptance"]["lookup"]["acceptance"] == pytest.approx(0.6, abs=0.1)
    assert told["speedup"]["ratio"] > 1
    assert told["off_reasons"]["shadow"] >= 1
    assert told["wasted_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("mode", "why"), [(Mode.OFF, "off"), (Mode.FIXED, "fixed"), (Mode.AUTO, "guard")]
)
def test_the_status_knows_modes_and_guard(mode: Mode, why: str) -> None:
    planner = make_planner(mode)
    for _ in range(20):
        planner.guard.observe(1, 1.0)
    assert choices(planner, "lookup")[0]["why"] == why


def test_fixed_worlds_do_what_they_say() -> None:
    log = World(A10, constant(1.0), batch=2).run(Fixed(3), 800)
    assert log.tokens / log.steps / 2 == pytest.approx(4, rel=0.05)


def test_a_change_is_followed_within_forty_steps() -> None:
    """All right, then all wrong: from then on there are probes only."""
    planner, plan = make_planner(), decodes(make_sequence(room=10_000))
    for _ in range(400):
        step(planner, plan, dear=0.3)
    lengths = [step(planner, plan, right=False, dear=0.3)[0] for _ in range(100)]
    assert lengths[0] > 0
    assert max(lengths[40:]) <= 1
    assert sum(lengths[40:]) <= 8


def test_where_even_full_acceptance_would_not_pay_nobody_is_probed() -> None:
    """A pass whose next row costs more than the rows before it on average."""
    machine = Machine(lambda rows: 1e-4 * rows**2)
    log = World(machine, constant(0.95), 8).run(planner_for(machine), 4000)
    assert sum(log.lengths[50:]) == 0.0


def test_its_own_time_is_the_meters_business_too() -> None:
    """Choosing and observing take two milliseconds of every step of thirteen: the meter charges
    them, and drafts go on as they would."""
    logs = []
    for planning in ((0.0, 0.0), (1e-3, 1e-3)):
        world = World(LAPTOP, constant(0.0), 1)
        world.planning = planning
        logs.append(world.run(planner_for(LAPTOP), 2000))
    free, dear = logs
    assert dear.steps == pytest.approx(free.steps, rel=0.02)
    ratios = [log.meter.equal_seconds / log.meter.seconds for log in logs]
    assert ratios[1] == pytest.approx(ratios[0] * free.seconds / dear.seconds, rel=0.01)
