"""The engine's thread, as an event loop sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.async_engine import AsyncEngine, EventStream
from engine.batch import Batch
from engine.build import BuiltEngine
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from engine.flight import Stop
from engine.model.passes import Pass
from engine.stats import StepStats
from engine.types import Event, Failed, Finished, FinishReason, Tokens
from tests.fakes import Around, ask, make_config, make_engine
from tests.test_core_limits import greedy_text

PROMPT = (5, 6, 7)
PATIENCE = 120.0  # seconds until a test gives up


class Gate(Around):
    """A runner that waits at a gate before every pass."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.open = threading.Event()
        self.reached = False  # by a pass, whether or not it may go on
        self.passes = 0

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        self.reached = True
        assert self.open.wait(PATIENCE)
        self.passes += 1
        return super().forward(batch, features)


class Bench:
    """An async engine around the fake model."""

    def __init__(self, *, closed: bool = False, config: EngineConfig | None = None, **setup: Any):
        self.built = make_engine(wrap=Gate, **setup)
        self.gate: Gate = self.built.engine.parts.target
        if not closed:
            self.gate.open.set()
        self.steps: list[StepStats] = []
        self.engine = AsyncEngine(
            config or make_config(), on_step=self.steps.append, build=self.build
        )

    def build(self, _config: EngineConfig, _report: Callable[[str], None]) -> BuiltEngine:
        return self.built

    def run(self, body: Callable[[Bench], Awaitable[None]]) -> None:
        """Starts, runs the body, stops, and looks for leaks."""

        async def whole() -> None:
            await self.engine.start()
            try:
                await asyncio.wait_for(body(self), PATIENCE)
            finally:
                self.gate.open.set()
                await self.engine.stop()
            assert not [t for t in threading.enumerate() if t.name == "engine"]

        asyncio.run(whole())


async def read(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


def text(events: list[Event]) -> tuple[int, ...]:
    return tuple(t for e in events if isinstance(e, Tokens) for t in e.token_ids)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


# -- answers ---------------------------------------------------------------------------------


def test_one_request() -> None:
    async def body(bench: Bench) -> None:
        assert bench.engine.state == "ready"
        assert bench.engine.info == bench.built.info
        events = await read(bench.engine.submit(ask("r", PROMPT, 6, ignore_eos=True)))
        assert text(events) == greedy_text(PROMPT, 6)
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH
        assert sum(isinstance(e, Finished) for e in events) == 1

    bench = Bench(drafter="lookup")
    bench.run(body)
    assert bench.engine.state == "stopped"
    assert sum(s.emitted_tokens for s in bench.steps) == 6


def test_many_requests_at_once() -> None:
    async def body(bench: Bench) -> None:
        asked = [ask(f"r{i}", (3 + i, 4), 3 + i % 5, n=1 + i % 3) for i in range(40)]
        answers = await asyncio.gather(*(read(bench.engine.submit(r)) for r in asked))
        for request, events in zip(asked, answers, strict=True):
            assert {e.request_id for e in events} == {request.request_id}
            ended = [e.choice for e in events if isinstance(e, Finished)]
            assert sorted(ended) == list(range(request.sampling.n))

    bench = Bench(drafter="lookup", max_sequences=8)
    bench.run(body)
    assert max(s.running for s in bench.steps) <= 8


def test_a_stream_stays_ended() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 1))
        assert stream.__aiter__() is stream
        await read(stream)
        for _ in range(3):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await stream.aclose()

    Bench().run(body)


def test_one_hop_to_the_event_loop_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests a step serves."""

    async def body(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        streams = [bench.engine.submit(ask(f"r{i}", (i + 3,), 9)) for i in range(12)]
        hops = 0
        real = loop.call_soon_threadsafe

        def spy(*args: Any, **more: Any) -> Any:
            nonlocal hops
            hops += threading.current_thread().name == "engine"
            return real(*args, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", spy)
        bench.gate.open.set()
        await asyncio.gather(*map(read, streams))
        await until(lambda: not bench.built.engine.has_work)
        assert len(bench.steps) <= hops <= len(bench.steps) + 1

    Bench(closed=True).run(body)


def test_an_idle_engine_takes_no_steps() -> None:
    async def body(bench: Bench) -> None:
        await read(bench.engine.submit(ask("r", PROMPT, 2)))
        passes = bench.gate.passes
        await until(lambda: bench.engine.step_age == 0.0)
        await asyncio.sleep(0.05)
        assert bench.gate.passes == passes

    Bench().run(body)


def test_step_age_grows_while_a_step_hangs() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 1))
        await until(lambda: bench.engine.step_age > 0.01)
        bench.gate.open.set()
        await read(stream)
        await until(lambda: bench.engine.step_age == 0.0)

    Bench(closed=True).run(body)


@pytest.mark.parametrize("where", ["add", "abort", "speculation"])
def test_step_age_grows_wherever_the_thread_hangs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only in a step: whoever watches that age must see a thread that never comes round."""

    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 60, ignore_eos=True))
        await until(lambda: bench.gate.reached)
        go_on, work = threading.Event(), getattr(bench.built.engine, where)

        def hang(*given: Any) -> Any:
            assert go_on.wait(PATIENCE)
            return work(*given)

        monkeypatch.setattr(bench.built.engine, where, hang)
        others = [
            asyncio.create_task(read(bench.engine.submit(ask("other", PROMPT, 2)))),
            asyncio.create_task(bench.engine.speculation()),
        ]
        bench.engine.abort("r", 0)
        bench.gate.open.set()
        await until(lambda: bench.engine.step_age > 0.2)
        go_on.set()
        await asyncio.gather(read(stream), *others)
        await until(lambda: bench.engine.step_age == 0.0)

    Bench(closed=True).run(body)


# -- refusals --------------------------------------------------------------------------------


def test_invalid_requests_are_refused_at_once() -> None:
    async def body(bench: Bench) -> None:
        with pytest.raises(InvalidRequest, match="token id 97, out of vocabulary"):
            bench.engine.submit(ask("r", (97,)))
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 256"):
            bench.engine.submit(ask("r", PROMPT, 10_000))
        stream = bench.engine.submit(ask("r", PROMPT, 2))
        with pytest.raises(InvalidRequest, match="'r' is already in flight"):
            bench.engine.submit(ask("r", PROMPT, 2))
        bench.gate.open.set()
        await read(stream)
        await read(bench.engine.submit(ask("r", PROMPT, 2)))  # over, so its id is free

    Bench(closed=True).run(body)


def limits(**changes: int) -> EngineConfig:
    scheduler = SchedulerConfig(**({"max_sequences": 2, "max_batch_tokens": 8} | changes))
    return dataclasses.replace(make_config(), scheduler=scheduler)


def test_a_full_queue_refuses_and_recovers() -> None:
    async def body(bench: Bench) -> None:
        submit = bench.engine.submit
        streams = [submit(ask(f"r{i}", PROMPT, 2)) for i in range(5)]  # 2 run, 3 wait
        with pytest.raises(Overloaded, match=r"5 sequences run or wait.*adds 1.*3 waiting") as no:
            submit(ask("late", PROMPT, 2))
        assert no.value.retry_after > 0
        with pytest.raises(Overloaded):
            submit(ask("late", PROMPT, 2, n=2))
        bench.gate.open.set()
        await asyncio.gather(*map(read, streams))
        await read(submit(ask("late", PROMPT, 2, n=5)))

    Bench(closed=True, config=limits(max_waiting_sequences=3), max_sequences=2).run(body)


def test_too_many_waiting_prompt_tokens_refuse() -> None:
    async def body(bench: Bench) -> None:
        submit = bench.engine.submit
        streams = [submit(ask("long", range(3, 93), 1)), submit(ask("short", PROMPT, 1))]
        with pytest.raises(Overloaded, match="93 prompt tokens wait"):
            submit(ask("late", range(3, 20), 1))
        bench.gate.open.set()
        await asyncio.gather(*map(read, streams))
        await read(submit(ask("late", range(3, 93), 1)))

    Bench(closed=True, config=limits(max_waiting_tokens=100)).run(body)


