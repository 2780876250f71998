"""`specserve audit`: a sound engine passes, a broken one does not, and the odds are right."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

from engine.audit.distribution import chi_square, detectable, upper_tail
from engine.audit.options import ODDS, AuditOptions
from engine.audit.recompute import gap_between, logits_after, processed_after
from engine.audit.run import AuditReport, audit_engine
from engine.build import BuiltEngine
from engine.errors import ConfigurationError, InvalidRequest
from engine.judge import Judge
from engine.sampling import Purpose, gumbel, noise_key
from engine.types import Request, SamplingParams
from server.cli import audit as audit_command
from server.cli import main
from tests.caches import own_cache
from tests.fakes import Setup, ask, make_engine, run, tiny
from tests.lossless.broken import Generous, Leaky
from tests.lossless.test_selftest import Uneven
from tests.lossless.worlds import TableDrafter, V, engine_of, fix_seeds, loaded
from tests.tiny_models import VOCAB, eager

PROMPTS = [tuple((3 + i * j) % VOCAB for j in range(1, 5)) * 3 for i in range(1, 9)]
QUICK = AuditOptions(max_tokens=30, streams=4, samples=0)


def engine(judge: type[Judge] = Judge, **changes: Any) -> BuiltEngine:
    built = make_engine(**({"drafter": "lookup", "num_pages": 400} | changes))
    parts = built.engine.parts
    sound = parts.judge
    built.engine.parts = dataclasses.replace(
        parts, judge=judge(sound.vocab_size, sound.eos_token_ids)
    )
    return built


# -- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("real", [True, False])
def test_a_sound_engine_is_clean(temperature: float, real: bool) -> None:
    built = engine(**({"loaded": tiny().loaded} if real else {}))
    options = dataclasses.replace(QUICK, temperature=temperature)
    report = audit_engine(built, PROMPTS, options)
    assert report.clean
    assert report.prompts == len(PROMPTS)
    assert report.comparison.tokens > 100
    assert report.comparison.drafted > 0
    assert report.comparison.mismatches == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("judge", [Generous, Leaky])
def test_a_verification_bug_is_a_fault(judge: type[Judge], temperature: float) -> None:
    options = dataclasses.replace(QUICK, temperature=temperature)
    report = audit_engine(engine(judge), PROMPTS, options)
    assert not report.clean
    assert report.comparison.faults
    if judge is Leaky:  # only requests with penalties can tell
        assert {m.request_id for m in report.comparison.mismatches} <= {"audit3", "audit7"}
    for found in report.comparison.faults:
        assert found.gap > report.near_tie
        assert found.speculated != found.plain


def test_rounding_that_turns_a_tie_is_no_fault() -> None:
    """Logits that depend on the rows in a pass, by less than a near-tie is apart."""

    class Flat(Uneven):
        def change(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            logits = super().change(batch, logits)
            logits[:, 5:7] = 50.0  # two best tokens, as good as each other
            if batch.input_ids.numel() % 2:
                logits[:, 6] += 5e-4
            return logits

    built = engine(wrap=lambda runner: Flat(runner, 0.0))
    report = audit_engine(built, PROMPTS, QUICK)
    assert report.comparison.near_ties
    assert report.comparison.faults == []
    assert report.clean


def test_a_request_that_fails_is_not_clean() -> None:
    class Nothing(Uneven):
        def change(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits * (torch.nan if batch.input_ids.numel() > 40 else 1)

    report = audit_engine(engine(wrap=lambda r: Nothing(r, 0.0)), PROMPTS, QUICK)
    assert report.comparison.failures
    assert not report.clean


def test_the_second_run_cannot_hide_behind_pages_of_the_first() -> None:
    """Speculation that spoils the cache shows, although both runs ask the same."""

    class Spoils(Uneven):
        def change(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            if batch.context_lengths.numel() == 1 and batch.input_ids.numel() > 1:
                self.inner._tokens[int(batch.slots[-1])] = 1
            return logits

    report = audit_engine(
        engine(wrap=lambda r: Spoils(r, 0.0)), PROMPTS, dataclasses.replace(QUICK, streams=1)
    )
    assert report.comparison.faults


def test_prompts_that_do_not_fit_are_skipped() -> None:
    built = engine()
    report = audit_engine(built, [PROMPTS[0], (5,) * 250], QUICK)
    assert (report.prompts, report.skipped) == (1, 1)
    with pytest.raises(InvalidRequest, match="none of 1 prompts fits into 256 tokens"):
        audit_engine(built, [(5,) * 250], QUICK)


def test_a_row_computed_once_more_is_the_models() -> None:
    built = make_engine(tiny())
    tokens = [*range(3, 40)]
    logits = logits_after(built.engine.parts, tokens)
    torch.testing.assert_close(
        logits[0], eager("llama")(torch.tensor([tokens])).logits[0, -1], atol=1e-4, rtol=0
    )
    built.engine.check()
    assert built.engine.parts.pool.num_used == 0
    with pytest.raises(RuntimeError, match="2 free pages cannot hold 37 tokens"):
        logits_after(make_engine(tiny(), num_pages=2).engine.parts, tokens)


def test_gaps_are_those_of_the_decision() -> None:
    built = make_engine(tiny(), drafter="none")
    greedy = ask("g", (4, 5, 6), 4, frequency_penalty=1.0)
    said = run(built, [greedy]).answers["g"].tokens
    parts = built.engine.parts
    assert gap_between(parts, greedy, said[:2], (said[2], said[2])) == 0.0
    scores = processed_after(parts, greedy, said[:2])
    worst = int(scores.argmin())
    assert gap_between(parts, greedy, said[:2], (said[2], worst)) == pytest.approx(
        float(scores.max() - scores.min())
    )
    seeded = Request("s", (4, 5, 6), SamplingParams(max_tokens=4, temperature=0.5, seed=-3))
    said = run(make_engine(tiny()), [seeded]).answers["s"].tokens
    assert gap_between(parts, seeded, said[:3], (said[3], said[3])) == 0.0
    key = noise_key(-3, 0, 6, Purpose.TOKEN)
    race = processed_after(parts, seeded, said[:3]).double() + gumbel(key, torch.arange(VOCAB))
    runner_up = int(race.argsort()[-2])
    assert gap_between(parts, seeded, said[:3], (said[3], runner_up)) == pytest.approx(
        0.5 * float(race.max() - race[runner_up])
    )


# -- distributions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "lies"),
    [("match", True), *((rule, lies) for rule in ("rejection", "block") for lies in (False, True))],
)
def test_distributions(rule: str, lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound rules pass, with drafts that were kept; a wrong q is noticed where q is used."""
    fix_seeds(monkeypatch)
    told = (lambda q: torch.full_like(q, 1 / V)) if lies else (lambda q: q)
    setup = Setup(loaded(), num_pages=600, max_sequences=64, max_batch_tokens=256)
    built = engine_of(setup, rule, drafter=TableDrafter(told=told), max_draft=3)
    options = AuditOptions(max_tokens=5, streams=2, samples=1500)
    prompts = [(1, 2, 3)] if lies else [(1, 2, 3), (3, 0)]
    report = audit_engine(built, prompts, options)
    assert report.clean is (not lies or rule == "match")
    assert len(report.distributions) == len(prompts)
    for test in report.distributions:
        assert test.samples >= 1500
        assert test.drafted > test.accepted > 100
        assert test.degrees > 10
        assert 0.05 < test.detectable < 0.3


