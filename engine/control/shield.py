"""Keeps a fault in planning away from requests: no answer may depend on a planner."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from engine.control.planner import Planner
from engine.control.speedup import Gain
from engine.draft.drafter import Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from engine.types import StepStats

logger = logging.getLogger(__name__)


class ShieldedPlanner:
    """A planner that raises is switched off for good; from then on nobody drafts.

    Attributes:
        inner: the planner, or None once it has failed.
    """

    def __init__(self, planner: Planner) -> None:
        self.inner: Planner | None = planner

    def choose(self, plan: StepPlan) -> list[int]:
        """See `Planner.choose`."""
        with self._switched_off_if_it_raises() as planner:
            if planner is not None:
                return planner.choose(plan)
        return [0] * len(plan.scheduled)

    def observe(self, plan: StepPlan, verdicts: Seq[Verdict], stats: StepStats) -> Gain:
        """See `Planner.observe`."""
        with self._switched_off_if_it_raises() as planner:
            if planner is not None:
                return planner.observe(plan, verdicts, stats)
        return Gain()

    def release(self, sequence: Sequence) -> None:
        """See `Planner.release`."""
        with self._switched_off_if_it_raises() as planner:
            if planner is not None:
                planner.release(sequence)

    @contextlib.contextmanager
    def _switched_off_if_it_raises(self) -> Iterator[Planner | None]:
        try:
            yield self.inner
        except Exception:
            logger.exception("the planner failed and is switched off; answers are unaffected")
            self.inner = None