def test_aborted_and_failed_requests_leave_the_count() -> None:
    """However a request ends, its place in the queue is free again."""

    async def body(bench: Bench) -> None:
        for round_ in range(4):
            streams = [bench.engine.submit(ask(f"r{round_}{i}", PROMPT, 50)) for i in range(5)]
            for stream in streams:
                await stream.aclose()
                await stream.aclose()
            await asyncio.gather(*map(read, streams))
        assert bench.engine._admission._sequences == 0
        assert bench.engine._admission._waiting_tokens == 0

    Bench(config=limits(max_waiting_sequences=3), max_sequences=2).run(body)


# -- callers that leave ----------------------------------------------------------------------


def test_closing_a_stream_aborts() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 200, ignore_eos=True))
        other = bench.engine.submit(ask("other", PROMPT, 30, ignore_eos=True))
        first = await anext(stream)
        assert isinstance(first, Tokens)
        await stream.aclose()
        events = await read(stream)
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.ABORT
        assert text(await read(other)) == greedy_text(PROMPT, 30)

    bench = Bench()
    bench.run(body)
    assert bench.built.engine.parts.pool.num_used == 0


def test_abort_of_one_choice_and_of_unknown_requests() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.engine.submit(ask("r", PROMPT, 20, n=2, ignore_eos=True))
        bench.engine.abort("r", 1, FinishReason.STOP)
        bench.engine.abort("nobody")
        bench.gate.open.set()
        ends = {e.choice: e.reason for e in await read(stream) if isinstance(e, Finished)}
        assert ends == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
        bench.engine.abort("r")

    Bench(closed=True).run(body)


def test_abort_before_the_engine_has_seen_the_request() -> None:
    async def body(bench: Bench) -> None:
        hold = bench.engine.submit(ask("hold", PROMPT, 1))
        await until(lambda: bench.gate.reached)
        stream = bench.engine.submit(ask("r", PROMPT, 20))
        await stream.aclose()
        bench.gate.open.set()
        (end,) = await read(stream)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.ABORT
        assert end.stats.first_scheduled is None
        await read(hold)

    Bench(closed=True).run(body)


# -- the end ---------------------------------------------------------------------------------


def test_stop_drains() -> None:
    async def body(bench: Bench) -> None:
        streams = [bench.engine.submit(ask(f"r{i}", PROMPT, 30, ignore_eos=True)) for i in range(3)]
        stopping = asyncio.create_task(bench.engine.stop(drain_seconds=PATIENCE))
        await until(lambda: bench.engine.state == "draining")
        with pytest.raises(EngineUnavailable, match="shutting down"):
            bench.engine.submit(ask("late", PROMPT))
        bench.gate.open.set()
        for stream in streams:
            assert text(await read(stream)) == greedy_text(PROMPT, 30)
        await stopping
        assert bench.engine.state == "stopped"
        with pytest.raises(EngineUnavailable, match="stopped"):
            bench.engine.submit(ask("late", PROMPT))

    Bench(closed=True).run(body)


def test_stop_fails_what_still_runs() -> None:
    async def body(bench: Bench) -> None:
        streams = [bench.engine.submit(ask(f"r{i}", PROMPT, 200, n=2)) for i in range(3)]
        stopping = asyncio.create_task(bench.engine.stop(drain_seconds=0.01))
        await asyncio.sleep(0.05)
        bench.gate.open.set()
        for stream in streams:
            last = (await read(stream))[-1]
            assert isinstance(last, Failed)
            assert isinstance(last.error, EngineUnavailable)
        await stopping

    Bench(closed=True).run(body)


