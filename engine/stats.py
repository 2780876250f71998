"""What the engine tells of itself after every step; the server makes metrics of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class OffReason(Enum):
    """Why a decoding sequence checked no draft token in a step."""

    SERVER = "off"  # speculation is switched off for the whole server
    REQUEST = "disabled_by_request"
    NO_DRAFTER = "no_drafter"
    LAST_TOKEN = "last_token"  # it may emit just one more
    NO_BUDGET = "no_budget"  # no pages or no room in the pass
    NO_PROPOSAL = "no_proposal"  # the drafter had nothing to offer
    NOT_WORTH_IT = "not_worth_it"
    GUARD = "guard"
    SHADOW = "shadow"  # left out at random, to measure a plain step


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What speculation bought so far, by wall clock. Sums since start; times are seconds.

    Attributes:
        equal_seconds: of plain decoding for the same tokens, from plain steps measured live.
        decode_seconds: that the same steps did take, everything counted.
        unknown_seconds: of steps with nothing to compare with; in neither sum.
        basis: "measured", "modelled" or "unknown".
        speedup: ratio over the last few thousand steps; None while unknown.
        speedup_low, speedup_high: 95 % range; None until there are enough steps.
        drafters: those that work; none while nothing is measured.
    """

    equal_seconds: float = 0.0
    decode_seconds: float = 0.0
    unknown_seconds: float = 0.0
    basis: str = "unknown"
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    wasted_tokens: int = 0  # draft tokens checked for nothing
    rows_off: tuple[tuple[str, int], ...] = ()  # rows without a draft, by reason
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did; the server turns it into metrics. Times are seconds."""

    seconds: float
    draft_seconds: float
    verify_seconds: float  # the target's pass, as its runner tells
    sample_seconds: float  # all the rest: packing the batch, drawing tokens, verdict, commit
    running: int
    waiting: int
    prefill_tokens: int
    decode_sequences: int  # sequences that emitted in this step
    emitted_tokens: int
    drafted_by_position: tuple[int, ...]  # [i] = sequences whose draft had a token at depth i
    accepted_by_position: tuple[int, ...]
    pages_used: int  # referenced by sequences; pages kept only for reuse do not count
    pages_total: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
    plan_seconds: float = 0.0  # scheduling, and choosing drafters and draft lengths
    choose_seconds: float = 0.0  # the second of these, a part of plan_seconds
    learn_seconds: float = 0.0  # observing the step before, a part of between_seconds
    drafter_seconds: Mapping[str, float] = field(default_factory=dict)  # draft_seconds by drafter
    draft_forwards: int = 0  # passes of draft models
    #: draft tokens checked, and kept, by drafter
    by_drafter: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    between_seconds: float = 0.0  # see `step_stats`
    threads: int | None = None  # that compute; None = not looked after
    waiting_threads: float | None = None  # of them, on average, without a core


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What one online audit found: an answer was said again without speculation."""

    tokens: int  # compared, up to and including the first mismatch
    near_ties: int  # mismatches that rounding explains
    faults: int  # mismatches that nothing excuses
