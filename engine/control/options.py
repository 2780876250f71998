"""How a planner is told to plan, and why it leaves drafts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.draft.drafter import Advisor, NoAdvice


class Mode(Enum):
    """Who decides how far to speculate."""

    AUTO = "auto"  # the planner, from what it measured
    OFF = "off"  # nobody ever drafts
    FIXED = "fixed"  # always as many as there is room for


class OffReason(Enum):
    """Why a decoding sequence checked no draft token in a step."""

    SERVER = "off"  # speculation is switched off for the whole server
    REQUEST = "disabled_by_request"
    NO_DRAFTER = "no_drafter"
    LAST_TOKEN = "last_token"  # it may emit just one more
    NO_BUDGET = "no_budget"  # no pages or no room in the pass
    NO_PROPOSAL = "no_proposal"  # the drafter had nothing to offer
    NOT_WORTH_IT = "not_worth_it"
    GUARD = "guard"
    SHADOW = "shadow"  # left out at random, to measure a plain step


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How to plan.

    Attributes:
        depth: longest draft of any sequence.
        mode: server-wide.
        advisor: what drafters know before they draft.
        seed: of the lottery for shadow steps.
    """

    depth: int
    mode: Mode = Mode.AUTO
    advisor: Advisor = field(default_factory=NoAdvice)
    seed: int = 0
