"""What the engine tells of speculation: its state between steps, and what each request gained."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.control.costs import CostModel
from engine.control.planner import FixedPlanner, ShieldedPlanner
from engine.core import Engine
from engine.errors import EngineUnavailable, RequestFailed
from engine.meter.meter import Meter
from engine.stats import SpeculationReport, StepStats
from engine.status import describe, report
from engine.types import DraftTrace, SpeculationParams, Tokens
from server.api.speculation import EngineStatus
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, ask, make_engine, run
from tests.test_async_engine import PROMPT, Bench, read, until
from tests.tiny_models import VOCAB

OFF = SpeculationParams(enabled=False)


def check(told: dict[str, Any]) -> None:
    """It is JSON, and exactly what the API's document says."""
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    TypeAdapter(EngineStatus).validate_python(told, strict=True)
    assert set(told) == set(EngineStatus.__annotations__)


def finished(done: Run, request_id: str) -> list[float | None]:
    """The speed-up of each choice."""
    answer = done.answers[request_id]
    return [c.end.stats.speedup for _, c in sorted(answer.choices.items()) if c.end]


# -- the state -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off", "fixed"])
@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_every_mode_is_told(mode: str, drafter: str) -> None:
    built = make_engine(drafter=drafter, mode=mode)
    fresh = built.engine.speculation()
    check(fresh)
    assert fresh["speedup"]["ratio"] is None
    assert fresh["speedup"]["basis"] == "unknown"
    run(built, [ask(f"r{i}", (3, 5, 3, 5, 3), 60, ignore_eos=True) for i in range(3)])
    told = built.engine.speculation()
    check(told)
    assert told["mode"] == mode
    assert told["drafters"] == ([] if drafter == "none" else ["lookup", "grammar"])
    assert set(told["choices"]) == set(told["drafters"])
    assert told["steps"] > fresh["steps"]
    rows = {row["why"] for table in told["choices"].values() for row in table}
    if drafter == "lookup":
        assert rows <= {"auto": {"worth_it", "not_worth_it"}, "off": {"off"}}.get(mode, {"fixed"})
    if mode == "off":
        assert told["off_reasons"]["off"] > 0
        assert told["wasted_draft_tokens"] == 0


def test_a_failed_planner_is_told() -> None:
    planner, meter = ShieldedPlanner(FixedPlanner()), Meter(CostModel())
    assert describe(planner, meter, ("lookup",))["mode"] == "unmeasured"
    planner.inner = None
    told = describe(planner, meter, ("lookup",))
    check(told)
    assert told["mode"] == "failed"
    assert told["speedup"] is None
    assert report(planner, meter, ("lookup",)) == SpeculationReport()


def test_it_is_read_between_steps_and_costs_none() -> None:
    async def body(bench: Bench) -> None:
        check(await bench.engine.speculation())
        assert bench.gate.passes == 0
        assert not bench.steps
        stream = bench.engine.submit(ask("r", PROMPT, 40, ignore_eos=True))
        bench.gate.open.set()
        seen = [await bench.engine.speculation() for _ in range(10)]
        await read(stream)
        last = await bench.engine.speculation()
        assert [told["steps"] for told in seen] == sorted(told["steps"] for told in seen)
        await until(lambda: not bench.built.engine.has_work)
        assert last["steps"] == len(bench.steps)

    Bench(closed=True, drafter="lookup").run(body)


def test_many_ask_at_once_and_some_give_up() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 5))
        await until(lambda: bench.gate.reached)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.engine.speculation(), 0.01)
        waiting = [asyncio.create_task(bench.engine.speculation()) for _ in range(20)]
        await asyncio.sleep(0)
        waiting.pop().cancel()
        bench.gate.open.set()
        for told in await asyncio.gather(*waiting):
            check(told)
        await read(stream)
        await until(lambda: not bench.engine._looks)

    Bench(closed=True, drafter="lookup").run(body)


def test_without_an_engine_it_is_refused() -> None:
    async def body(bench: Bench) -> None:
        await bench.engine.stop()
        with pytest.raises(EngineUnavailable, match="stopped"):
            await bench.engine.speculation()

    bench = Bench()
    with pytest.raises(EngineUnavailable, match="new"):
        asyncio.run(bench.engine.speculation())
    bench.run(body)


