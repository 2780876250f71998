"""How many draft tokens every sequence gets in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.control.speedup import Gain
from engine.draft.drafter import Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.types import StepStats


class Planner(Protocol):
    """Chooses draft lengths from past data only.

    That restriction keeps every verification rule lossless: whether a draft token is checked
    must not depend on that token.
    """

    def choose(self, plan: StepPlan) -> list[int]:
        """One draft length per scheduled sequence, each at most its `max_draft`; 0 = none."""
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
    """Always as many as there is room for; measures nothing."""

    def choose(self, plan: StepPlan) -> list[int]:
        """See `Planner.choose`."""
        return [scheduled.max_draft for scheduled in plan.scheduled]

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """Learns nothing."""
        return Gain()

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""
