"""What speculation bought and why it was left out, as plain numbers for metrics."""

from __future__ import annotations

from engine.control.adaptive import AdaptivePlanner
from engine.control.planner import Planner
from engine.control.shield import ShieldedPlanner
from engine.control.step import OffReason
from engine.sequence import Sequence
from engine.types import SpeculationReport


def measuring(planner: Planner) -> AdaptivePlanner | None:
    """The planner that measures, behind its shield; None if none does (any more)."""
    inner = planner.inner if isinstance(planner, ShieldedPlanner) else planner
    return inner if isinstance(inner, AdaptivePlanner) else None


def report(planner: Planner, drafters: tuple[str, ...]) -> SpeculationReport:
    """Sums since start; a planner that measures nothing reports nothing.

    Args:
        drafters: those that work.
    """
    measured = measuring(planner)
    if measured is None:
        return SpeculationReport()
    meter = measured.meter
    speedup = meter.speedup()
    return SpeculationReport(
        drafters=drafters,
        equal_seconds=meter.equal_seconds,
        decode_seconds=meter.seconds,
        unknown_seconds=meter.unknown_seconds,
        basis=speedup.basis.value,
        speedup=speedup.ratio,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        wasted_tokens=measured.wasted_tokens,
        # All of them from the first step on: a counter that appears late loses its first count.
        rows_off=tuple((reason.value, measured.off_reasons[reason]) for reason in OffReason),
    )


def speedup_of(planner: Planner, sequence: Sequence) -> float | None:
    """The speed-up of one sequence's decoding so far; None while unknown."""
    measured = measuring(planner)
    if measured is None or not measured.baseline.known:
        return None
    return measured.meter.of_request(sequence)


def leave_out_prompt(planner: Planner, sequence: Sequence) -> None:
    """Begins to measure a sequence's speed-up: call it after its first pass, whose token comes
    with the prompt, drafts or no drafts."""
    measured = measuring(planner)
    if measured is not None:
        measured.meter.release(sequence)
