"""From estimates and costs to drafters and draft lengths."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Allocation, Margins, allocate, margins
from engine.control.candidates import Candidates
from engine.control.greedy import Greedy
from engine.control.latency import CostModel, Load
from engine.control.means import Floats
from engine.control.step import Line, PendingStep

#: Expected gain at which speculation is taken up; it is kept while there is any.
_WORTH_STARTING = 0.02

#: Estimates, and decisions on the same sequences, are kept until so many drafts have told their
#: outcome, in all and of each sequence: they move slowly, and deciding costs time. What ends that
#: as well: so many steps, or so many in which nobody was to draft, or two surprises of every
#: sequence.
_NEWS, _NEWS_EACH = 16, 6
_KEPT_STEPS = 12
_QUIET_STEPS = 40
_SURPRISES = 2

#: Outcomes of drafts before which any outcome is news enough.
_SETTLED = 32

#: Catching up pays for as many further steps of the same drafter, or for those that are left.
_CATCH_UP_STEPS = 16

#: Decisions that are kept at once; they differ in what the drafters know beforehand.
_MOST_KEPT = 16


@dataclass(frozen=True, slots=True)
class Decision:
    """Draft lengths for a set of lines, before probes and shadow steps.

    Attributes:
        lines: what was decided on.
        slots: of the lines in the acceptance model.
        expected: acceptance at depth 1 of each.
        lengths: of each; all 0 if `best` is not worth it, else above 0 in at most one line of
            a sequence.
        best: the best allocation.
    """

    lines: list[Line]
    slots: list[int]
    expected: list[float]
    lengths: list[int]
    best: Allocation

    def applies_to(self, lines: list[Line]) -> bool:
        """Whether the same may be decided on lines of equal buckets."""
        return len(lines) == len(self.lines) and all(
            a.sequence is b.sequence and a.drafter == b.drafter
            for a, b in zip(lines, self.lines, strict=True)
        )

    def within(self, lines: list[Line]) -> Decision:
        """The same for other limits: near the end of a text they shrink with every step."""
        limits = [line.limit for line in lines]
        if limits == [line.limit for line in self.lines]:
            return self
        lengths = [min(pair) for pair in zip(self.lengths, limits, strict=True)]
        return replace(self, lines=lines, lengths=lengths)

    def chosen(self, preferred: list[int]) -> tuple[list[int], list[int]]:
        """By sequence: its line, and the length of its draft.

        Args:
            preferred: lines of sequences that get no draft.
        """
        used, lengths = list(preferred), [0] * len(preferred)
        for number, (line, length) in enumerate(zip(self.lines, self.lengths, strict=True)):
            if length:
                used[line.row], lengths[line.row] = number, length
        return used, lengths


class Decider:
    """Decides, and keeps a decision while it holds.

    Args:
        acceptance: estimates.
        costs: of this machine.
    """

    def __init__(self, acceptance: AcceptanceModel, costs: CostModel) -> None:
        self._acceptance = acceptance
        self._costs = costs
        self._greedy = Greedy(acceptance, costs)
        self._kept: dict[tuple[int, ...], Decision] = {}  # by buckets
        self._since = -_QUIET_STEPS  # the step before which nothing counts
        self._quiet = True  # whether nobody was to draft since
        self._like: dict[int, Allocation] = {}  # by number of sequences, the first of those kept
        self._speculating: set[int] = set()  # octaves of batch size
        self._priced: tuple[Decision, Margins] | None = None  # the last margins asked for

    def decide(self, step: PendingStep, number: int) -> Decision:
        """Draft lengths of the lines of a step.

        Args:
            step: its load, and lines with limits of at least 1.
            number: of the step.
        """
        if self._is_out_of_date(number, len(step.rows)):
            self._acceptance.settle()
            self._kept.clear()
            self._like.clear()
            self._since, self._quiet = number, True
        if self._greedy.fits(step):
            slots = self._slots(step.lines)
            return self._judge(step, slots, *self._greedy.allocate(step, slots))
        key = tuple([line.bucket for line in step.lines])
        old = None if step.has_prefill else self._kept.get(key)
        if old is not None and old.applies_to(step.lines):
            return old.within(step.lines)
        decision = self._make(step)
        if not step.has_prefill:  # its size differs from step to step
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = decision
        return decision

    def margins(self, decision: Decision, step: PendingStep) -> Margins:
        """Of one more draft token for each line of a decision. Where it would be drafted instead
        of another drafter's, what those are expected to bring is lost."""
        found = self._margins_of(decision, step)
        if not any(line.backlog for line in step.lines):
            return found
        reads = [line.backlog * self._costs.draft(line.drafter).read_seconds for line in step.lines]
        return replace(
            found,
            price=(np.array(found.price) + reads).tolist(),
            joint=(np.array(found.joint) + reads).tolist(),
        )

    def _margins_of(self, decision: Decision, step: PendingStep) -> Margins:
        """Without catching up. Kept as long as the decision is."""
        if self._priced is not None and self._priced[0] is decision and not step.has_prefill:
            return self._priced[1]
        lengths, rows = np.array(decision.lengths), self._candidates(step.lines, decision.slots)
        worth = decision.best.token_seconds
        found = margins(rows, lengths, step.whole, self._costs, worth)
        if any(decision.lengths):
            kept = (rows.acceptance.cumprod(axis=1) * rows.offers).cumsum(axis=1)
            brings = np.where(lengths > 0, kept[np.arange(len(lengths)), lengths - 1], 0.0) * worth
            lost = np.bincount(rows.sequences, weights=brings)[rows.sequences] - brings
            found = replace(found, brings=(np.array(found.brings) - lost).tolist())
        self._priced = decision, found
        return found

    def typical(self, drafter: str, batch: int, limit: int, context: int) -> Allocation:
        """What would be planned for a batch of sequences that nothing is known of.

        Args:
            limit: most draft tokens of each.
            context: cached tokens of each.
        """
        acceptance, offers = self._acceptance.typical(drafter)
        rows = Candidates(
            acceptance=np.tile(acceptance, (batch, 1)),
            offers=np.tile(offers, (batch, 1)),
            limits=np.full(batch, min(limit, self._acceptance.depth)),
            drafters=[drafter] * batch,
        )
        load = Load(batch, batch, batch, batch * context, batch * context)
        return allocate(rows, load, load, self._costs)

    def _is_out_of_date(self, number: int, sequences: int) -> bool:
        """Whether what was kept no longer counts in a step."""
        model = self._acceptance
        enough = max(_NEWS, _NEWS_EACH * sequences) if model.outcomes >= _SETTLED else 1
        # Of outcomes whose estimates hold, fewer than half are surprises.
        surprised = model.surprises >= max(_SURPRISES * sequences, model.news / 2)
        longest = _QUIET_STEPS if self._quiet else _KEPT_STEPS
        return model.news >= enough or surprised or number - self._since >= longest

    def _make(self, step: PendingStep) -> Decision:
        slots = self._slots(step.lines)
        rows = self._candidates(step.lines, slots)
        like = self._like.get(len(step.rows))
        best = allocate(rows, step.decode, step.whole, self._costs, like)
        self._like.setdefault(len(step.rows), best)
        return self._judge(step, slots, rows.acceptance[:, 0].tolist(), best)

    def _judge(
        self, step: PendingStep, slots: list[int], expected: list[float], best: Allocation
    ) -> Decision:
        """The best allocation, if it is worth it."""
        worth = self._worth_it(step.decode.batch, best)
        self._quiet &= not worth
        lengths = best.lengths.tolist() if worth else [0] * len(slots)
        return Decision(step.lines, slots, expected, lengths, best)

    def _slots(self, lines: Seq[Line]) -> list[int]:
        return [self._acceptance.slot(line.sequence, line.drafter) for line in lines]

    def _candidates(self, lines: Seq[Line], slots: list[int]) -> Candidates:
        buckets = np.array([line.bucket for line in lines])
        acceptance, offers = self._acceptance.estimate(np.array(slots), buckets)
        return Candidates(
            acceptance=acceptance,
            offers=offers,
            limits=np.minimum([line.limit for line in lines], self._acceptance.depth),
            drafters=[line.drafter for line in lines],
            owners=np.array([line.row for line in lines]),
            backlog=_backlog(lines),
        )

    def _worth_it(self, batch: int, best: Allocation) -> bool:
        """Whether the gain is enough, with more asked of it to start than to go on: near the
        border the estimates' noise would switch back and forth."""
        octave = batch.bit_length()
        # A draft that is seldom offered is held to the steps in which it is.
        bar = 0.0 if octave in self._speculating else _WORTH_STARTING * best.chance
        worth = bool(best.lengths.any()) and best.gain > bar
        (self._speculating.add if worth else self._speculating.discard)(octave)
        return worth


def _backlog(lines: Seq[Line]) -> Floats | None:
    """Tokens to catch up with for each step that gains from it; None if there are none."""
    if not any(line.backlog for line in lines):
        return None
    steps = [min(_CATCH_UP_STEPS, max(1, line.sequence.room // 2)) for line in lines]
    return np.array([line.backlog for line in lines]) / steps