def test_an_engine_that_dies_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 5))
        await until(lambda: bench.gate.reached)
        asked = asyncio.create_task(bench.engine.speculation())
        await asyncio.sleep(0)
        monkeypatch.setattr(bench.built.engine, "_commit", lambda *_: 1 / 0)
        monkeypatch.setattr(bench.engine, "_read_inbox", lambda _: 1 / 0)
        bench.gate.open.set()
        with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
            await asked
        await read(stream)

    Bench(closed=True).run(body)


def test_a_fault_in_telling_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(bench.built.engine, "speculation", lambda: 1 / 0)
            with pytest.raises(RequestFailed, match="ZeroDivisionError"):
                await bench.engine.speculation()
        assert bench.engine.state == "ready"
        check(await bench.engine.speculation())

    Bench().run(body)


# -- each request --------------------------------------------------------------------------


def test_the_speed_up_of_a_request_is_unknown_until_there_is_a_baseline() -> None:
    """Always drafting, there is no plain step to compare with: no number is made up."""
    built = make_engine(drafter=ScriptedDrafter(lambda _, n: [4] * n))
    done = run(built, [ask("r", PROMPT, 3, ignore_eos=True)])
    assert finished(done, "r") == [None]


def test_a_single_pass_has_none() -> None:
    built = make_engine(drafter="none", mode="off")
    done = run(built, [ask("long", PROMPT, 30, ignore_eos=True), ask("one", PROMPT, 1)])
    assert finished(done, "one") == [None]
    [value] = finished(done, "long")
    assert value is not None


def test_off_reads_about_one_and_each_choice_has_its_own() -> None:
    built = make_engine(drafter="lookup", mode="off")
    done = run(built, [ask("r", PROMPT, 40, ignore_eos=True, n=3)])
    values = finished(done, "r")
    assert len(values) == 3
    # What planning takes is charged; the fake model's passes are short.
    assert all(value is not None and 0.5 < value <= 1.0 for value in values)


def with_clock(old: Engine, clock: Callable[[], float]) -> Engine:
    return Engine(
        old.parts,
        max_model_len=old.max_model_len,
        default_drafters=old.default_drafters,
        max_draft=old.max_draft,
        clock=clock,
    )


