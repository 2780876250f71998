"""The planner that is never slower: it drafts where measured times say that it pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Margins
from engine.control.baseline import Baseline, Basis
from engine.control.decision import Decider, Decision
from engine.control.effort import Effort
from engine.control.explore import Explorer
from engine.control.guard import Guard
from engine.control.latency import CostModel
from engine.control.options import Mode, PlannerOptions
from engine.control.outcomes import Outcomes
from engine.control.scoring import Scorer
from engine.control.speedup import Gain, Meter
from engine.control.step import OffReason, PendingStep, read_step
from engine.draft.drafter import Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence, Status
from engine.types import StepStats

#: After the first steps, costs are learnt from every third step with drafts, and of plain steps
#: in a row from the first and every eighth: learning costs time, too. Where nobody ever drafts
#: they are for people only.
_LEARN_ALL = 200
_LEARN_DRAFTS = 3
_LEARN_PLAIN = 8
_LEARN_OFF = 32


class AdaptivePlanner:
    """Maximises expected tokens per second in every step, from past data only.

    Args:
        options: how to plan.

    Attributes:
        off_reasons: counter; rows that decoded without a draft, by reason.
        wasted_tokens: counter; draft tokens that were checked for nothing.
        steps: that were planned.
    """

    def __init__(self, options: PlannerOptions) -> None:
        self.options = options
        self.costs = CostModel(options.calibration, options.most_rows, options.draft_calibrations)
        self.acceptance = AcceptanceModel(options.depth)
        self.decider = Decider(self.acceptance, self.costs)
        self.baseline = Baseline(self.costs)
        self.meter = Meter(self.baseline)
        self.guard = Guard()
        self.explorer = Explorer(options.seed)
        self.effort = Effort()
        self.scorer = Scorer(options.advisor)
        self.off_reasons: Counter[OffReason] = Counter()
        self.wasted_tokens = 0
        self.steps = 0
        self.typical_context = 0  # cached tokens of a decoding sequence, in the last step
        self._pending: PendingStep | None = None
        self._aside = 0.0  # seconds spent in `observe`, to be charged to the next step
        self._plain_steps = 0  # in a row

    # -- before the step -----------------------------------------------------------------

    def choose(self, plan: StepPlan) -> list[int]:
        """See `Planner.choose`."""
        began = self.options.clock()
        self.steps += 1
        step = read_step(plan, self._nobody(plan), self.options.advisor)
        self._pending, saves = step, 0.0
        if step.rows:
            if self.options.mode is Mode.FIXED:
                self._follow_orders(step)
            else:
                saves = self._optimise(step)
                self.scorer.look(step)
        step.planning_seconds = self.options.clock() - began
        if step.rows:
            self.effort.note(step.decode.batch, step.planning_seconds, saves)
        return step.lengths

    def _nobody(self, plan: StepPlan) -> OffReason | None:
        """Why nobody may draft in a step, whatever there is to offer."""
        if self.options.mode is Mode.OFF:
            return OffReason.SERVER
        if self.options.mode is Mode.FIXED or self.explorer.eager:
            return None
        batch = sum(scheduled.samples for scheduled in plan.scheduled)
        return OffReason.NOT_WORTH_IT if self.effort.rests(batch, self.steps) else None

    def release(self, sequence: Sequence) -> None:
        """See `Planner.release`."""
        for judged in self.scorer.flush():
            self.acceptance.note(judged)
        self.scorer.release(sequence)
        self.acceptance.release(sequence)
        self.explorer.release(sequence)
        self.meter.release(sequence)

    def _follow_orders(self, step: PendingStep) -> None:
        """All that is allowed, from the first drafter that has something to offer, but for the
        plain steps that the meter needs."""
        step.slots = [self.acceptance.slot(line.sequence, line.drafter) for line in step.lines]
        step.expected = [1.0] * len(step.lines)
        if not self._is_shadow(step, None):
            step.assign(step.used, [step.lines[line].limit for line in step.used])

    def _optimise(self, step: PendingStep) -> float:
        """Decides, and returns the seconds that this should save."""
        decision = self.decider.decide(step, self.steps)
        step.slots, step.expected = decision.slots, decision.expected
        if self.guard.closed(step.decode.batch):
            step.why_not = OffReason.GUARD
            return 0.0
        used, lengths = decision.chosen(step.used)
        saves = decision.best.saved_seconds if any(lengths) else 0.0
        if any(lengths) and self._is_shadow(step, saves):
            return saves
        # Probes wait until it is known what plain steps cost, or there would be none.
        if self.baseline.known:
            for line in self._probes(step, decision, used):
                row = step.lines[line].row
                step.probed.append(step.rows[row])
                lengths[row] = 1 + (lengths[row] if used[row] == line else 0)
                used[row] = line
        step.assign(used, lengths)
        return saves

    def _probes(self, step: PendingStep, decision: Decision, used: list[int]) -> list[int]:
        """Lines that get a draft token more than planned: of each sequence those in turn whose
        drafters can only be known by trying."""
        tried: dict[int, list[int]] = {}
        for number, line in enumerate(step.lines):
            if line.drafter not in self.scorer.free:
                tried.setdefault(line.row, []).append(number)
        lines = [numbers[self.steps % len(numbers)] for numbers in tried.values()]
        sequences = [step.lines[line].sequence for line in lines]
        if not self.explorer.any_due(self.steps, sequences):
            return []
        every = self.decider.margins(decision, step)
        lengths = [decision.lengths[used[step.lines[line].row]] for line in lines]
        chosen = self.explorer.probes(self.steps, sequences, lengths, _only(every, lines))
        return [lines[n] for n in chosen]

    def _is_shadow(self, step: PendingStep, loss: float | None) -> bool:
        """Whether the drafts of this step are left out to measure a plain one."""
        # With prefill in the pass it would not tell what a plain step costs.
        if step.has_prefill:
            return False
        samples, age = self.baseline.age(step.decode.batch)
        if not self.explorer.shadow(samples, age, loss):
            return False
        step.why_not = OffReason.SHADOW
        return True

    # -- after the step ------------------------------------------------------------------

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """See `Planner.observe`."""
        began = self.options.clock()
        step, self._pending = self._pending, None
        if step is None or step.plan is not plan:
            return Gain()
        drafted = [verdict.drafted for verdict in verdicts]
        plain = not any(drafted)
        learns = self._learns(plain)
        self._plain_steps = self._plain_steps + 1 if plain else 0
        # Costs first: the baseline is measured against their scale, which the first steps set.
        # What was spent here on the step before is a part of the time between the two.
        seconds = stats.seconds + max(stats.between_seconds, self._aside)
        if learns:
            self._learn_costs(step, drafted, stats, seconds - self._aside)
        if plain:
            gain = self._measure_plain(step, stats, seconds, learns)
        else:
            gain = self._measure(step, stats, seconds)
        self._learn_acceptance(step, verdicts)
        self._count(step, verdicts)
        self._aside = self.options.clock() - began
        return gain

    def _learns(self, plain: bool) -> bool:
        """Whether costs are learnt from this step."""
        if self.steps <= _LEARN_ALL:
            return True
        if self.options.mode is Mode.OFF:
            return self.steps % _LEARN_OFF == 0
        return self._plain_steps % _LEARN_PLAIN == 0 if plain else self.steps % _LEARN_DRAFTS == 0

    def _measure_plain(
        self, step: PendingStep, stats: StepStats, seconds: float, learns: bool
    ) -> Gain:
        """Speed-up and account of a step without drafts."""
        aside, self._aside = self._aside, 0.0
        if step.decode.batch == 0 or stats.seconds <= 0.0:
            return Gain()
        self.typical_context = step.decode.context // step.decode.batch
        spent = min(aside + step.planning_seconds + stats.draft_seconds, seconds)
        if learns and not step.has_prefill:
            self.baseline.observe(step.decode, seconds - spent)
        # Where nobody may draft, what planning takes is bookkeeping, and no price of drafts.
        gain = self.meter.plain(seconds, 0.0 if self.options.mode is Mode.OFF else spent)
        without = self.baseline.seconds(step.decode) if step.has_prefill else seconds - spent
        self.explorer.account.pass_time(seconds, without)
        self.guard.observe(step.decode.batch, None)
        return gain

    def _measure(self, step: PendingStep, stats: StepStats, seconds: float) -> Gain:
        """Speed-up, guard and account of a step with drafts."""
        batch, self._aside = step.decode.batch, 0.0
        if seconds <= 0.0:
            return Gain()
        gain = self.meter.speculative(step.decode, step.whole, stats.emitted_tokens, seconds)
        plain = self.baseline.seconds(step.decode)
        self.explorer.account.pass_time(seconds, plain)
        # A step that was only a probe was expected to lose, and is paid for by the account.
        judged = sum(step.lengths) > len(step.probed) and gain.basis is not Basis.UNKNOWN
        self.guard.observe(batch, (seconds - gain.equal_seconds) / plain if judged else None)
        self.typical_context = step.decode.context // batch
        return gain

    def _learn_costs(
        self, step: PendingStep, drafted: list[int], stats: StepStats, seconds: float
    ) -> None:
        costs, total = self.costs, sum(drafted)
        load = step.load_with_drafts(drafted) if total else step.whole
        costs.target.update(load, stats.verify_seconds)
        phases = stats.verify_seconds + stats.draft_seconds + step.planning_seconds
        costs.observe_overhead(step.decode.batch, total, seconds - phases)
        for name, lines in step.drafting().items():
            lengths = [step.length(line) for line in lines]
            seconds = stats.drafter_seconds.get(name, stats.draft_seconds)
            costs.draft(name).update(lengths, seconds, sum(line.backlog for line in lines))

    def _learn_acceptance(self, step: PendingStep, verdicts: Seq[Verdict]) -> None:
        for judged in self.scorer.judge():
            self.acceptance.note(judged)
        lengths = [step.lengths[i] for i in step.rows]
        if not any(lengths):
            return
        own = [verdicts[i] for i in step.rows]
        self.acceptance.note(
            Outcomes(
                slots=[step.slots[line] for line in step.used],
                buckets=[step.lines[line].bucket for line in step.used],
                expected=[step.expected[line] for line in step.used],
                allowed=lengths,
                drafted=[verdict.drafted for verdict in own],
                accepted=[verdict.accepted for verdict in own],
                # Without a token of the target's own after them, the draft was cut off.
                refused=[
                    len(verdict.emitted) > verdict.accepted < verdict.drafted for verdict in own
                ],
            )
        )
        for i in step.probed:
            sequence = step.plan.scheduled[i].sequence
            if verdicts[i].accepted == step.lengths[i] and sequence.status is not Status.FINISHED:
                self.explorer.succeeded(sequence, self.steps)

    def _count(self, step: PendingStep, verdicts: Seq[Verdict]) -> None:
        self.off_reasons.update(step.reasons.values())
        for i in step.rows:
            if not verdicts[i].drafted:
                reason = OffReason.NO_PROPOSAL if step.lengths[i] else step.why_not
                self.off_reasons[reason] += 1
        emitted: list[tuple[Sequence, int]] = []
        for scheduled, verdict in zip(step.plan.scheduled, verdicts, strict=True):
            self.wasted_tokens += verdict.drafted - verdict.accepted
            # One that has just ended was released already and must not come back.
            if verdict.emitted and scheduled.sequence.status is not Status.FINISHED:
                emitted.append((scheduled.sequence, len(verdict.emitted)))
        self.meter.credit(emitted)


def _only(margins: Margins, lines: list[int]) -> Margins:
    """Those of some lines."""
    return Margins(
        brings=[margins.brings[line] for line in lines],
        price=[margins.price[line] for line in lines],
        joint=[margins.joint[line] for line in lines],
        promise=[margins.promise[line] for line in lines],
        drafters=[margins.drafters[line] for line in lines],
        token_seconds=margins.token_seconds,
    )
