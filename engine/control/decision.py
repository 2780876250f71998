"""From estimates and costs to draft lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Allocation, Candidates, Margins, allocate, margins
from engine.control.latency import CostModel, Load
from engine.control.step import PendingStep
from engine.sequence import Sequence

#: Expected gain at which speculation is taken up; it is kept while there is any.
_WORTH_STARTING = 0.02

#: Estimates, and decisions on the same sequences, are kept for so many steps: they move slowly,
#: and deciding costs time. Two surprises end that early.
_KEPT_STEPS = 12
_SURPRISES = 2

#: Outcomes of drafts before which every step is decided anew.
_SETTLED = 32

#: Decisions that are kept at once; they differ in what the drafters know beforehand.
_MOST_KEPT = 16


@dataclass(frozen=True, slots=True)
class Decision:
    """Draft lengths for a set of sequences, before probes and shadow steps.

    Attributes:
        sequences, buckets, limits: what was decided on.
        slots: of the sequences in the acceptance model.
        expected: acceptance at depth 1 of each.
        lengths: of each; all 0 if `best` is not worth it.
        rows: with all that is known of them.
        best: the best allocation.
    """

    sequences: list[Sequence]
    buckets: list[int]
    limits: list[int]
    slots: list[int]
    expected: list[float]
    lengths: list[int]
    rows: Candidates
    best: Allocation

    def within(self, limits: list[int]) -> Decision:
        """The same for other limits: near the end of a text they shrink with every step."""
        lengths = [min(pair) for pair in zip(self.lengths, limits, strict=True)]
        rows = replace(self.rows, limits=np.minimum(np.array(limits), self.rows.offers.shape[1]))
        return replace(self, limits=limits, lengths=lengths, rows=rows)


class Decider:
    """Decides, and keeps a decision while it holds.

    Args:
        acceptance: estimates.
        costs: of this machine.
    """

    def __init__(self, acceptance: AcceptanceModel, costs: CostModel) -> None:
        self._acceptance = acceptance
        self._costs = costs
        self._kept: dict[tuple[int, ...], Decision] = {}  # by buckets
        self._until = 0  # the step from which nothing that was kept counts
        self._speculating: set[int] = set()  # octaves of batch size

    def decide(
        self, step: PendingStep, number: int, sequences: list[Sequence], limits: list[int]
    ) -> Decision:
        """Draft lengths of the rows that may draft.

        Args:
            step: its load and the drafters' outlook.
            number: of the step.
            sequences: of its rows.
            limits: most draft tokens of each, at least 1.
        """
        model = self._acceptance
        if number >= self._until or model.surprises >= _SURPRISES * len(sequences):
            model.settle()
            self._kept.clear()
            self._until = number + (_KEPT_STEPS if model.outcomes >= _SETTLED else 1)
        key = tuple(step.buckets)
        old = None if step.has_prefill else self._kept.get(key)
        if old is not None and old.sequences == sequences:
            return old if old.limits == limits else old.within(limits)
        decision = self._make(step, sequences, limits)
        if not step.has_prefill:  # its size differs from step to step
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = decision
        return decision

    def margins(self, decision: Decision, step: PendingStep) -> Margins:
        """Of one more draft token for each sequence of a decision."""
        lengths = np.array(decision.lengths)
        worth = decision.best.token_seconds
        return margins(decision.rows, lengths, step.whole, self._costs, worth)

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

    def _make(self, step: PendingStep, sequences: list[Sequence], limits: list[int]) -> Decision:
        slots = [self._acceptance.slot(s, s.drafter) for s in sequences]
        acceptance, offers = self._acceptance.estimate(np.array(slots), np.array(step.buckets))
        rows = Candidates(
            acceptance=acceptance,
            offers=offers,
            limits=np.minimum(np.array(limits), self._acceptance.depth),
            drafters=[s.drafter for s in sequences],
        )
        best = allocate(rows, step.decode, step.whole, self._costs)
        worth = self._worth_it(step.decode.batch, best)
        lengths = best.lengths if worth else np.zeros_like(best.lengths)
        return Decision(
            sequences=sequences,
            buckets=step.buckets,
            limits=limits,
            slots=slots,
            expected=acceptance[:, 0].tolist(),
            lengths=lengths.tolist(),
            rows=rows,
            best=best,
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
