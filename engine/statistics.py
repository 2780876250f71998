"""What a step did, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.draft.drafter import DraftProposal, Verdict
from engine.laps import Laps
from engine.scheduler import Scheduler, StepPlan
from engine.stats import SpeculationReport, StepStats


def step_stats(
    plan: StepPlan,
    proposal: DraftProposal,
    verdicts: Seq[Verdict],
    laps: Laps,
    verify_seconds: float,
    scheduler: Scheduler,
) -> StepStats:
    """Sums up a step.

    Args:
        laps: "schedule", "choose", "draft" and all others up to the commit. Between steps events
            are handed over and requests read; where that takes longer than the step itself,
            something else has held the engine up, and the rest does not count.
        verify_seconds: what the target's pass took, as its runner tells.
        scheduler: as it is before sequences that are complete end.
    """
    pool, plan_seconds = scheduler.pool, laps["schedule"] + laps["choose"]
    others = plan_seconds + laps["draft"] + verify_seconds
    return StepStats(
        seconds=laps.total,
        plan_seconds=plan_seconds,
        choose_seconds=laps["choose"],
        draft_seconds=laps["draft"],
        verify_seconds=verify_seconds,
        sample_seconds=max(0.0, laps.total - others),
        learn_seconds=min(laps.before.get("learn", 0.0), laps.between),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        prefill_tokens=plan.prefill_tokens,
        decode_sequences=sum(bool(v.emitted) for v in verdicts),
        emitted_tokens=sum(len(v.emitted) for v in verdicts),
        drafted_by_position=by_position([len(draft) for draft in proposal.tokens]),
        accepted_by_position=by_position([v.accepted for v in verdicts]),
        pages_used=pool.num_used,
        pages_total=pool.num_pages,
        preemptions=plan.preemptions,
        prefix_query_tokens=plan.prefix_query_tokens,
        prefix_hit_tokens=plan.prefix_hit_tokens,
        drafter_seconds=proposal.seconds,
        draft_forwards=proposal.forwards,
        by_drafter=_by_drafter(proposal.drafters, verdicts),
        between_seconds=min(laps.between, laps.total),
    )


def completed(stats: StepStats, scheduler: Scheduler, report: SpeculationReport) -> StepStats:
    """The same, with what is known once sequences that are complete have ended."""
    return replace(
        stats,
        running=len(scheduler.running),
        pages_used=scheduler.pool.num_used,
        speculation=report,
    )


def _by_drafter(drafters: Seq[str], verdicts: Seq[Verdict]) -> dict[str, tuple[int, int]]:
    """Draft tokens checked, and kept, by who drafted them."""
    sums: dict[str, tuple[int, int]] = {}
    for name, verdict in zip(drafters, verdicts, strict=False):
        if verdict.drafted:
            drafted, accepted = sums.get(name, (0, 0))
            sums[name] = (drafted + verdict.drafted, accepted + verdict.accepted)
    return sums


def by_position(lengths: Seq[int]) -> tuple[int, ...]:
    """[i] = how many of `lengths` exceed i."""
    return tuple(sum(n > i for n in lengths) for i in range(max(lengths, default=0)))
