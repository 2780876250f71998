"""How many draft tokens every sequence gets in a step, and who drafts them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.control.speedup import Gain
from engine.draft.drafter import Advisor, NoAdvice, Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.types import StepStats


class Planner(Protocol):
    """Chooses drafters and draft lengths from past data only.

    That restriction keeps every verification rule lossless: whether a draft token is checked
    must not depend on that token.
    """

    def choose(self, plan: StepPlan) -> list[int]:
        """One draft length per scheduled sequence, each at most its `max_draft`; 0 = none. Sets
        `drafter` of each sequence to one of its `drafters`."""
        ...

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """Learns what the step cost and gained; called once for every `choose` whose step
        did not fail, with the verdicts in the plan's order.

        Returns:
            The step's part in the measured speed-up.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        ...


class FixedPlanner:
    """Always as many as there is room for, from the first of a sequence's drafters that has
    something to offer; measures nothing.

    Args:
        advisor: knows who has.
    """

    def __init__(self, advisor: Advisor | None = None) -> None:
        self._advisor = advisor or NoAdvice()

    def choose(self, plan: StepPlan) -> list[int]:
        """See `Planner.choose`."""
        for scheduled in plan.scheduled:
            sequence = scheduled.sequence
            if scheduled.max_draft and len(sequence.drafters) > 1:
                offers = (n for n in sequence.drafters if self._offers(n, sequence))
                sequence.drafter = next(offers, sequence.drafters[0])
        return [scheduled.max_draft for scheduled in plan.scheduled]

    def _offers(self, name: str, sequence: Sequence) -> bool:
        return self._advisor.outlook(name, sequence) is not None

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """Learns nothing."""
        return Gain()

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""
