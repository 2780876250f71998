"""What planner and meter know, as plain data: for metrics, and for people who ask why."""

from __future__ import annotations

import math
from typing import Any

from engine.control.acceptance import Pool
from engine.control.adaptive import AdaptivePlanner
from engine.control.allocation import Allocation, Line, allocate
from engine.control.costs import CostModel
from engine.control.planner import Mode, Planner, ShieldedPlanner
from engine.load import Load
from engine.meter.meter import Meter
from engine.stats import OffReason, SpeculationReport

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def adaptive(planner: Planner) -> AdaptivePlanner | None:
    """The planner that decides, behind its shield; None if none does (any more)."""
    inner = planner.inner if isinstance(planner, ShieldedPlanner) else planner
    return inner if isinstance(inner, AdaptivePlanner) else None


def report(planner: Planner, meter: Meter, drafters: tuple[str, ...]) -> SpeculationReport:
    """Sums since start, for metrics; a planner that decides nothing reports nothing.

    Args:
        drafters: those that work.
    """
    decides = adaptive(planner)
    if decides is None:
        return SpeculationReport()
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
        wasted_tokens=decides.wasted_tokens,
        # All of them from the first step on: a counter that appears late loses its first count.
        rows_off=tuple((reason.value, decides.off_reasons[reason]) for reason in OffReason),
    )


def describe(planner: Planner, meter: Meter, drafters: tuple[str, ...]) -> dict[str, Any]:
    """`/v1/speculation/status`, ready for JSON and for reading: string keys, no infinities, six
    digits. Call it between steps, on the engine's thread.

    Args:
        planner: behind its shield or not. The mode of one that has failed is "failed": nobody
            drafts any more; that of one that decides nothing is "unmeasured".
        drafters: those that work.

    Returns:
        `mode`, `drafters`, `steps`, `cost_model`, `acceptance` (by drafter, bucket and depth),
        `choices` (by drafter: what a batch of unknown sequences would get, and why), `guard`,
        `exploration`, `speedup`, `off_reasons`, `wasted_draft_tokens`.
    """
    decides = adaptive(planner)
    failed = isinstance(planner, ShieldedPlanner) and planner.inner is None
    mode = "failed" if failed else "unmeasured"
    found = _NOTHING
    if decides is not None:
        mode, found = decides.mode.value, _knowledge(decides, meter, drafters)
    plain: dict[str, Any] = _plain({"mode": mode, "drafters": drafters} | found)
    return plain


