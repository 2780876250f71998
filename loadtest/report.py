"""What a run found: tables for a terminal, Markdown and JSON for keeping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.compare import MIN_ROUNDS, Equality, Ratio, check_equal, ratios
from loadtest.plan import Lane, Level
from loadtest.runner import DEAD_AFTER, BlockResult, Record
from loadtest.stats import Slo, Spread, Summary, summarise

#: A client whose timers are later than this (seconds) was itself a bottleneck.
_BUSY_CLIENT = 0.02

#: Mismatches shown in a table; the JSON holds all.
_SHOWN_MISMATCHES = 10

#: Title, head and rows of a table.
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

_HEAD = (
    "level", "lane", "ok", "failed", "tok/s", "req/s", "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms", "ITL p50 / p99 ms", "tok/chunk", "goodput req/s",
)  # fmt: skip


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


def _number(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _milliseconds(values: Spread | None) -> str:
    if values is None:
        return "unknown"
    return f"{1000 * values.p50:.1f} / {1000 * values.p99:.1f}"


def _summary_rows(summaries: Iterable[Summary]) -> list[tuple[str, ...]]:
    return [
        (
            s.level,
            s.lane,
            str(s.requests - s.failed),
            ", ".join(f"{count} {kind}" for kind, count in s.errors.items()) or "0",
            _number(s.tokens_per_second),
            _number(s.requests_per_second, 2),
            _milliseconds(s.ttft),
            _milliseconds(s.tpot),
            _milliseconds(s.inter_token),
            _number(s.tokens_per_chunk, 2),
            "no SLO"
            if s.goodput is None
            else f"{s.goodput:.2f} ({100 * (s.good_share or 0):.0f} %)",
        )
        for s in summaries
    ]


def _ratio_rows(found: Iterable[Ratio]) -> list[tuple[str, ...]]:
    return [
        (
            r.level,
            r.lane,
            r.statistic,
            _value(r, r.baseline_value),
            _value(r, r.value),
            f"{r.ratio:.3f}",
            "unknown" if r.low is None or r.high is None else f"{r.low:.3f} to {r.high:.3f}",
            str(r.rounds),
        )
        for r in found
    ]


def _value(ratio: Ratio, value: float) -> str:
    return f"{value:.1f}" if "per second" in ratio.statistic else f"{1000 * value:.1f} ms"


def _mismatch_rows(equality: Equality) -> list[tuple[str, ...]]:
    return [
        (m.level, m.lane, f"{m.index}.{m.turn}", m.category, m.what, str(m.at),
         repr(m.baseline_excerpt), repr(m.excerpt))
        for m in equality.mismatches[:_SHOWN_MISMATCHES]
    ]  # fmt: skip


def _tables(report: Report) -> list[_Table]:
    """Every table that has rows."""
    base = report.lanes[0].name
    tables: list[_Table] = [("Load", _HEAD, _summary_rows(report.summaries))]
    head: tuple[str, ...] = (
        "level",
        "lane",
        "statistic",
        base,
        "lane's",
        "ratio",
        "95 % interval",
        "rounds",
    )
    tables.append((f"Compared with {base}", head, _ratio_rows(report.ratios)))
    if report.equality is not None:
        head = ("level", "lane", "request", "category", "differs in", "at", base, "lane's")
        tables.append(("Different answers", head, _mismatch_rows(report.equality)))
    return [table for table in tables if table[2]]


def _equality_line(equality: Equality) -> str:
    return (
        f"Equality: {equality.compared} pairs compared, {len(equality.mismatches)} different, "
        f"{equality.skipped} not comparable (failed or not asked)."
    )


def show(report: Report, console: Console) -> None:
    """Prints tables and notes."""
    for title, head, rows in _tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)
    if report.equality is not None:
        console.print(_equality_line(report.equality), highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    lines = ["# Load test", ""]
    lines += _markdown_table(
        ("setting", "value"), [(key, json.dumps(v)) for key, v in report.settings.items()]
    )
    for title, head, rows in _tables(report):
        lines += [f"## {title}", "", *_markdown_table(head, rows)]
    if report.equality is not None:
        lines += [_equality_line(report.equality), ""]
    lines += [f"- {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *(line(row) for row in rows), ""]


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


def write(report: Report, directory: Path) -> list[Path]:
    """Writes `results.json` and `report.md` into `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    data, text = directory / "results.json", directory / "report.md"
    data.write_text(json.dumps(as_json(report), indent=1, allow_nan=False) + "\n", "utf-8")
    text.write_text(markdown(report), "utf-8")
    return [data, text]
