"""Online audits: they find what they should, and nobody is kept waiting for them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.audit import online
from engine.audit.online import PATIENCE, OnlineAudit
from engine.build import BuiltEngine, assemble
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigurationError
from engine.judge import Judge
from engine.stats import AuditStats, StepStats
from engine.types import Event, Finished, Request, SamplingParams
from server.cli.settings import Settings
from server.metrics.registry import Metrics
from tests.drafters import ScriptedDrafter
from tests.fakes import Around, Run, ask, load_fake, make_config, make_engine, tiny
from tests.lossless.broken import Generous, Leaky

PROMPT = (7, 8, 9) * 3


def auditing(rate: float = 1.0, judge: type[Judge] = Judge, **changes: Any) -> BuiltEngine:
    """An engine that audits itself; its drafter guesses the last token again and again."""
    repeats = ScriptedDrafter(lambda s, n: s.tokens[-1:] * n)
    built = make_engine(**({"drafter": repeats, "max_draft": 3} | changes))
    old = built.engine
    sound = old.parts.judge
    parts = dataclasses.replace(old.parts, judge=judge(sound.vocab_size, sound.eos_token_ids))
    old.parts = parts
    return dataclasses.replace(built, idle=OnlineAudit(old, rate, "float32"))


def task(built: BuiltEngine) -> OnlineAudit:
    """The engine's idle task."""
    assert isinstance(built.idle, OnlineAudit)
    return built.idle


class Served(Run):
    """Steps an engine as its thread does: the idle task hears of everything."""

    def add(self, request: Request) -> None:
        task(self.built).watch(request)
        super().add(request)

    def step(self, *, check: bool = False) -> list[Event]:
        events = super().step(check=check)
        task(self.built).observe(events)
        return events


def audits(built: BuiltEngine, most: int = 500) -> list[AuditStats]:
    """Idles until nothing waits to be audited; nobody else may hear of it."""
    found = []
    while task(built).patience is not None:
        stats = task(built).step()
        assert not built.engine.has_work
        found += [stats] if stats else []
        most -= 1
        assert most
    built.engine.check()
    return found


def greedy(count: int = 4, tokens: int = 24, **sampling: Any) -> list[Request]:
    return [ask(f"r{i}", (*PROMPT, i), tokens, ignore_eos=True, **sampling) for i in range(count)]


# -- what is found ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [{}, {"frequency_penalty": 1.0, "repetition_penalty": 1.2}, {"n": 2}, {"min_tokens": 9}],
)
def test_sound_answers_are_compared_token_by_token(sampling: dict[str, Any]) -> None:
    built = auditing(loaded=tiny().loaded)
    done = Served(built, greedy(**sampling)).finish()
    drafted = [a.choices[0].end.stats.draft_tokens for a in done.answers.values()]  # type: ignore
    assert all(drafted)
    assert audits(built) == [AuditStats(24, 0, 0)] * 4