#: What there is to tell of a planner that decides nothing.
_NOTHING: dict[str, Any] = {
    "steps": 0,
    "speedup": None,
    "off_reasons": {},
    "wasted_draft_tokens": 0,
    "choices": {},
    "acceptance": {},
    "guard": [],
    "exploration": None,
    "calibrated": False,
    "cost_model": None,
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _knowledge(planner: AdaptivePlanner, meter: Meter, drafters: tuple[str, ...]) -> dict[str, Any]:
    speedup, prober = meter.speedup(), planner.prober
    return {
        "steps": planner.steps,
        "speedup": {
            "ratio": speedup.ratio,
            "low": speedup.low,
            "high": speedup.high,
            "basis": speedup.basis.value,
            "equal_seconds": meter.equal_seconds,
            "seconds": meter.seconds,
            "unknown_seconds": meter.unknown_seconds,
        },
        "off_reasons": {reason.value: n for reason, n in planner.off_reasons.items()},
        "wasted_draft_tokens": planner.wasted_tokens,
        "choices": {name: choices(planner, name) for name in drafters},
        "acceptance": {name: _accepts(pool) for name, pool in planner.acceptance.pools.items()},
        "guard": [
            {"batch_from": 1 << (octave - 1), "trips": r.trips, "paused_steps": r.paused}
            for octave, r in sorted(planner.guard.records.items())
            if r.trips
        ],
        "exploration": {"spent_seconds": prober.spent, "credit_seconds": prober.credit},
        "calibrated": planner.costs.calibrated,
        "cost_model": _costs(planner.costs, planner.depth),
    }


def _accepts(pool: Pool) -> dict[str, Any]:
    """Acceptance over all buckets, in each that was met, and by depth; and how many judged tokens
    that rests on."""
    return {
        "acceptance": pool.overall,
        "judged_tokens": pool.total.judged,
        "by_bucket": dict(sorted(pool.estimates.items())),
        "by_depth": [min(pool.overall * factor, 1.0) for factor in pool.factors()],
    }


def _costs(costs: CostModel, depth: int) -> dict[str, Any]:
    """Milliseconds of passes by query tokens, of their other terms, and of drafting the longest
    drafts."""
    table = costs.target.table(Load(0, 0, 0, 0, 0), _ROWS[-1])
    one = (Load(0, 1, 0, 0, 0), Load(0, 0, 0, 1, 0), Load(0, 0, 0, 0, 1))
    sequence, context, pair = (costs.target.predict(load) - float(table[0]) for load in one)
    return {
        "pass_ms_by_tokens": {n: 1e3 * float(table[n]) for n in _ROWS},
        "pass_ms_per_sequence": 1e3 * sequence,
        "pass_ms_per_1000_cached_tokens": 1e6 * context,
        "pass_ms_per_1000000_pairs": 1e9 * pair,
        "passes_measured": costs.target.samples,
        "overhead_ms_by_batch": {n: 1e3 * costs.overhead(n) for n in _BATCHES},
        "overhead_ms_per_draft_token": 1e3 * costs.extra,
        "draft_ms_by_batch": {
            name: {n: 1e3 * draft.seconds_of([depth] * n) for n in _BATCHES}
            for name, draft in costs.drafts.items()
        },
    }


def _typical(planner: AdaptivePlanner, drafter: str, batch: int) -> Allocation:
    """What would be planned for a batch of sequences that nothing is known of."""
    depth, context = planner.depth, batch * planner.typical_context
    odds = planner.acceptance.pools[drafter].overall
    by_depth = planner.acceptance.by_depth(drafter, depth)
    lines = [Line(index, drafter, depth, odds, by_depth=by_depth) for index in range(batch)]
    load = Load(batch, batch, batch, context, context)
    return allocate(lines, load, load, planner.costs, depth)


def choices(planner: AdaptivePlanner, drafter: str) -> list[dict[str, Any]]:
    """By batch size, what sequences of typical acceptance and context would get, and why; and
    what would be best for them, whatever the mode: all that is expected belongs to that."""
    table = []
    for batch in _BATCHES:
        best = _typical(planner, drafter, batch)
        drafts, gain = sum(best.lengths) / batch, best.saved_seconds / best.plain_seconds
        row: dict[str, Any] = {
            "batch": batch,
            **_verdict(planner, batch, drafts),
            "best_draft_tokens": drafts,
            "expected_tokens": best.tokens,
            "expected_ms": 1e3 * best.seconds,
            "plain_ms": 1e3 * best.plain_seconds,
            "expected_speedup": 1.0 / (1.0 - gain) if gain < 1.0 else None,
        }
        table.append(row)
    return table


def _verdict(planner: AdaptivePlanner, batch: int, drafts: float) -> dict[str, Any]:
    """What becomes of the best allocation, and the reason."""
    mode = planner.mode
    if mode is Mode.OFF:
        return {"draft_tokens": 0.0, "why": OffReason.SERVER.value}
    if mode is Mode.FIXED:
        return {"draft_tokens": float(planner.depth), "why": "fixed"}
    if planner.guard.closed(batch):
        return {"draft_tokens": 0.0, "why": OffReason.GUARD.value}
    why = "worth_it" if drafts else OffReason.NOT_WORTH_IT.value
    return {"draft_tokens": drafts, "why": why}
