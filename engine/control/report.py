"""What speculation bought and why it was left out, as plain numbers for metrics."""

from __future__ import annotations

from engine.control.adaptive import AdaptivePlanner
from engine.control.planner import Planner
from engine.control.shield import ShieldedPlanner
from engine.types import SpeculationReport


def report(planner: Planner) -> SpeculationReport:
    """Sums since start; a planner that measures nothing reports nothing."""
    if isinstance(planner, ShieldedPlanner) and planner.inner is not None:
        planner = planner.inner
    if not isinstance(planner, AdaptivePlanner):
        return SpeculationReport()
    meter = planner.meter
    speedup = meter.speedup()
    return SpeculationReport(
        equal_seconds=meter.equal_seconds,
        decode_seconds=meter.seconds,
        unknown_seconds=meter.unknown_seconds,
        basis=speedup.basis.value,
        speedup=speedup.ratio,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        wasted_tokens=planner.wasted_tokens,
        rows_off=tuple((reason.value, n) for reason, n in planner.off_reasons.items()),
    )
