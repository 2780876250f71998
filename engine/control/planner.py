"""How many draft tokens every sequence gets in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.draft.drafter import Verdict
from engine.scheduler import StepPlan
from engine.types import StepStats


class Planner(Protocol):
    """Chooses draft lengths from past data only.

    That restriction keeps every verification rule lossless: whether a draft token is checked
    must not depend on that token.
    """

    def choose(self, plan: StepPlan) -> list[int]:
        """One draft length per scheduled sequence, each at most its `max_draft`; 0 = none."""
        ...

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> None:
        """Learns what the step cost and gained."""
        ...


class FixedPlanner:
    """Always as many as there is room for."""

    def choose(self, plan: StepPlan) -> list[int]:
        """See `Planner.choose`."""
        return [scheduled.max_draft for scheduled in plan.scheduled]

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> None:
        """Learns nothing."""