def test_the_tail_is_that_of_chi_square() -> None:
    for degrees in (1, 5, 63, 255):
        for statistic in (0.5, degrees, 3 * degrees + 20):
            expected = scipy.stats.chi2.sf(statistic, degrees)
            assert upper_tail(statistic, degrees) == pytest.approx(expected, rel=1e-9)


def test_detectable_bias_has_the_power_that_is_claimed() -> None:
    for degrees, samples in ((15, 6400), (63, 2000), (255, 20_000)):
        bias = 4 * samples * detectable(degrees, samples) ** 2
        limit = scipy.stats.chi2.isf(ODDS, degrees)
        assert 0.98 < scipy.stats.ncx2.sf(limit, degrees, bias) < 0.997


def test_texts_that_cannot_be_and_texts_that_are_rare() -> None:
    assert chi_square(Counter({(1,): 50, (2,): 50, (3,): 1}), {(1,): 0.5, (2,): 0.5}) == (0.0, 1)
    expected = {(1,): 0.6, (2,): 0.38, (3,): 0.01, (4,): 0.01}
    chance, degrees = chi_square(Counter({(1,): 60, (2,): 38, (3,): 2}), expected)
    assert degrees == 2  # the two rare ones count together
    assert chance == pytest.approx(1.0)
    assert chi_square(Counter({(1,): 9}), {(1,): 1.0}) == (1.0, 0)