@pytest.mark.parametrize(
    ("judge", "sampling"), [(Generous, {}), (Leaky, {"frequency_penalty": -2.0})]
)
def test_a_verification_bug_is_a_fault(
    judge: type[Judge], sampling: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    built = auditing(judge=judge)
    Served(built, greedy(**sampling)).finish()
    found = audits(built)
    assert sum(stats.faults for stats in found) >= 2
    assert all(stats.tokens <= 24 and not stats.near_ties for stats in found)
    assert "speculation changed token" in caplog.text
    assert "(a fault)" in caplog.text


def test_a_near_tie_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(online.NEAR_TIE, "float32", 1e9)
    built = auditing(judge=Generous)
    Served(built, greedy()).finish()
    found = audits(built)
    assert sum(stats.near_ties for stats in found) >= 2
    assert not any(stats.faults for stats in found)


def test_aborted_answers_are_compared_as_far_as_they_came() -> None:
    built = auditing()
    running = Served(built, greedy(1, tokens=60))
    while len(running.answers["r0"].choices[0].tokens) < 10:
        running.step()
    running.abort("r0")
    running.finish()
    assert audits(built) == [AuditStats(len(running.answers["r0"].tokens), 0, 0)]


def test_only_a_share_of_greedy_answers_with_drafts_is_audited() -> None:
    built = auditing(rate=0.25)
    Served(built, greedy(8)).finish()
    assert len(audits(built)) == 2
    sampled = [Request("s", PROMPT, SamplingParams(max_tokens=8, seed=1))]
    for requests, drafter in ((sampled, None), (greedy(2), "none")):
        built = auditing(**({"drafter": drafter} if drafter else {}))
        Served(built, requests).finish()
        assert task(built).patience is None


def test_answers_that_wait_are_few() -> None:
    built = auditing()
    for first in range(0, 80, 8):
        requests = [ask(f"r{first + i}", (*PROMPT, i), 6) for i in range(8)]
        Served(built, requests).finish()
    assert len(audits(built, most=5000)) <= 64


# -- callers come first ----------------------------------------------------------------------


def test_no_audit_begins_while_there_is_work() -> None:
    built = auditing()
    Served(built, greedy(1)).finish()
    assert task(built).patience == PATIENCE
    running = Served(built, [ask("later", PROMPT, 30, temperature=1.0, seed=1)])
    while built.engine.has_work:
        running.step()
        assert task(built)._audit is None
    assert task(built).patience == PATIENCE
    assert len(audits(built)) == 1


def test_an_audit_makes_way_at_once_and_begins_anew() -> None:
    built = auditing(num_pages=40)
    engine, pool = built.engine, built.engine.parts.pool
    Served(built, greedy(1, tokens=40)).finish()
    parts, limits = engine.parts, engine.parts.scheduler.config
    for _ in range(5):
        task(built).step()
    assert task(built).patience == 0.0
    assert pool.num_used
    # Nothing of what serves has been touched, nor has it anything to do.
    assert engine.parts is parts
    assert engine.parts.scheduler.config is limits
    assert not engine.has_work
    done = Served(built)
    done.add(ask("caller", PROMPT, 12, temperature=1.0, seed=1))
    assert pool.num_used == 0
    assert task(built).patience == PATIENCE
    done.finish(check=True)
    assert done.answers["caller"].tokens
    assert audits(built) == [AuditStats(40, 0, 0)]


def test_an_audit_feeds_few_tokens_a_step() -> None:
    rows: list[int] = []

    class Counting(Around):
        def change(self, batch: Any, logits: Any) -> Any:
            rows.append(batch.input_ids.numel())
            return logits

    built = auditing(wrap=Counting, max_batch_tokens=128)
    Served(built, [ask("long", PROMPT * 10, 12, ignore_eos=True)]).finish()
    assert max(rows) == 90
    rows.clear()
    assert audits(built) == [AuditStats(12, 0, 0)]
    assert max(rows) == 16


def test_an_audit_leaves_no_page_and_no_statistics() -> None:
    built = auditing()
    Served(built, greedy(2)).finish()
    pool = built.engine.parts.pool
    cached, free = len(pool._cached), len(pool._free)
    audits(built)
    assert (len(pool._cached), len(pool._free)) == (cached, free)


def test_an_audit_does_not_read_pages_of_the_answer_it_checks() -> None:
    """Speculation that wrote wrong keys and values must not convince its own auditor."""
    built = auditing()
    Served(built, greedy(1)).finish()
    task(built).step()
    audit = task(built)._audit
    assert audit is not None
    [sequence] = audit.engine.parts.scheduler.running
    assert sequence.cached_prompt_tokens == 0
    audit.engine.check()  # the serving engine holds no page beside it
    audits(built)


# -- the whole way ---------------------------------------------------------------------------


def test_a_configuration_decides() -> None:
    config = dataclasses.replace(make_config(), audit_rate=0.0)
    assert assemble(config, load_fake()).idle is None
    config = dataclasses.replace(config, audit_rate=0.5)
    assert isinstance(assemble(config, load_fake()).idle, OnlineAudit)
    assert Settings(audit_rate=0.5).engine_config("x").audit_rate == 0.5
    with pytest.raises(ConfigurationError, match=r"audit_rate is 1\.5; it must be from 0 to 1"):
        EngineConfig(ModelConfig("x"), audit_rate=1.5)


def test_an_idle_server_audits_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "PATIENCE", 0.05)
    built = auditing(judge=Generous)
    metrics = Metrics("m")
    steps: list[StepStats] = []

    async def serve() -> int:
        engine = AsyncEngine(
            make_config(),
            on_step=steps.append,
            on_audit=metrics.on_audit,
            build=lambda _config, _report: built,
        )
        await engine.start()
        streams = [engine.submit(request) for request in greedy(3)]
        ends = [[e async for e in s if isinstance(e, Finished)] for s in streams]
        before = len(steps)
        while "specserve_audit_tokens_total" not in counted(metrics):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert len(steps) == before
        await engine.stop()
        return len(ends)

    assert asyncio.run(asyncio.wait_for(serve(), 120)) == 3
    seen = counted(metrics)
    assert seen["specserve_audit_tokens_total"] > 0
    assert seen['specserve_audit_mismatches_total{kind="fault"}'] > 0
    assert seen['specserve_audit_mismatches_total{kind="near_tie"}'] == 0


def counted(metrics: Metrics) -> dict[str, float]:
    """Audit metrics that are not all zero."""
    text = metrics.render(None, step_age=0.0).decode().replace(',model_name="m"', "")
    lines = [line for line in text.splitlines() if line.startswith("specserve_audit")]
    pairs = [line.split() for line in lines]
    values = {name.replace('{model_name="m"}', ""): float(value) for name, value in pairs}
    return values if values["specserve_audit_tokens_total"] else {}
