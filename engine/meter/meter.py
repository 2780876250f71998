"""What speculation really bought: wall clock against plain decode steps measured live.

For a step with B emitting sequences that emitted N tokens in w seconds, let b be the seconds
of a plain step at the same batch, context and prefill, and b' without the prefill. Plain
decoding would have needed N / B steps for the same tokens, of which one carries the prefill:

    equal = b + (N / B - 1) b'        speed-up = sum of equal / sum of w

a ratio of sums, so that it can be taken over any window. w holds everything: scheduling,
planning, drafting, the pass, sampling, commit. A plain step counts as itself, less what was
spent on planning and on drafts that were never offered.

b comes from plain steps only. The cost model supplies the shape over batch, context
and prefill; how far reality is off that shape is measured at each batch size on plain steps,
natural ones and a small random share, and forgotten exponentially.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.control.costs import CostModel
from engine.draft.drafter import Verdict
from engine.load import Load, loads_of
from engine.meter.baseline import Baseline
from engine.meter.gain import Basis, Gain
from engine.scheduler import StepPlan
from engine.sequence import Sequence, Status
from engine.stats import StepStats

_BLOCK_STEPS = 64
_BLOCKS = 64

#: Speculative steps that wait for a baseline, so that the start is not left out.
_MOST_EARLY = 1024

#: Steps between two evaluations of the sums over all blocks.
_EVERY = 16

#: Two-sided 95 % quantiles of Student's t by degrees of freedom, for few blocks.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Speedup:
    """The ratio over the last few thousand steps, with a 95 % confidence range.

    Attributes:
        ratio: None while unknown.
        low, high: None until there are enough blocks of steps.
        basis: MODELLED if more than a fifth of the time rests on a modelled baseline.
    """

    ratio: float | None
    low: float | None
    high: float | None
    basis: Basis


@dataclass(slots=True)
class _Block:
    """Sums over consecutive steps; steps near each other are alike, blocks nearly independent."""

    equal: float = 0.0
    seconds: float = 0.0
    modelled: float = 0.0  # of `seconds`, with a modelled baseline
    doubt: float = 0.0  # seconds by which `equal` may be off because the baseline is
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Compared:
    """A step with drafts, to be compared with plain ones."""

    decode: Load
    whole: Load
    emitted: int
    seconds: float


@dataclass(slots=True)
class _Own:
    """Sums over the steps of one sequence."""

    equal: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of the seconds by which single steps may be off

    def add(self, equal: float, seconds: float, doubt: float) -> None:
        """Counts one step, which may be off by the share `doubt`; 0 where nothing is compared."""
        self.equal += equal
        self.seconds += seconds
        self.squares += (doubt * seconds) ** 2

    @property
    def noise(self) -> float:
        """Two standard errors of the speed-up."""
        return 2.0 * math.sqrt(self.squares) / self.seconds


class Meter:
    """Sums up the speed-up, of the server and of every request.

    Args:
        costs: the shape of a step's time over batch, context and prefill.

    Attributes:
        baseline: what plain steps cost.
        equal_seconds: counter; what plain decoding would have taken for the same tokens.
        seconds: counter; what they took. The ratio of the two is the speed-up.
        unknown_seconds: counter; speculative steps that are in neither, since they were over
            long before there was a baseline.
    """

    def __init__(self, costs: CostModel) -> None:
        self.baseline = Baseline(costs)
        self._blocks: deque[_Block] = deque([_Block()], maxlen=_BLOCKS)
        self._requests: dict[Sequence, _Own] = {}
        self._early: deque[_Compared] = deque(maxlen=_MOST_EARLY)
        self._counted = 0
        self._speedup: tuple[int, Speedup] | None = None  # made after so many steps
        self.equal_seconds = 0.0
        self.seconds = 0.0
        self.unknown_seconds = 0.0

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """Counts a step; call it before the planner observes the same one.

        Args:
            verdicts: in the plan's order.
            stats: of the step; all of its time counts, and the time since the one before.
        """
        decode, whole = loads_of(plan)
        if not decode.batch or stats.seconds <= 0.0:
            return Gain()
        seconds = stats.seconds + stats.between_seconds
        if any(verdict.drafted for verdict in verdicts):
            step = _Compared(decode, whole, stats.emitted_tokens, seconds)
            gain, first, following, doubt = self._speculative(step)
        else:
            spent = stats.choose_seconds + stats.draft_seconds + stats.learn_seconds
            first, following, doubt = max(seconds - spent, 0.0), 0.0, 0.0
            if whole == decode:
                self.baseline.observe(decode, first)
            plain = self.baseline.seconds(decode)
            gain = self._count(Gain(first, seconds, Basis.MEASURED, plain), 0.0)
        if gain.basis is not Basis.UNKNOWN:
            for scheduled, verdict in zip(plan.scheduled, verdicts, strict=True):
                if verdict.emitted and scheduled.sequence.status is not Status.FINISHED:
                    own = self._requests.setdefault(scheduled.sequence, _Own())
                    own.add(first + (len(verdict.emitted) - 1) * following, seconds, doubt)
        return gain

    def leave_out_prompt(self, sequence: Sequence) -> None:
        """Begins to measure a sequence: call it after its first pass, whose token comes with the
        prompt, drafts or no drafts."""
        self._requests.pop(sequence, None)

    def of_request(self, sequence: Sequence) -> float | None:
        """The speed-up of one sequence's decoding so far. None while unknown, or where noise is
        larger than what there is to tell; without an accepted draft token nothing was gained."""
        own = self._requests.get(sequence)
        if own is None or not self.baseline.known:
            return None
        ratio, noise = own.equal / own.seconds, own.noise
        if noise and abs(ratio - 1.0) < noise:
            return None
        return None if ratio > 1.0 and not sequence.accepted_tokens else ratio

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._requests.pop(sequence, None)

    @property
    def num_requests(self) -> int:
        """Sequences it keeps sums of."""
        return len(self._requests)

    def speedup(self) -> Speedup:
        """Over the last few thousand steps, worked out every sixteen."""
        if self._speedup is None or self._counted - self._speedup[0] >= _EVERY:
            self._speedup = (self._counted, self._sum_up())
        return self._speedup[1]

    def _sum_up(self) -> Speedup:
        blocks = list(self._blocks)
        equal, seconds = sum(b.equal for b in blocks), sum(b.seconds for b in blocks)
        if self._counted < _BLOCK_STEPS // 2 or self._early:
            return Speedup(None, None, None, Basis.UNKNOWN)
        ratio = equal / seconds
        modelled = sum(b.modelled for b in blocks) > 0.2 * seconds
        half = _half_width([b for b in blocks if b.steps == _BLOCK_STEPS], ratio)
        low, high = (None, None) if half is None else (ratio - half, ratio + half)
        return Speedup(ratio, low, high, Basis.MODELLED if modelled else Basis.MEASURED)

    def _speculative(self, step: _Compared) -> tuple[Gain, float, float, float]:
        """A step in which drafts were checked: its gain, plain seconds of the first token of each
        sequence and of each further one, and the share by which a single step is off."""
        if not self.baseline.known:
            if len(self._early) == _MOST_EARLY:
                self.unknown_seconds += self._early[0].seconds
            self._early.append(step)
            return Gain(), 0.0, 0.0, 0.0
        while self._early:
            self._compare(self._early.popleft())
        return self._compare(step)

    def _compare(self, step: _Compared) -> tuple[Gain, float, float, float]:
        batch, baseline = step.decode.batch, self.baseline
        following = baseline.seconds(step.decode)
        first = following if step.whole == step.decode else baseline.seconds(step.whole)
        equal = first + (step.emitted / batch - 1.0) * following
        gain = Gain(equal, step.seconds, baseline.basis(batch), following)
        self._count(gain, equal * baseline.relative_error(batch))
        return gain, first, following, baseline.scatter(batch)

    def _count(self, gain: Gain, doubt: float) -> Gain:
        """Adds a step to all sums.

        Args:
            gain: of the step.
            doubt: seconds by which its `equal_seconds` may be off.
        """
        self.baseline.pass_time(gain.seconds)
        self._counted += 1
        if self._blocks[-1].steps == _BLOCK_STEPS:
            self._blocks.append(_Block())
        block = self._blocks[-1]
        block.steps += 1
        block.doubt += doubt
        block.equal += gain.equal_seconds
        block.seconds += gain.seconds
        block.modelled += gain.seconds if gain.basis is Basis.MODELLED else 0.0
        self.equal_seconds += gain.equal_seconds
        self.seconds += gain.seconds
        return gain


def _half_width(blocks: list[_Block], ratio: float) -> float | None:
    """Half a 95 % range for a ratio of sums: the scatter of blocks around it (the delta
    method; for many blocks the same as a block bootstrap), and the baseline's own error."""
    n = len(blocks)
    seconds = sum(b.seconds for b in blocks)
    if n < 4 or seconds == 0.0:
        return None
    squares = sum((b.equal - ratio * b.seconds) ** 2 for b in blocks)
    t = _T95[n - 2] if n - 2 < len(_T95) else 2.0
    scatter = t * math.sqrt(squares * n / (n - 1))
    doubt = 2.0 * sum(b.doubt for b in blocks)
    return math.hypot(scatter, doubt) / seconds