def test_stop_may_be_called_at_any_time() -> None:
    async def never_started() -> None:
        engine = AsyncEngine(make_config())
        with pytest.raises(EngineUnavailable, match="not started"):
            _ = engine.info
        with pytest.raises(EngineUnavailable, match="new"):
            engine.submit(ask("r", PROMPT))
        await engine.stop()
        assert engine.state == "stopped"

    asyncio.run(never_started())

    async def body(bench: Bench) -> None:
        for _ in range(3):
            await bench.engine.stop()

    Bench().run(body)


def test_a_failed_start_says_why() -> None:
    async def whole() -> None:
        def build(_config: EngineConfig, report: Callable[[str], None]) -> BuiltEngine:
            report("Loading weights")
            raise ConfigurationError("dtype is 'x'; choose another.")

        said: list[str] = []
        engine = AsyncEngine(make_config(), on_progress=said.append, build=build)
        with pytest.raises(ConfigurationError, match="dtype is 'x'"):
            await engine.start()
        assert engine.state == "dead"
        assert said == ["Loading weights"]
        with pytest.raises(EngineUnavailable, match="dead"):
            engine.submit(ask("r", PROMPT))
        await engine.stop()
        assert engine.state == "dead"

    asyncio.run(whole())


def test_a_start_that_is_cancelled_leaves_no_thread_and_no_complaint() -> None:
    """Ctrl-C while the weights load."""

    async def whole() -> None:
        go = threading.Event()
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        built = make_engine()

        def build(_config: EngineConfig, _report: Callable[[str], None]) -> BuiltEngine:
            assert go.wait(PATIENCE)
            return built

        engine = AsyncEngine(make_config(), build=build)
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.state == "loading")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        go.set()
        await engine.stop()
        assert complaints == []
        assert not [t for t in threading.enumerate() if t.name == "engine"]

    asyncio.run(whole())


@pytest.mark.parametrize("error", [RuntimeError("boom: secret"), SystemExit(3), MemoryError()])
def test_death_fails_everybody_and_is_visible(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the state is in doubt, nobody hangs, and nobody new gets in."""

    async def body(bench: Bench) -> None:
        streams = [bench.engine.submit(ask(f"r{i}", PROMPT, 50)) for i in range(3)]
        monkeypatch.setattr(
            bench.built.engine.parts.scheduler, "plan", lambda: (_ for _ in ()).throw(error)
        )
        bench.gate.open.set()
        for stream in streams:
            last = (await read(stream))[-1]
            assert isinstance(last, Failed)
            assert type(error).__name__ in str(last.error)
            assert "secret" not in str(last.error)
        await until(lambda: bench.engine.state == "dead")
        with pytest.raises(EngineUnavailable, match="dead"):
            bench.engine.submit(ask("late", PROMPT))
        await bench.engine.stop(drain_seconds=5)
        assert bench.engine.state == "dead"

    Bench(closed=True).run(body)


def test_a_failing_pass_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(bench.gate, "forward", lambda *_: 1 / 0)
            (last,) = await read(bench.engine.submit(ask("r", PROMPT, 5)))
        assert isinstance(last, Failed)
        assert "ZeroDivisionError" in str(last.error)
        assert bench.engine.state == "ready"
        events = await read(bench.engine.submit(ask("r", PROMPT, 5, ignore_eos=True)))
        assert text(events) == greedy_text(PROMPT, 5)

    Bench().run(body)


def test_a_loop_that_is_gone_does_not_hang_the_thread() -> None:
    """The process is torn down without `stop`: the daemon thread has nobody to tell."""
    bench = Bench(closed=True)

    async def leave() -> None:
        await bench.engine.start()
        bench.engine.submit(ask("r", PROMPT, 3))

    asyncio.run(leave())
    bench.gate.open.set()
    thread = bench.engine._thread
    assert thread is not None
    deadline = time.monotonic() + PATIENCE
    while bench.built.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not bench.built.engine.has_work
    bench.engine._inbox.put(Stop())
    thread.join(PATIENCE)
    assert not thread.is_alive()
