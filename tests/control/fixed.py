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
from tests.control.simulator import (
    PROMPT,
    STREAM,
    Machine,
    Text,
    Work,
    is_offered,
    is_right,
)


class Fixed(FixedPlanner):
    """As many as it is told, wherever there is room."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, plan: StepPlan) -> Assignment:
        lengths = [min(self.length, part.granted_drafts) for part in plan.scheduled]
        return Assignment(lengths, nobody(plan).drafters)


#: Draft lengths that a planner is compared with.
LENGTHS = (0, 1, 2, 3, 4, 6, 8)


@functools.cache
def path_of(length: int, text: Text, batch: int, tokens: int) -> list[Work]:
    """The steps of a fixed length, as `World` takes them, from numbers alone."""
    live: list[tuple[int, int]] = []  # (stream, position)
    work, streams, emitted = [], 0, 0
    while emitted < tokens:
        while len(live) < batch:
            live.append((streams, 1))
            streams += 1
        following, context, lengths, drafted, most = [], 0, [], 0, 0
        for stream, position in live:
            context += PROMPT + position
            draft = max(0, min(length, STREAM - position - 1))
            lengths.append(draft)
            accepted = 0
            if draft and is_offered(text, stream, position, 1):
                drafted += draft
                while accepted < draft and is_right(text, stream, position + accepted, 1):
                    accepted += 1
            emitted += accepted + 1
            most = max(most, accepted)
            if position + accepted + 1 < STREAM:
                following.append((stream, position + accepted + 1))
        asked = sum(1 for n in lengths if n)
        rows = len(live) + drafted
        work.append(Work(len(live), rows, context, asked, max(lengths), most + 1))
        live = following
    return work


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
