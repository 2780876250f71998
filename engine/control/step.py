"""What the planner notes about a step between choosing and observing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from engine.cache.pages import TARGET
from engine.control.latency import Load
from engine.control.means import NUM_BUCKETS
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence

#: What a drafter knows of a sequence before it drafts: the bucket of its estimates, from 0, or
#: None if it has nothing to offer.
Outlook = Callable[[Sequence], int | None]


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


@dataclass(slots=True)
class PendingStep:
    """A step that is planned and not yet observed.

    Attributes:
        plan: the scheduler's.
        decode: load of the emitting sequences alone.
        whole: load of the pass without drafts.
        reasons: by index of a decoding sequence that cannot draft, why.
        rows: indices of those that may.
        buckets: of these.
        lengths: chosen, one per scheduled sequence.
        slots, expected: of `rows`; the estimates that were used, acceptance at depth 1.
        probed: indices that were given a draft token more than pays.
        why_not: of those in `rows` with length 0.
        planning_seconds: that choosing took.
    """

    plan: StepPlan
    decode: Load
    whole: Load
    reasons: dict[int, OffReason]
    rows: list[int]
    buckets: list[int]
    lengths: list[int]
    slots: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    probed: list[int] = field(default_factory=list)
    why_not: OffReason = OffReason.NOT_WORTH_IT
    planning_seconds: float = 0.0

    @property
    def has_prefill(self) -> bool:
        """Whether more than the decoding sequences' one token each passes the target."""
        return self.whole != self.decode

    def assign(self, lengths: list[int]) -> None:
        """Sets the draft lengths of `rows`."""
        for i, length in zip(self.rows, lengths, strict=True):
            self.lengths[i] = length

    def load_with_drafts(self, drafted: list[int]) -> Load:
        """The load of the pass with so many draft tokens for each scheduled sequence."""
        pairs = sum(
            drafts * len(scheduled.sequence.tokens)
            for drafts, scheduled in zip(drafted, self.plan.scheduled, strict=True)
            if drafts
        )
        return replace(
            self.whole,
            rows=self.whole.rows + sum(drafted),
            attention=self.whole.attention + pairs,
        )


def read_step(plan: StepPlan, off: bool, outlooks: Mapping[str, Outlook]) -> PendingStep:
    """Notes the load of a plan, and who may draft.

    Args:
        plan: the scheduler's.
        off: whether nobody may.
        outlooks: by name of drafter.
    """
    reasons: dict[int, OffReason] = {}
    rows: list[int] = []
    buckets: list[int] = []
    batch = fed = read = pairs = decode_read = 0
    for i, scheduled in enumerate(plan.scheduled):
        sequence, feed = scheduled.sequence, scheduled.num_feed
        context = sequence.table.num_cached[TARGET] + feed
        fed += feed
        read += context
        pairs += context * feed
        if not scheduled.samples:
            continue
        batch += 1
        decode_read += context
        reason = OffReason.SERVER if off else _refusal(scheduled)
        if reason is None:
            bucket = outlooks[sequence.drafter](sequence) if sequence.drafter in outlooks else 0
            if bucket is not None:
                rows.append(i)
                buckets.append(min(max(bucket, 0), NUM_BUCKETS - 1))
                continue
            reason = OffReason.NO_PROPOSAL
        if sequence.num_generated:  # the end of a prompt could not speculate anyway
            reasons[i] = reason
    return PendingStep(
        plan=plan,
        decode=Load(batch, batch, batch, decode_read, decode_read),
        whole=Load(batch, len(plan.scheduled), fed, read, pairs),
        reasons=reasons,
        rows=rows,
        buckets=buckets,
        lengths=[0] * len(plan.scheduled),
    )


def _refusal(scheduled: ScheduledSequence) -> OffReason | None:
    """Why a sequence cannot draft, whatever it is worth; None if it can."""
    sequence = scheduled.sequence
    if scheduled.max_draft and sequence.drafter != "none":
        return None
    if sequence.max_draft == 0:
        return OffReason.REQUEST
    if sequence.drafter == "none":
        return OffReason.NO_DRAFTER
    return OffReason.LAST_TOKEN if sequence.room <= 1 else OffReason.NO_BUDGET
