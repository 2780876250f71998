"""One line every few seconds under load: how much is done, and what speculation brings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from engine.stats import SpeculationReport, StepStats
from server.logs import FIELDS

logger = logging.getLogger("specserve.load")


class LoadLog:
    """Sums up steps between two lines.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._report: SpeculationReport | None = None  # as of the last step
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock()
        self._before = self._report
        self._steps = self._rows = self._emitted = self._prefilled = 0
        self._drafts = self._drafted = self._accepted = 0
        self._running = self._waiting = 0
        self._pages = 0.0

    def on_step(self, stats: StepStats) -> None:
        """Takes a step in; called on the event loop for each, so it must be quick."""
        self._report = stats.speculation
        if self._before is None:  # what has been before the first step, in the warm-up, is left out
            self._before = self._report
        self._steps += 1
        self._rows += stats.decode_sequences
        self._emitted += stats.emitted_tokens
        self._prefilled += stats.prefill_tokens
        if stats.drafted_by_position:
            self._drafts += stats.drafted_by_position[0]
            self._drafted += sum(stats.drafted_by_position)
            self._accepted += sum(stats.accepted_by_position)
        self._running = max(self._running, stats.running, stats.decode_sequences)
        self._waiting = max(self._waiting, stats.waiting)
        self._pages = max(self._pages, stats.pages_used / max(1, stats.pages_total))

    def tell(self) -> None:
        """Logs what has been done since the last call; nothing if that is nothing."""
        if self._steps:
            logger.info("load", extra={FIELDS: self._fields()})
        self._begin()

    def _fields(self) -> dict[str, Any]:
        """Sequences and the KV cache at their most; the speed-up as `/metrics` has it, over the
        last few thousand steps; everything else since the last line. None = unknown, or there
        was none."""
        seconds = max(self._clock() - self._since, 1e-9)
        report = self._report or SpeculationReport()
        reason, share = self._why_not(report)
        return {
            "running": self._running,
            "waiting": self._waiting,
            "tokens_per_second": round(self._emitted / seconds, 1),
            "prompt_tokens_per_second": round(self._prefilled / seconds, 1),
            "kv_cache": round(self._pages, 4),
            "tokens_per_pass": _ratio(self._emitted, self._rows),
            "draft_length": _ratio(self._drafted, self._drafts),
            "acceptance": _ratio(self._accepted, self._drafted),
            "speedup": _rounded(report.speedup),
            "speedup_low": _rounded(report.speedup_low),
            "speedup_high": _rounded(report.speedup_high),
            "speedup_basis": report.basis,
            "not_drafted": share,
            "not_drafted_mostly": reason,
        }

    def _why_not(self, report: SpeculationReport) -> tuple[str | None, float | None]:
        """The commonest reason for decoding without a draft, and the share of rows that did,
        for whatever reason."""
        before = dict(self._before.rows_off) if self._before is not None else {}
        counts = {name: n - before.get(name, 0) for name, n in report.rows_off}
        total = sum(counts.values())
        if total <= 0:
            return None, 0.0 if self._rows else None
        return max(counts, key=lambda name: counts[name]), _ratio(total, self._rows)


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
