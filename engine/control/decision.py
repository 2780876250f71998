"""From estimates and costs to draft lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.control.acceptance import AcceptanceModel
from engine.control.allocate import Allocation, Candidates, Margins, allocate, margins
from engine.control.latency import CostModel, Load
from engine.control.step import PendingStep
from engine.sequence import Sequence

#: Expected gain at which speculation is taken up; it is kept while there is any.
_WORTH_STARTING = 0.02

#: A decision is kept for so many steps of the same sequences: estimates move slowly, and
#: deciding costs time.
_KEPT_STEPS = 4

#: Outcomes of drafts before which every step is decided anew.
_SETTLED = 32


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
        expires: the step from which it must be made anew.
    """

    sequences: list[Sequence]
    buckets: list[int]
    limits: list[int]
    slots: list[int]
    expected: list[float]
    lengths: list[int]
    rows: Candidates
    best: Allocation
    expires: int


class Decider:
    """Decides, and keeps a decision while it holds.

    Args:
        acceptance: estimates.
        costs: of this machine.
    """

    def __init__(self, acceptance: AcceptanceModel, costs: CostModel) -> None:
        self._acceptance = acceptance
        self._costs = costs
        self._last: Decision | None = None
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
        last = self._last
        if (
            last is not None
            and number < last.expires
            and not step.has_prefill
            and last.limits == limits
            and last.buckets == step.buckets
            and last.sequences == sequences
        ):
            return last
        self._last = self._make(step, number, sequences, limits)
        return self._last

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

    def _make(
        self, step: PendingStep, number: int, sequences: list[Sequence], limits: list[int]
    ) -> Decision:
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
            expires=number + self._kept_steps(step),
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

    def _kept_steps(self, step: PendingStep) -> int:
        if step.has_prefill:  # its size differs from step to step
            return 0
        return _KEPT_STEPS if self._acceptance.outcomes >= _SETTLED else 1
