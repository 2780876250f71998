"""What the planner notes about a step between choosing and observing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from engine.cache.pages import TARGET
from engine.control.latency import Load
from engine.control.means import NUM_BUCKETS
from engine.draft.drafter import Advisor
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence

#: Tokens a drafter reads before it drafts in any step: the target's own, and the last of a draft
#: that was accepted whole.
_REGULAR = 2


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
class Line:
    """A drafter that has something to offer to a sequence. Never changed; made so often that
    the price of freezing it would show.

    Attributes:
        row: of the sequence, among those that may draft.
        sequence: itself.
        drafter: name.
        bucket: of its estimates.
        limit: most draft tokens.
        backlog: tokens it has to catch up with first, beyond those of any step.
    """

    row: int
    sequence: Sequence
    drafter: str
    bucket: int
    limit: int
    backlog: int = 0


@dataclass(slots=True)
class PendingStep:
    """A step that is planned and not yet observed.

    Attributes:
        plan: the scheduler's.
        decode: load of the emitting sequences alone.
        whole: load of the pass without drafts.
        reasons: by index of a decoding sequence that cannot draft, why.
        rows: indices of those that may.
        lines: for each of `rows` in turn, the drafters that may guess, the preferred one first.
        used: by row, its line in this step.
        lengths: chosen, one per scheduled sequence.
        slots, expected: of `lines`; the estimates that were used, acceptance at depth 1.
        probed: indices of sequences that were given a draft token that should not pay.
        why_not: of those in `rows` with length 0.
        planning_seconds: that choosing took.
    """

    plan: StepPlan
    decode: Load
    whole: Load
    reasons: dict[int, OffReason]
    rows: list[int]
    lines: list[Line]
    used: list[int]
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

    def assign(self, used: list[int], lengths: list[int]) -> None:
        """Sets line and draft length of each row; the sequences' drafters follow."""
        self.used = used
        for i, line, length in zip(self.rows, used, lengths, strict=True):
            self.lengths[i] = length
            self.lines[line].sequence.drafter = self.lines[line].drafter

    def drafting(self) -> dict[str, list[Line]]:
        """By drafter, the lines that have draft tokens in this step."""
        groups: dict[str, list[Line]] = {}
        for i, used in zip(self.rows, self.used, strict=True):
            if self.lengths[i]:
                groups.setdefault(self.lines[used].drafter, []).append(self.lines[used])
        return groups

    def length(self, line: Line) -> int:
        """Draft tokens of its sequence, whoever drafts them."""
        return self.lengths[self.rows[line.row]]

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


def read_step(plan: StepPlan, nobody: OffReason | None, advisor: Advisor) -> PendingStep:
    """Notes the load of a plan, and who may draft.

    Args:
        plan: the scheduler's.
        nobody: why nobody may, or None.
        advisor: tells what the drafters have to offer.
    """
    reasons: dict[int, OffReason] = {}
    rows: list[int] = []
    lines: list[Line] = []
    used: list[int] = []
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
        reason = nobody if nobody is OffReason.SERVER else _refusal(scheduled) or nobody
        if reason is None:
            offered = _lines(scheduled, len(rows), advisor)
            if offered:
                rows.append(i)
                used.append(len(lines))
                lines += offered
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
        lines=lines,
        used=used,
        lengths=[0] * len(plan.scheduled),
    )


def _lines(scheduled: ScheduledSequence, row: int, advisor: Advisor) -> list[Line]:
    """What the drafters of a sequence have to offer."""
    sequence, lines = scheduled.sequence, []
    for name in sequence.drafters:
        bucket = advisor.outlook(name, sequence)
        if bucket is not None:
            bucket = min(max(bucket, 0), NUM_BUCKETS - 1)
            backlog = max(0, advisor.backlog(name, sequence) - _REGULAR)
            lines.append(Line(row, sequence, name, bucket, scheduled.max_draft, backlog))
    return lines


def _refusal(scheduled: ScheduledSequence) -> OffReason | None:
    """Why a sequence cannot draft, whatever it is worth; None if it can."""
    sequence = scheduled.sequence
    silent = sequence.drafters == ("none",)
    if scheduled.max_draft and not silent:
        return None
    if sequence.max_draft == 0:
        return OffReason.REQUEST
    if silent:
        return OffReason.NO_DRAFTER
    return OffReason.LAST_TOKEN if sequence.room <= 1 else OffReason.NO_BUDGET
