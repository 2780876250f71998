"""Fixed draft lengths on simulated machines: what a planner is compared with in hindsight.

Who always drafts as many takes the same steps on every machine, since no clock decides anything.
So each path is walked once, and timed for every machine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence as Seq

from engine.control.planner import Assignment, FixedPlanner, nobody
from engine.scheduler import StepPlan
from tests.control.simulator import LAPTOP, Machine, Text, Work, World


class Fixed(FixedPlanner):
    """As many as it is told, wherever there is room."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, plan: StepPlan) -> Assignment:
        lengths = [min(self.length, part.max_draft) for part in plan.scheduled]
        return Assignment(lengths, nobody(plan).drafters)


#: Draft lengths that a planner is compared with.
LENGTHS = (0, 1, 2, 3, 4, 6, 8)


@functools.cache
def path_of(length: int, text: Text, batch: int, tokens: int) -> list[Work]:
    """The steps of a fixed length; no clock decides anything in them."""
    return World(LAPTOP, text, batch).run(Fixed(length), tokens).work


def seconds_of_fixed(
    machine: Machine, text: Text, batch: int, tokens: int, lengths: Seq[int] = LENGTHS
) -> dict[int, float]:
    """What `World(machine, text, batch).run(Fixed(length), tokens)` takes, by length."""
    found = {}
    for length in lengths:
        chance = random.Random(1)
        steps = path_of(length, text, batch, tokens)
        found[length] = sum(sum(machine.seconds(w, machine.slowness(chance))) for w in steps)
    return found
