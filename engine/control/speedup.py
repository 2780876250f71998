"""What speculation really bought: wall clock against plain decode steps measured live.

For a step with B emitting sequences that emitted N tokens in w seconds, let b be the seconds
of a plain step at the same batch, context and prefill, and b' without the prefill. Plain
decoding would have needed N / B steps for the same tokens, of which one carries the prefill:

    equal = b + (N / B - 1) b'        speed-up = sum of equal / sum of w

a ratio of sums, so that it can be taken over any window. w holds everything: scheduling,
planning, drafting, the pass, sampling, commit. A plain step counts as itself, less what was
spent on planning and on drafts that were never offered.

b comes from plain steps only. The planner's cost model supplies the shape over batch, context
and prefill; how far reality is off that shape is measured at each batch size on plain steps,
natural ones and a small random share, and forgotten exponentially.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.control.baseline import Baseline, Basis
from engine.control.latency import Load
from engine.sequence import Sequence

_BLOCK_STEPS = 64
_BLOCKS = 64

#: Speculative steps that wait for a baseline, so that the start is not left out.
_MOST_EARLY = 1024

#: Steps between two evaluations of the sums over all blocks.
_EVERY = 16

#: Two-sided 95 % quantiles of Student's t by degrees of freedom, for few blocks.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Gain:
    """One step's part in the speed-up; the sums of both times are monotonic counters.

    Attributes:
        equal_seconds: that plain decoding would have taken for the step's tokens.
        seconds: that the step took.
        basis: of `equal_seconds`; both times are 0 where it is UNKNOWN.
    """

    equal_seconds: float = 0.0
    seconds: float = 0.0
    basis: Basis = Basis.UNKNOWN


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
class _Early:
    """A speculative step, to be compared with plain ones."""

    decode: Load
    whole: Load
    emitted: int
    seconds: float


class Meter:
    """Sums up the speed-up, of the server and of every request.

    Args:
        baseline: what plain steps cost.

    Attributes:
        equal_seconds: counter; what plain decoding would have taken for the same tokens.
        seconds: counter; what they took. The ratio of the two is the speed-up.
        unknown_seconds: counter; speculative steps that are in neither, since they were over
            long before there was a baseline.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._blocks: deque[_Block] = deque([_Block()], maxlen=_BLOCKS)
        self._requests: dict[Sequence, list[float]] = {}  # equal, seconds
        self._first = self._next = 0.0  # of the last step: its plain steps, see `credit`
        self._last = Gain()
        self._early: deque[_Early] = deque(maxlen=_MOST_EARLY)
        self._counted = 0
        self._speedup: tuple[int, Speedup] | None = None  # made after so many steps
        self.equal_seconds = 0.0
        self.seconds = 0.0
        self.unknown_seconds = 0.0

    def speculative(self, decode: Load, whole: Load, emitted: int, seconds: float) -> Gain:
        """The gain of a step in which drafts were checked.

        Args:
            decode: its emitting sequences alone, without drafts.
            whole: with the prefill.
            emitted: tokens.
            seconds: that it took.
        """
        step = _Early(decode, whole, emitted, seconds)
        if not self._baseline.known:
            if len(self._early) == _MOST_EARLY:
                self.unknown_seconds += self._early[0].seconds
            self._early.append(step)
            self._last = Gain()
            return self._last
        while self._early:
            self._compare(self._early.popleft())
        return self._compare(step)

    def plain(self, seconds: float, spent: float) -> Gain:
        """The gain of a step without drafts, never above 1.

        Args:
            seconds: that it took.
            spent: of these on planning and on drafting to no avail.
        """
        self._first, self._next = seconds - spent, 0.0
        return self._count(Gain(self._first, seconds, Basis.MEASURED), 0.0)

    def credit(self, emitted: Seq[tuple[Sequence, int]]) -> None:
        """Counts the last step for its sequences, each with the tokens it emitted."""
        if self._last.basis is Basis.UNKNOWN:
            return
        first, following, seconds = self._first, self._next, self._last.seconds
        for sequence, tokens in emitted:
            own = self._requests.setdefault(sequence, [0.0, 0.0])
            own[0] += first + (tokens - 1) * following
            own[1] += seconds

    def of_request(self, sequence: Sequence) -> float | None:
        """The speed-up of one sequence so far; None while unknown."""
        equal, seconds = self._requests.get(sequence, (0.0, 0.0))
        return equal / seconds if seconds else None

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

    def _compare(self, step: _Early) -> Gain:
        """Counts a speculative step against the plain ones it replaced."""
        batch = step.decode.batch
        self._next = self._baseline.seconds(step.decode)
        same = step.whole == step.decode
        self._first = self._next if same else self._baseline.seconds(step.whole)
        equal = self._first + (step.emitted / batch - 1.0) * self._next
        gain = Gain(equal, step.seconds, self._baseline.basis(batch))
        return self._count(gain, equal * self._baseline.relative_error(batch))

    def _count(self, gain: Gain, doubt: float) -> Gain:
        """Adds a step to all sums.

        Args:
            gain: of the step.
            doubt: seconds by which its `equal_seconds` may be off.
        """
        self._baseline.pass_time(gain.seconds)
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
        self._last = gain
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
