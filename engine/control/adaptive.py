"""The planner that is never slower: it drafts where measured times say that it pays.

What a step costs is measured at start and followed while serving (`costs`); all draft tokens of
all sequences stand in one queue by their odds (`acceptance`), which is cut where tokens per second
are most (`allocation`); what was left out is looked at again from a small account (`probes`). A
guard watches what became of it. The reasons are in docs/theory.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.config import NO_DRAFTER
from engine.control.acceptance import AcceptanceModel
from engine.control.allocation import Allocation, Line, allocate
from engine.control.costs import CostModel, Floats
from engine.control.guard import Guard
from engine.control.planner import Assignment, Mode
from engine.control.probes import Prober
from engine.draft.drafter import Advisor, NoAdvice, Verdict
from engine.load import Load, loads_of
from engine.meter.gain import Basis, Gain
from engine.scheduler import StepPlan
from engine.sequence import Sequence, Status
from engine.stats import OffReason, StepStats

#: Drafts begin where they are expected to save this share of a step, and go on while they save
#: anything: near the border the noise of estimates would switch back and forth.
_WORTH_STARTING = 0.02

#: Tokens a drafter reads before it drafts in any step: the target's own, and the last of a draft
#: that was accepted whole.
_REGULAR_READ = 2


@dataclass(slots=True)
class _Step:
    """What is noted between choosing and observing; numbers are those of scheduled sequences.

    Attributes:
        lines: what drafters have to offer to sequences that may draft.
        used: by sequence, the line that drafts for it.
        lengths: of every sequence.
        why_not: by decoding sequence without a draft.
        probed: sequences whose draft should not pay.
        token_seconds: what a token is worth.
    """

    plan: StepPlan
    decode: Load
    whole: Load
    lengths: list[int]
    lines: list[Line] = field(default_factory=list)
    used: dict[int, Line] = field(default_factory=dict)
    why_not: dict[int, OffReason] = field(default_factory=dict)
    probed: set[int] = field(default_factory=set)
    token_seconds: float = 0.0

    def draft(self, line: Line, length: int) -> None:
        """Has a line draft for its sequence."""
        self.used[line.index], self.lengths[line.index] = line, length

    def leave_out(self, reason: OffReason) -> None:
        """Gives the reason of all that could draft and do not."""
        for line in self.lines:
            if not self.lengths[line.index]:
                self.why_not[line.index] = reason


class AdaptivePlanner:
    """Maximises expected tokens per second in every step, from past data only.

    Args:
        depth: longest draft of any sequence.
        costs: of this machine; kept current here.
        mode: server-wide.
        advisor: what drafters know before they draft.
        seed: of the lottery for shadow steps.

    Attributes:
        off_reasons: counter; rows that decoded without a draft, by reason.
        wasted_tokens: counter; draft tokens that were checked for nothing.
        steps: that were planned.
        typical_context: cached tokens of a decoding sequence, in the last step.
    """

    def __init__(
        self,
        depth: int,
        costs: CostModel,
        mode: Mode = Mode.AUTO,
        advisor: Advisor | None = None,
        seed: int = 0,
    ) -> None:
        self.depth, self.costs, self.mode = depth, costs, mode
        self.advisor = advisor or NoAdvice()
        self.acceptance = AcceptanceModel()
        self.guard = Guard()
        self.prober = Prober(seed)
        self.off_reasons: Counter[OffReason] = Counter()
        self.wasted_tokens = self.steps = self.typical_context = 0
        self._speculating: dict[int, bool] = {}  # by octave of batch sizes
        self._pending: _Step | None = None

    # -- before the step -----------------------------------------------------------------

    def choose(self, plan: StepPlan) -> Assignment:
        """See `Planner.choose`."""
        self.steps += 1
        step = self._pending = self._read(plan)
        if step.lines:
            self._decide(step)
        drafters = [scheduled.sequence.drafters[0] for scheduled in plan.scheduled]
        for index, line in step.used.items():
            drafters[index] = line.drafter
        return Assignment(step.lengths, drafters)

    def release(self, sequence: Sequence) -> None:
        """See `Planner.release`."""
        self.acceptance.release(sequence)
        self.prober.release(sequence)

    def _read(self, plan: StepPlan) -> _Step:
        """Notes the load of a plan, and who may draft."""
        step = _Step(plan, *loads_of(plan), lengths=[0] * len(plan.scheduled))
        off, known = self.mode is Mode.OFF, dict[str, tuple[Floats, bool]]()
        for index, scheduled in enumerate(plan.scheduled):
            if not scheduled.samples:
                continue
            if not off and scheduled.granted_drafts:
                if not self._offer(step, index, known):
                    step.why_not[index] = OffReason.NO_PROPOSAL
            elif scheduled.sequence.num_generated:  # the end of a prompt could not draft anyway
                step.why_not[index] = OffReason.SERVER if off else _refusal(scheduled.sequence)
        return step

    def _offer(self, step: _Step, index: int, known: dict[str, tuple[Floats, bool]]) -> bool:
        """Notes what the drafters of a sequence have to offer; tells whether that is anything.

        Args:
            known: by drafter what it has in common for all sequences; filled here.
        """
        scheduled, before = step.plan.scheduled[index], len(step.lines)
        sequence, advisor = scheduled.sequence, self.advisor
        for name in sequence.drafters:
            bucket = advisor.outlook(name, sequence)
            if bucket is None:
                continue
            if name not in known:
                depths = self.acceptance.by_depth(name, self.depth)
                known[name] = depths, self.costs.draft(name).runs_model
            (depths, runs_model), limit = known[name], scheduled.granted_drafts
            odds, backlog = self.acceptance.estimate(sequence, name, bucket), 0
            if runs_model:
                backlog = max(0, advisor.backlog(name, sequence) - _REGULAR_READ)
            step.lines.append(Line(index, name, limit, odds, bucket, backlog, depths))
        return len(step.lines) > before

    def _decide(self, step: _Step) -> None:
        """Who drafts; and why the others do not."""
        batch = step.decode.batch
        if self.mode is Mode.FIXED:
            if self._is_shadow(step, None):
                return step.leave_out(OffReason.SHADOW)
            for line in reversed(step.lines):  # the first drafter that has something
                step.draft(line, line.limit)
            return None
        if self.guard.closed(batch):
            return step.leave_out(OffReason.GUARD)
        best = allocate(step.lines, step.decode, step.whole, self.costs, self.depth)
        octave, bar = batch.bit_length(), _WORTH_STARTING * best.plain_seconds
        bar = 0.0 if self._speculating.get(octave) else bar
        self._speculating[octave] = best.saved_seconds > bar
        if self._speculating[octave]:
            if self._is_shadow(step, best.saved_seconds):
                return step.leave_out(OffReason.SHADOW)
            for line, length in zip(step.lines, best.lengths, strict=True):
                if length:
                    step.draft(line, length)
        if best.could_pay and len(step.used) < len(step.lines):
            self._probe(step, best)
        return step.leave_out(OffReason.NOT_WORTH_IT)

    def _is_shadow(self, step: _Step, loss: float | None) -> bool:
        """Whether the drafts of this step are left out to measure a plain one; with prefill in
        the pass it would not tell what a plain step costs."""
        if step.whole != step.decode:
            return False
        return self.prober.shadow(step.decode.batch, self.steps, loss)

    def _probe(self, step: _Step, best: Allocation) -> None:
        """One draft token for every sequence that has gone without for a while, all from one
        drafter, since a draft model's round costs about the same for one and for many."""
        groups: dict[str, list[Line]] = {}
        for line in step.lines:
            used = step.used.get(line.index)
            sequence = step.plan.scheduled[line.index].sequence
            if (used is None or used.drafter != line.drafter) and self.prober.due(
                sequence, self.steps
            ):
                groups.setdefault(line.drafter, []).append(line)
        if not groups:
            return
        name, group = sorted(groups.items())[self.steps % len(groups)]
        sequences = [step.plan.scheduled[line.index].sequence for line in group]
        if self.prober.probe(sequences, self.steps, *self._price(step, best, name, group)):
            step.probed = {line.index for line in group}
            step.token_seconds = best.token_seconds
            for line in group:
                step.draft(line, 1)

    def _price(
        self, step: _Step, best: Allocation, name: str, group: list[Line]
    ) -> tuple[float, float]:
        """Seconds that a probe takes, and seconds that it is expected to be worth."""
        draft, count, planned = self.costs.draft(name), len(group), sum(step.lengths)
        table = self.costs.target.table(step.decode, planned + count)
        price = float(table[-1] - table[planned]) + self.costs.extra * count
        own = [step.lengths[i] for i, line in step.used.items() if line.drafter == name]
        price += draft.seconds_of(own + [1] * count) - (draft.seconds_of(own) if own else 0.0)
        price += draft.each_seconds[2] * sum(line.backlog for line in group)
        brings = sum(line.acceptance for line in group)
        for used in (step.used.get(line.index) for line in group):
            if used is not None:  # who drafts already loses what that draft would have brought
                odds = used.acceptance * used.by_depth[: step.lengths[used.index]]
                brings -= float(odds.cumprod().sum())
        return price, brings * best.token_seconds

    # -- after the step ------------------------------------------------------------------

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats, gain: Gain) -> None:
        """See `Planner.observe`."""
        step, self._pending = self._pending, None
        if step is None or step.plan is not plan:
            return
        drafted = [verdict.drafted for verdict in verdicts]
        self._learn_costs(step, drafted, stats)
        self._learn_acceptance(step, verdicts)
        batch = step.decode.batch
        if not batch or stats.seconds <= 0.0:
            return
        self.typical_context = step.decode.context // batch
        if any(drafted):
            # A step that was only a probe was expected to lose, and is paid for.
            known = gain.basis is not Basis.UNKNOWN and gain.plain_seconds > 0.0
            judged = known and sum(drafted) > len(step.probed)
            self.guard.observe(batch, gain.loss if judged else None)
        else:
            self.guard.observe(batch, None)
            if step.whole == step.decode:
                self.prober.plain(batch, self.steps)
        seconds = stats.seconds + stats.between_seconds
        plain = gain.plain_seconds or self.costs.plain_seconds(step.decode)
        self.prober.pass_time(seconds, plain)

    def _learn_costs(self, step: _Step, drafted: list[int], stats: StepStats) -> None:
        costs, batch, total = self.costs, step.decode.batch, sum(drafted)
        load = step.whole.with_drafts(step.plan, drafted) if total else step.whole
        costs.target.update(load, stats.verify_seconds)
        phases = stats.verify_seconds + stats.draft_seconds + stats.choose_seconds
        aside = stats.seconds + stats.between_seconds - stats.learn_seconds - phases
        costs.observe_overhead(batch, total, aside)
        for name in {line.drafter for line in step.used.values()}:
            own = [line for line in step.used.values() if line.drafter == name]
            lengths = [step.lengths[line.index] for line in own]
            seconds = stats.drafter_seconds.get(name, stats.draft_seconds)
            costs.draft(name).update(lengths, seconds, sum(line.backlog for line in own))

    def _learn_acceptance(self, step: _Step, verdicts: Seq[Verdict]) -> None:
        self.off_reasons.update(step.why_not.values())
        for index, line in step.used.items():
            verdict, sequence = verdicts[index], step.plan.scheduled[index].sequence
            if not verdict.drafted:
                self.off_reasons[OffReason.NO_PROPOSAL] += 1
                continue
            self.wasted_tokens += verdict.drafted - verdict.accepted
            if sequence.status is Status.FINISHED:
                continue
            self.acceptance.learn(sequence, line.drafter, line.bucket, verdict)
            if index in step.probed and verdict.accepted:
                self.prober.succeeded(sequence, self.steps, step.token_seconds)


def _refusal(sequence: Sequence) -> OffReason:
    """Why a sequence that was granted no drafts could not draft, whatever it is worth."""
    if sequence.drafters == (NO_DRAFTER,):
        return OffReason.NO_DRAFTER
    if sequence.draft_limit == 0:
        return OffReason.REQUEST
    return OffReason.LAST_TOKEN if sequence.room <= 1 else OffReason.NO_BUDGET