# -- the command -----------------------------------------------------------------------------


def test_built_in_prompts_and_turns_are_read(tmp_path: Path) -> None:
    assert len(audit_command.read_prompts(None)) > 30
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n')
    assert audit_command.read_prompts(file) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "line 1 of"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 of .* has neither `prompt` nor `turns`"),
        ('"a"', "line 1 of .* has neither"),
        ('{"turns": []}', "has neither"),
        ("", "holds no prompt"),
    ],
)
def test_prompts_that_are_none(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        audit_command.read_prompts(file)


@pytest.mark.parametrize(
    "flags", [["--streams", "0"], ["--temperature", "3"], ["--samples=-1"], ["--max-tokens", "0"]]
)
def test_flags_out_of_range_are_mistakes(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"specserve: {flags[0].split('=')[0]} is ")


def make_prompts(place: Path) -> str:
    file = place / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": word * 6}) for word in ("abc ", "in ", "12 ")))
    return str(file)


@pytest.mark.parametrize(("judge", "code"), [(Judge, 0), (Generous, 1)])
def test_the_exit_code_is_the_verdict(
    judge: type[Judge],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole command on a model in a directory, and on a build with a verification bug."""
    from engine.model import sources
    from tests.tiny import write_gguf

    monkeypatch.setenv("SPECSERVE_HOME", str(own_cache(tmp_path)))
    monkeypatch.setattr("engine.build.Judge", judge)
    model = sources.resolve(str(write_gguf(tmp_path / "Tiny.gguf")))
    flags = ["--model", str(model), "--threads", "1", "--dtype", "float32"]
    asked = ["--prompts", make_prompts(tmp_path), "--max-tokens", "40", "--samples", "256"]
    assert main(["audit", *flags, "--kv-cache-memory", "16MiB", *asked]) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == ("verdict: " + ("SPECULATION CHANGED WHAT WAS SAID" if code else "clean"))
    rows = {line[:18].strip(): line[18:] for line in shown}
    assert rows["prompts"] == "3 answered, 0 skipped (too long)"
    assert (rows["faults"] == "0") is (code == 0)
    assert "bit for bit" in rows["numerics"]
    assert "chance" in rows["distribution"]
    assert any("with speculation" in line for line in shown) is bool(code)


def test_an_audit_without_drafts_says_that_it_proves_nothing() -> None:
    built = engine(drafter="none")
    report = audit_engine(built, PROMPTS[:1], QUICK)
    assert any("nothing is proven" in line for line in audit_command.lines(report))


def test_a_long_list_of_mismatches_is_cut() -> None:
    report = audit_engine(engine(Generous), PROMPTS * 6, QUICK)
    assert isinstance(report, AuditReport)
    assert len(report.comparison.mismatches) > 10
    assert sum(" token " in line for line in audit_command.lines(report)) == 10