def test_time_between_steps_counts_where_there_was_work() -> None:
    """A clock that goes by one second a look; learning of a step is behind its end."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    engine = with_clock(make_engine(drafter="none", mode="off").engine, clock)

    def step() -> StepStats:
        stats = engine.step().stats
        assert stats is not None
        return stats

    engine.add(ask("r", PROMPT, 4, ignore_eos=True))
    assert step().between_seconds == 0.0
    assert step().between_seconds == 2.0
    now += 1000.0  # another process had the machine
    held_up = step()
    assert held_up.between_seconds == held_up.seconds < 10.0
    assert step().between_seconds == 2.0
    assert not engine.step().events
    now += 3.0  # nothing to do
    engine.add(ask("next", PROMPT, 4, ignore_eos=True))
    assert step().between_seconds == 0.0


def test_the_last_tokens_count() -> None:
    """A clock that goes by one second a look: every step takes as long, so that the meter's
    sums can be told from the passes. With one request they are those of the server."""
    built = make_engine(drafter="none", mode="off")
    now = iter(range(10**9))
    engine = with_clock(built.engine, lambda: float(next(now)))
    done = run(dataclasses.replace(built, engine=engine), [ask("r", PROMPT, 12, ignore_eos=True)])
    meter = engine.parts.meter
    [value] = finished(done, "r")
    # A token left out would be 9 %.
    assert value == pytest.approx(meter.equal_seconds / meter.seconds, rel=0.02)
    assert meter.num_requests == 0  # and it is forgotten


def test_an_aborted_request_has_what_it_has_so_far() -> None:
    built = make_engine(drafter="none", mode="off")
    going = Run(built, [ask("r", PROMPT, 100, ignore_eos=True)])
    for _ in range(20):
        going.step()
    going.abort("r")
    going.finish()
    assert finished(going, "r")[0] is not None


def test_neighbours_keep_to_their_own_wishes() -> None:
    """In one batch: none, few and all drafts, each request as it asked; the texts stay."""
    wishes = {
        "off": OFF,
        "none": SpeculationParams(drafter="none"),
        "two": SpeculationParams(num_speculative_tokens=2),
        "all": SpeculationParams(),
    }
    prompt = (3, 5) * 6
    truth = run(make_engine(drafter="none"), [ask("r", prompt, 60, ignore_eos=True)])
    most: dict[str, int] = dict.fromkeys(wishes, 0)

    def draft(sequence: Any, length: int) -> list[int]:
        name = sequence.request.request_id
        most[name] = max(most[name], length)
        return [(sequence.tokens[-1] + i) % (VOCAB - 1) for i in range(length)]

    built = make_engine(drafter=ScriptedDrafter(draft), max_draft=4)
    requests = [ask(name, prompt, 60, wish, ignore_eos=True) for name, wish in wishes.items()]
    done = run(built, requests)
    assert most == {"off": 0, "none": 0, "two": 2, "all": 4}
    for name in wishes:
        assert done.answers[name].tokens == truth.answers["r"].tokens
        [drafted] = [c.end.stats.draft_tokens for c in done.answers[name].choices.values() if c.end]
        assert (drafted > 0) == (most[name] > 0)


def test_tokens_tell_whose_they_are_if_asked() -> None:
    """Of each step's tokens the first are the draft's, as far as it was kept."""

    def told(
        drafts: Callable[[Any, int], list[int]], trace: bool, tokens: int = 12
    ) -> list[Tokens]:
        built = make_engine(drafter=ScriptedDrafter(drafts), mode="fixed", max_draft=3)
        wish = SpeculationParams(trace=trace)
        going, events = Run(built, [ask("r", (3, 5, 3), tokens, wish, ignore_eos=True)]), []
        while built.engine.has_work:
            events += [event for event in going.step() if isinstance(event, Tokens)]
        return events

    plain = told(lambda *_: [], trace=False, tokens=16)
    truth = [token for event in plain for token in event.token_ids]
    assert all(event.trace is None for event in plain)

    def draft(sequence: Any, length: int) -> list[int]:
        """Two that are right, and one that is not."""
        right = truth[len(sequence.tokens) - sequence.prompt_length :][:2]
        return [*right, (truth[sequence.num_generated + 2] + 1) % VOCAB][:length]

    events = told(draft, trace=True)
    assert [token for event in events for token in event.token_ids] == truth[:12]
    whole = [DraftTrace("scripted", 3, 2, ((truth[at + 2] + 1) % VOCAB,)) for at in (1, 4, 7)]
    assert [event.trace for event in events[1:4]] == whole
    assert events[0].trace is not None
    assert events[0].trace.drafted == 0  # the prompt's step
    # The answer ends at its twelfth token, a draft's: nothing was refused.
    assert events[4].trace == DraftTrace("scripted", 1, 1, ())


def test_a_trace_has_the_speedup_so_far_and_costs_nothing_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What would be said is replaced by a count of passes; and how often it is worked out."""
    asked: list[str] = []

    def so_far(_: Meter, sequence: Any) -> float:
        asked.append(sequence.request.request_id)
        return float(sequence.target_passes)

    monkeypatch.setattr(Meter, "of_request", so_far)
    built = make_engine(drafter=ScriptedDrafter(lambda _, length: [1] * length), max_draft=2)
    going = Run(
        built,
        [
            ask("told", (3, 5, 3), 6, SpeculationParams(trace=True), ignore_eos=True),
            ask("not told", (3, 5, 3), 6, ignore_eos=True),
        ],
    )
    traces = []
    while built.engine.has_work:
        events = [event for event in going.step() if isinstance(event, Tokens)]
        traces += [event.trace for event in events if event.request_id == "told"]
        assert all(event.trace is None for event in events if event.request_id != "told")
    assert [trace.speedup for trace in traces if trace] == [1.0 + i for i in range(len(traces))]
    # Once more each at its end, for the answer's own account.
    assert (asked.count("told"), asked.count("not told")) == (len(traces) + 1, 1)
    [end] = [c.end for c in going.answers["told"].choices.values()]
    assert end is not None
    assert end.stats.drafted_by == (("scripted", end.stats.draft_tokens),)


def test_a_server_that_is_off_stays_off_for_a_request_that_wants_drafts() -> None:
    built = make_engine(drafter="lookup", mode="off")
    wish = SpeculationParams(enabled=True, drafter="lookup", num_speculative_tokens=4)
    done = run(built, [ask("r", (3, 5) * 6, 30, wish, ignore_eos=True)])
    assert not any(stats.drafted_by_position for stats in done.stats)
