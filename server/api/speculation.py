"""GET /v1/speculation/status: what the planner has measured, what it would do with it, and why."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from engine.errors import EngineUnavailable
from server.api.access import caller_of
from server.api.context import ServerContext
from server.api.recent import RecentRequest

#: A step takes milliseconds; whoever waits longer would rather know that it hangs.
_PATIENCE_SECONDS = 30.0


class CostModel(TypedDict):
    """What a pass of the model costs here, in milliseconds."""

    pass_ms_by_tokens: dict[str, float]
    pass_ms_per_sequence: float
    pass_ms_per_1000_cached_tokens: float
    pass_ms_per_1000000_pairs: float
    overhead_ms_by_batch: dict[str, float]
    overhead_ms_per_draft_token: float
    draft_ms_by_batch: dict[str, dict[str, float]]
    passes_measured: int


class Acceptance(TypedDict):
    """How often the first token of a draft is accepted, altogether and by bucket of what the
    drafter knew (see the drafters' documentation); how often one at each depth is if all before it
    are; and on how many judged tokens that rests. Older ones count less."""

    acceptance: float
    judged_tokens: float
    by_bucket: dict[str, float]
    by_depth: list[float]


class Choice(TypedDict):
    """What a batch of so many sequences of typical acceptance would get, if all of them have
    something to draft from, and why: `draft_tokens` each. What is expected belongs to
    `best_draft_tokens`, which only the modes fixed and off and the guard depart from;
    `expected_tokens` are those of all sequences together."""

    batch: int
    draft_tokens: float
    why: str
    best_draft_tokens: float
    expected_tokens: float
    expected_ms: float
    plain_ms: float
    expected_speedup: float | None


class ClosedRange(TypedDict):
    """Batch sizes from here to the next power of two have lost against plain decoding."""

    batch_from: int
    trips: int
    paused_steps: int


class Exploration(TypedDict):
    """The account that pays for probes and for plain steps to compare with."""

    spent_seconds: float
    credit_seconds: float


class MeasuredSpeedup(TypedDict):
    """Wall clock against plain decoding; null while unknown."""

    ratio: float | None
    low: float | None
    high: float | None
    basis: Literal["measured", "modelled", "unknown"]
    equal_seconds: float
    seconds: float
    unknown_seconds: float


class EngineStatus(TypedDict):
    """What the engine tells. `mode` is "failed" if the planner has raised; nothing is
    drafted then, and the other fields are empty."""

    mode: str
    drafters: list[str]
    steps: int
    speedup: MeasuredSpeedup | None
    off_reasons: dict[str, int]
    wasted_draft_tokens: int
    choices: dict[str, list[Choice]]
    acceptance: dict[str, Acceptance]
    guard: list[ClosedRange]
    exploration: Exploration | None
    calibrated: bool
    cost_model: CostModel | None


class SpeculationStatus(EngineStatus):
    """The state of speculation; `recent` are the caller's own last requests, the newest first."""

    recent: list[RecentRequest]


def speculation_router(context: ServerContext) -> APIRouter:
    """The one route."""
    router = APIRouter(tags=["speculation"])

    @router.get("/v1/speculation/status", responses={200: {"model": SpeculationStatus}})
    async def speculation_status(request: Request) -> Response:
        """What is drafted at each batch size and why; what that rests on; what it has brought."""
        context.codec()  # raises unless the server takes requests
        status = await _look(context)
        return JSONResponse({**status, "recent": [*reversed(caller_of(request).recent)]})

    return router


async def _look(context: ServerContext) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await context.engine.speculation()
    except TimeoutError:
        raise EngineUnavailable(
            f"The running step has taken {context.engine.step_age:.0f} s and has to end first; "
            "ask again."
        ) from None
