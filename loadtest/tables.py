"""The tables of a report: what is in their cells, wherever they are shown."""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.compare import Equality, Ratio
from loadtest.report import Report
from loadtest.stats import Spread, Summary

#: Mismatches shown in a table; the JSON holds all.
_SHOWN_MISMATCHES = 10

#: Title of the table of answers that differ.
DIFFERENT = "Different answers"

#: Title, head and rows.
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

_HEAD = (
    "level", "lane", "ok", "failed", "tok/s", "req/s", "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms", "ITL p50 / p99 ms", "tok/chunk", "goodput req/s",
)  # fmt: skip

_OVERVIEW = (
    "level", "lane", "tok/s", "ratio", "95 % interval", "TTFT ms", "TPOT ms", "tok/pass",
    "guesses kept",
)  # fmt: skip


def overview(report: Report) -> Table:
    """A line for each lane and level: what most people want to know. Times are medians."""
    ratios = {(r.level, r.lane): r for r in report.ratios if r.statistic == "tokens per second"}
    rows = [_overview_row(s, ratios.get((s.level, s.lane)), report) for s in report.summaries]
    return "Overview", _OVERVIEW, rows


def _overview_row(summary: Summary, ratio: Ratio | None, report: Report) -> tuple[str, ...]:
    compared = ("1 (baseline)", "")
    if summary.lane != report.lanes[0].name:
        compared = (
            ("unknown", "unknown") if ratio is None else (f"{ratio.ratio:.3f}", _bounds(ratio))
        )
    return (
        summary.level,
        summary.lane,
        _number(summary.tokens_per_second),
        *compared,
        _median(summary.ttft),
        _median(summary.tpot),
        _number(summary.tokens_per_pass, 2),
        _kept(summary),
    )


def _kept(summary: Summary) -> str:
    if summary.acceptance is not None:
        return f"{100 * summary.acceptance:.0f} %"
    return "unknown" if summary.tokens_per_pass is None else "none made"


def _median(values: Spread | None) -> str:
    return "unknown" if values is None else f"{1000 * values.p50:.1f}"


def _bounds(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return "unknown"
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


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
            _bounds(r),
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


def tables(report: Report) -> list[Table]:
    """Every table that has rows."""
    base = report.lanes[0].name
    found: list[Table] = [("Load", _HEAD, _summary_rows(report.summaries))]
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
    found.append((f"Compared with {base}", head, _ratio_rows(report.ratios)))
    if report.equality is not None:
        head = ("level", "lane", "request", "category", "differs in", "at", base, "lane's")
        found.append((DIFFERENT, head, _mismatch_rows(report.equality)))
    return [table for table in found if table[2]]


def equality_line(equality: Equality) -> str:
    """What `--check-equal` found, in a sentence."""
    return (
        f"Equality: {equality.compared} pairs compared, {len(equality.mismatches)} different, "
        f"{equality.skipped} not comparable (failed or not asked)."
    )
