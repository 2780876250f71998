"""Plots of a report. Needs matplotlib, which only the `loadtest` extra installs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.measure import Answer
from loadtest.plan import Level
from loadtest.report import Report
from loadtest.stats import successes

MISSING = (
    "Plots need matplotlib, which is not installed: pip install 'specserve[loadtest]'. "
    "The other results are complete."
)


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message says how to install it."""


def _new_figure(columns: int) -> Any:
    """A matplotlib figure for `columns` plots side by side, independent of any display.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable(MISSING) from error
    return Figure(figsize=(1 + 5 * columns, 4.5), layout="constrained")


def figures(report: Report) -> dict[str, Any]:
    """Name -> figure, of those for which there are numbers.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    made = {"throughput": _throughput(report)}
    for quantity, read in (("TTFT", _ttft), ("TPOT", _tpot)):
        made[quantity.lower()] = _distribution(report, quantity, read)
    if report.ratios:
        made["ratios"] = _ratios(report)
    return made


def write_plots(report: Report, directory: Path) -> list[Path]:
    """Writes the plots for which there are numbers; returns their paths.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    paths = []
    for name, figure in figures(report).items():
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def as_svg(figure: Any) -> bytes:
    """A figure as SVG without a word about where and when it was made."""
    drawn = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(drawn, format="svg", metadata=nothing)
    return drawn.getvalue()


def _ttft(answer: Answer) -> float | None:
    return answer.ttft


def _tpot(answer: Answer) -> float | None:
    return answer.tpot


def _throughput(report: Report) -> Any:
    """Tokens per second by level, a line for each lane."""
    figure = _new_figure(1)
    axes = figure.add_subplot()
    labels = [str(level) for level in report.levels]
    for lane in report.lanes:
        rates = {s.level: s.tokens_per_second for s in report.summaries if s.lane == lane.name}
        heights = [rates.get(label) for label in labels]
        axes.plot(
            labels, [float("nan") if h is None else h for h in heights], "o-", label=lane.name
        )
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _distribution(report: Report, quantity: str, read: Callable[[Answer], float | None]) -> Any:
    """Share of requests at or below a latency; one plot a level, a line for each lane."""
    figure = _new_figure(len(report.levels))
    for number, level in enumerate(report.levels, start=1):
        axes = figure.add_subplot(1, len(report.levels), number)
        for lane in report.lanes:
            values = _sorted_milliseconds(report, lane.name, level, read)
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.step(values, shares, where="post", label=lane.name)
        axes.set_title(str(level))
        axes.set_xlabel(f"{quantity} (ms)")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def _sorted_milliseconds(
    report: Report, lane: str, level: Level, read: Callable[[Answer], float | None]
) -> Sequence[float]:
    blocks = [r for r in report.results if r.block.lane.name == lane and r.block.level == level]
    values = (read(answer) for answer in successes(blocks))
    return sorted(1000 * value for value in values if value is not None)


def _ratios(report: Report) -> Any:
    """Throughput over the baseline's by level, with confidence intervals."""
    figure = _new_figure(1)
    axes = figure.add_subplot()
    for lane in report.lanes[1:]:
        found = [
            r for r in report.ratios if r.lane == lane.name and r.statistic == "tokens per second"
        ]
        below = [r.ratio - (r.ratio if r.low is None else r.low) for r in found]
        above = [(r.ratio if r.high is None else r.high) - r.ratio for r in found]
        # Rounding may put a bound a hair beyond the ratio itself; error bars cannot be negative.
        bars = [[max(0.0, b) for b in below], [max(0.0, a) for a in above]]
        levels, heights = [r.level for r in found], [r.ratio for r in found]
        axes.errorbar(levels, heights, yerr=bars, fmt="o", capsize=4, label=lane.name)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_ylabel(f"throughput, ratio to {report.lanes[0].name}")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
