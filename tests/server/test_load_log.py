"""The line on load: right numbers, and none while there is nothing to tell."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from engine.stats import SpeculationReport
from server.cli.load_log import LoadLog
from server.logs import FIELDS, JsonFormatter, TextFormatter
from tests.server.test_metrics import STEP


class Watch:
    """A log whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log = LoadLog(lambda: self.now)


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Watch:
    caplog.set_level(logging.INFO)
    return Watch()


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [r for r in caplog.records if r.name == "specserve.load"]
    assert all(record.levelno == logging.INFO for record in found)
    return [getattr(record, FIELDS) for record in found]


NOW = (("no_proposal", 5),)


def reported(*rows_off: tuple[str, int], **fields: Any) -> SpeculationReport:
    return SpeculationReport(rows_off=rows_off, **fields)


def test_one_line_sums_up_what_was_done(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watch.log.on_step(replace(STEP, speculation=reported(("no_proposal", 3))))
    watch.log.tell()  # of what was before the first step nothing is known but sums
    caplog.clear()
    watch.log.on_step(replace(STEP, speculation=replace(STEP.speculation, rows_off=NOW)))
    watch.log.on_step(replace(STEP, running=2, waiting=0, pages_used=8))
    watch.now += 4.0
    watch.log.tell()
    [line] = lines(caplog)
    assert line == {
        "running": 4,  # at most
        "waiting": 1,
        "tokens_per_second": 18 / 4,
        "prompt_tokens_per_second": 14 / 4,
        "kv_cache": 0.25,
        "tokens_per_pass": 18 / 8,
        "draft_length": round(16 / 6, 3),
        "acceptance": 10 / 16,
        "speedup": 1.5,
        "speedup_low": 1.4,
        "speedup_high": 1.6,
        "speedup_basis": "measured",
        "not_drafted": 2 / 8,
        "not_drafted_mostly": "no_proposal",
    }


def test_silence_while_idle(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        watch.now += 5.0
        watch.log.tell()
    watch.log.on_step(STEP)
    watch.log.tell()
    for _ in range(3):
        watch.now += 5.0
        watch.log.tell()
    assert len(lines(caplog)) == 1


def test_each_line_stands_for_its_own_time(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """Sums since start become differences; the reason of the last seconds is told."""
    watch.log.on_step(replace(STEP, speculation=reported(("guard", 60), ("shadow", 1))))
    watch.log.on_step(replace(STEP, speculation=reported(("guard", 64), ("shadow", 1))))
    watch.now += 2.0
    watch.log.tell()
    watch.log.on_step(replace(STEP, speculation=reported(("guard", 64), ("shadow", 3))))
    watch.now += 2.0
    watch.log.tell()
    first, second = lines(caplog)
    assert first["not_drafted_mostly"] == "guard"
    assert (second["not_drafted_mostly"], second["not_drafted"]) == ("shadow", 0.5)
    assert second["tokens_per_second"] == first["tokens_per_second"] / 2


def test_what_is_unknown_or_never_was_is_null(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that is read, and a planner that has failed: its sums are gone."""
    watch.log.on_step(STEP)
    watch.log.tell()
    prefill = {"decode_sequences": 0, "emitted_tokens": 0, "speculation": SpeculationReport()}
    bare = replace(STEP, drafted_by_position=(), accepted_by_position=(), **prefill)
    watch.log.on_step(bare)
    watch.log.tell()
    line = lines(caplog)[1]
    nulls = {name for name, value in line.items() if value is None}
    assert nulls >= {"tokens_per_pass", "draft_length", "acceptance", "speedup", "not_drafted"}
    assert line["speedup_basis"] == "unknown"


def test_it_reads_well_as_text_and_as_json(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watch.log.on_step(STEP)
    watch.now += 5.0
    watch.log.tell()
    [record] = [r for r in caplog.records if r.name == "specserve.load"]
    text = TextFormatter().format(record)
    assert "specserve.load: load running=4 waiting=1 tokens_per_second=1.8 " in text
    assert " speedup=1.5 speedup_low=1.4 speedup_high=1.6 speedup_basis=measured " in text
    assert json.loads(JsonFormatter().format(record))["tokens_per_second"] == 1.8
