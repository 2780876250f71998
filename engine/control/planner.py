"""Who drafts how far: the protocol, the planner that knows nothing, and the safety net."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from engine.draft.drafter import Advisor, NoAdvice, Verdict
from engine.meter.gain import Gain
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.stats import StepStats

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class Mode(Enum):
    """Who decides how far to speculate."""

    AUTO = "auto"  # the planner, from what it measured
    OFF = "off"  # nobody ever drafts
    FIXED = "fixed"  # always as many as there is room for


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who drafts how far; one entry per scheduled sequence.

    Attributes:
        lengths: most draft tokens, each at most what the plan has room for; 0 = none. For a
            drafter of trees it is the budget of nodes.
        drafters: names, each one of the sequence's drafters.
    """

    lengths: list[int]
    drafters: list[str]


def nobody(plan: StepPlan) -> Assignment:
    """No drafts at all."""
    drafters = [scheduled.sequence.drafters[0] for scheduled in plan.scheduled]
    return Assignment([0] * len(drafters), drafters)


class Planner(Protocol):
    """Chooses drafters and draft lengths from past data only.

    That restriction keeps every verification rule lossless: whether a draft token is checked
    must not depend on that token.
    """

    def choose(self, plan: StepPlan) -> Assignment:
        """Who drafts how far in the step to come."""
        ...

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats, gain: Gain) -> None:
        """Learns what the step cost and gained; called once for every `choose` whose step
        did not fail, with the verdicts in the plan's order."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        ...


class FixedPlanner:
    """Always as many as there is room for, from the first of a sequence's drafters that has
    something to offer; learns nothing.

    Args:
        advisor: knows who has.
    """

    def __init__(self, advisor: Advisor | None = None) -> None:
        self._advisor = advisor or NoAdvice()

    def choose(self, plan: StepPlan) -> Assignment:
        """See `Planner.choose`."""
        drafters = [self._first(scheduled.sequence) for scheduled in plan.scheduled]
        return Assignment([scheduled.granted_drafts for scheduled in plan.scheduled], drafters)

    def _first(self, sequence: Sequence) -> str:
        names = sequence.drafters
        if len(names) == 1:
            return names[0]
        offers = (name for name in names if self._advisor.outlook(name, sequence) is not None)
        return next(offers, names[0])

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats, gain: Gain) -> None:
        """Learns nothing."""

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""


class ShieldedPlanner:
    """Keeps a fault in planning away from requests: a planner that raises is switched off for
    good, and from then on nobody drafts.

    Attributes:
        inner: the planner, or None once it has failed.
    """

    def __init__(self, planner: Planner) -> None:
        self.inner: Planner | None = planner

    def choose(self, plan: StepPlan) -> Assignment:
        """See `Planner.choose`."""
        return self._ask(lambda planner: planner.choose(plan)) or nobody(plan)

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats, gain: Gain) -> None:
        """See `Planner.observe`."""
        self._ask(lambda planner: planner.observe(plan, verdicts, stats, gain))

    def release(self, sequence: Sequence) -> None:
        """See `Planner.release`."""
        self._ask(lambda planner: planner.release(sequence))

    def _ask(self, question: Callable[[Planner], _Answer]) -> _Answer | None:
        if self.inner is not None:
            try:
                return question(self.inner)
            except Exception:
                logger.exception("the planner failed and is switched off; answers are unaffected")
                self.inner = None
        return None
