"""What the planner knows and would do, as plain data for people: `/v1/speculation/status`."""

from __future__ import annotations

from typing import Any

from engine.control.adaptive import AdaptivePlanner, Mode
from engine.control.step import OffReason

_BATCHES = (1, 2, 4, 8, 16, 32, 64)


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
        "calibrated": planner.options.calibration is not None,
        "cost_model": planner.costs.describe(),
        "acceptance": planner.acceptance.describe(),
        "choices": {name: choices(planner, name) for name in drafters},
        "guard": planner.guard.describe(),
        "exploration": {"spent_seconds": account.spent, "credit_seconds": account.credit},
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
    }


def choices(planner: AdaptivePlanner, drafter: str) -> list[dict[str, Any]]:
    """By batch size, what sequences of typical acceptance and context would get, and why."""
    table = []
    for batch in _BATCHES:
        depth = planner.options.depth
        best = planner.decider.typical(drafter, batch, depth, planner.typical_context)
        row: dict[str, Any] = {
            "batch": batch,
            "draft_tokens": float(best.lengths.mean()),
            "expected_tokens": best.tokens,
            "expected_ms": 1e3 * best.seconds,
            "plain_ms": 1e3 * best.plain_seconds,
            "expected_speedup": 1.0 / (1.0 - best.gain) if best.gain < 1.0 else None,
        }
        table.append(row | _verdict(planner, batch, row["draft_tokens"]))
    return table


def _verdict(planner: AdaptivePlanner, batch: int, drafts: float) -> dict[str, Any]:
    """What becomes of the best allocation, and the reason."""
    mode = planner.options.mode
    if mode is Mode.OFF:
        return {"draft_tokens": 0.0, "why": OffReason.SERVER.value}
    if mode is Mode.FIXED:
        return {"draft_tokens": float(planner.options.depth), "why": "fixed"}
    if planner.guard.closed(batch):
        return {"draft_tokens": 0.0, "why": OffReason.GUARD.value}
    return {"why": "worth_it" if drafts else OffReason.NOT_WORTH_IT.value}
