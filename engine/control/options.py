"""How a planner is told to plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from engine.control.calibration import Calibration
from engine.draft.drafter import Advisor, NoAdvice


class Mode(Enum):
    """Who decides how far to speculate."""

    AUTO = "auto"  # the planner, from what it measured
    OFF = "off"  # nobody ever drafts
    FIXED = "fixed"  # always as many as there is room for


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How to plan.

    Attributes:
        depth: longest draft of any sequence.
        most_rows: most query tokens of a pass.
        mode: server-wide.
        calibration: of this machine; None = learn from scratch.
        draft_calibrations: the same for the models of drafters that run one, by drafter.
        advisor: what drafters know before they draft.
        seed: of the lottery for shadow steps.
        clock: monotonic seconds.
    """

    depth: int
    most_rows: int = 4096
    mode: Mode = Mode.AUTO
    calibration: Calibration | None = None
    draft_calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    advisor: Advisor = field(default_factory=NoAdvice)
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter
