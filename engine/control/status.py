"""What the planner knows and would do, as plain data for people: `/v1/speculation/status`."""

from __future__ import annotations

import math
from typing import Any

from engine.control.adaptive import AdaptivePlanner
from engine.control.options import Mode
from engine.control.planner import Planner
from engine.control.report import measuring
from engine.control.shield import ShieldedPlanner
from engine.control.step import OffReason

_BATCHES = (1, 2, 4, 8, 16, 32, 64)

#: What there is to tell of a planner that measures nothing.
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


def describe(planner: Planner, drafters: tuple[str, ...]) -> dict[str, Any]:
    """`status` of whichever planner an engine has, ready for JSON and for reading: string
    keys, no infinities, six digits.

    Args:
        planner: behind its shield or not. The mode of one that has failed is "failed": nobody
            drafts any more; that of one that measures nothing is "unmeasured".
        drafters: those that work.
    """
    measured = measuring(planner)
    failed = isinstance(planner, ShieldedPlanner) and planner.inner is None
    mode = "failed" if failed else "unmeasured"
    if measured is not None:
        mode = measured.options.mode.value
    found = _NOTHING if measured is None else status(measured, drafters)
    plain: dict[str, Any] = _plain({"mode": mode, "drafters": drafters} | found)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def status(planner: AdaptivePlanner, drafters: tuple[str, ...] = ("lookup",)) -> dict[str, Any]:
    """Everything, in JSON types. Call it between steps, on the engine's thread.

    Args:
        planner: whose state is told.
        drafters: names that choices are shown for.

    Returns:
        `mode`, `steps`, `cost_model`, `acceptance` (by drafter and depth), `choices` (by
        drafter: what a batch of unknown sequences would get, and why), `guard`, `exploration`,
        `speedup`, `off_reasons`, `wasted_draft_tokens`.
    """
    speedup = planner.meter.speedup()
    account = planner.explorer.account
    return {
        "mode": planner.options.mode.value,
        "steps": planner.steps,
        "speedup": {
            "ratio": speedup.ratio,
            "low": speedup.low,
            "high": speedup.high,
            "basis": speedup.basis.value,
            "equal_seconds": planner.meter.equal_seconds,
            "seconds": planner.meter.seconds,
            "unknown_seconds": planner.meter.unknown_seconds,
        },
        "off_reasons": {reason.value: n for reason, n in planner.off_reasons.items()},
        "wasted_draft_tokens": planner.wasted_tokens,
        "choices": {name: choices(planner, name) for name in drafters},
        "acceptance": planner.acceptance.describe(),
        "guard": planner.guard.describe(),
        "exploration": {"spent_seconds": account.spent, "credit_seconds": account.credit},
        "calibrated": planner.options.calibration is not None,
        "cost_model": planner.costs.describe() | {"draft_ms_by_batch": _draft_times(planner)},
    }


def choices(planner: AdaptivePlanner, drafter: str) -> list[dict[str, Any]]:
    """By batch size, what sequences of typical acceptance and context would get, and why; and
    what would be best for them, whatever the mode: all that is expected belongs to that."""
    table = []
    for batch in _BATCHES:
        depth = planner.options.depth
        best = planner.decider.typical(drafter, batch, depth, planner.typical_context)
        drafts = float(best.lengths.mean())
        row: dict[str, Any] = {
            "batch": batch,
            **_verdict(planner, batch, drafts),
            "best_draft_tokens": drafts,
            "expected_tokens": best.tokens,
            "expected_ms": 1e3 * best.seconds,
            "plain_ms": 1e3 * best.plain_seconds,
            "expected_speedup": 1.0 / (1.0 - best.gain) if best.gain < 1.0 else None,
        }
        table.append(row)
    return table


def _draft_times(planner: AdaptivePlanner) -> dict[str, dict[int, float]]:
    """By drafter and batch size: milliseconds of drafting the longest drafts."""
    depth = planner.options.depth
    return {
        name: {n: 1e3 * draft.seconds_of([depth] * n) for n in _BATCHES}
        for name, draft in planner.costs.drafts.items()
    }


def _verdict(planner: AdaptivePlanner, batch: int, drafts: float) -> dict[str, Any]:
    """What becomes of the best allocation, and the reason."""
    mode = planner.options.mode
    if mode is Mode.OFF:
        return {"draft_tokens": 0.0, "why": OffReason.SERVER.value}
    if mode is Mode.FIXED:
        return {"draft_tokens": float(planner.options.depth), "why": "fixed"}
    if planner.guard.closed(batch):
        return {"draft_tokens": 0.0, "why": OffReason.GUARD.value}
    why = "worth_it" if drafts else OffReason.NOT_WORTH_IT.value
    return {"draft_tokens": drafts, "why": why}
