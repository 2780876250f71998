"""What a run found, and as JSON for keeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.compare import MIN_ROUNDS, Equality, Ratio, check_equal, ratios
from loadtest.plan import Lane, Level
from loadtest.runner import DEAD_AFTER, BlockResult, Record
from loadtest.stats import Slo, Summary, summarise

#: A client whose timers are later than this (seconds) was itself a bottleneck.
_BUSY_CLIENT = 0.02


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is written about a run.

    Args:
        settings: how it was started, JSON-ready and free of secrets.
        equality: None when it was not asked for.
        notes: what a reader must know to trust or distrust the numbers.
    """

    settings: Mapping[str, Any]
    lanes: Sequence[Lane]
    levels: Sequence[Level]
    results: Sequence[BlockResult]
    summaries: Sequence[Summary]
    ratios: Sequence[Ratio]
    equality: Equality | None
    notes: Sequence[str]


def make_report(
    settings: Mapping[str, Any],
    lanes: Sequence[Lane],
    levels: Sequence[Level],
    results: Sequence[BlockResult],
    slo: Slo,
) -> Report:
    """Draws the conclusions from `results`; what was not measured is left out.

    Compares texts when `settings["check_equal"]` is true.
    """
    summaries, found = [], []
    for level in levels:
        for lane in lanes:
            blocks = [r for r in results if r.block.lane is lane and r.block.level == level]
            if blocks:
                summaries.append(summarise(lane, level, blocks, slo))
            if lane is not lanes[0]:
                found += ratios(results, level, lanes[0], lane, int(settings.get("seed", 0)))
    equality = check_equal(results, lanes) if settings.get("check_equal") else None
    notes = _notes(lanes, results, summaries)
    return Report(settings, lanes, levels, results, summaries, found, equality, notes)


def _notes(
    lanes: Sequence[Lane], results: Sequence[BlockResult], summaries: Sequence[Summary]
) -> list[str]:
    notes = []
    if any(not result.complete for result in results):
        notes.append("The run was interrupted: the last block is partial and not compared.")
    if unknown := sorted({s.lane for s in summaries if s.output_tokens is None}):
        notes.append(f"No usage from {', '.join(unknown)}: token numbers are unknown, not guessed.")
    if unknown := sorted({s.lane for s in summaries if s.inter_token is None and s.tpot}):
        notes.append(
            f"{', '.join(unknown)} sent no running usage: tokens of a chunk are unknown, so "
            "there is no inter-token latency, and TPOT takes the first chunk for one token."
        )
    if (lag := max((s.client_lag for s in summaries), default=0.0)) > _BUSY_CLIENT:
        notes.append(
            f"The load generator itself was late by up to {1000 * lag:.0f} ms (99th percentile "
            "of its timers): latencies include that. Give it a free core."
        )
    if len(lanes) > 1 and any(result.block.round % 2 == 0 for result in results):
        rounds = 1 + max(result.block.round for result in results)
        if rounds % 2:
            notes.append("An odd number of rounds lets one lane go first more often than another.")
        if rounds < MIN_ROUNDS:
            notes.append(f"Confidence intervals need at least {MIN_ROUNDS} rounds.")
    if any(_gave_up(result) for result in results):
        notes.append(f"A block ended early: {DEAD_AFTER} connections failed in a row.")
    return notes


def _gave_up(result: BlockResult) -> bool:
    last = [record.answer.error for record in result.records[-DEAD_AFTER:]]
    return last == ["connection"] * DEAD_AFTER


def as_json(report: Report) -> dict[str, Any]:
    """The report and every request's measurements; neither prompts nor answers."""
    return {
        "settings": dict(report.settings),
        "summaries": [asdict(summary) for summary in report.summaries],
        "ratios": [asdict(ratio) for ratio in report.ratios],
        "equality": None if report.equality is None else asdict(report.equality),
        "notes": list(report.notes),
        "blocks": [_block_json(result) for result in report.results],
    }


def _block_json(result: BlockResult) -> dict[str, Any]:
    return {
        "level": str(result.block.level),
        "round": result.block.round,
        "lane": result.block.lane.name,
        "seconds": result.seconds,
        "complete": result.complete,
        "max_in_flight": result.max_in_flight,
        "client_lag": result.lag,
        "requests": [_record_json(record) for record in result.records],
    }


def _record_json(record: Record) -> dict[str, Any]:
    answer = record.answer
    return {
        "index": record.index,
        "turn": record.turn,
        "category": record.category,
        "seconds": answer.seconds,
        "ttft": answer.ttft,
        "tpot": answer.tpot,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "detail": answer.detail,
        "chunks": [[round(chunk.at, 6), chunk.tokens] for chunk in answer.chunks],
    }
