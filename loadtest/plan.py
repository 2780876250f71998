"""The nouns of a run, and the order in which its blocks are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Request indices reserved for each round when only time bounds it.
UNBOUNDED = 1_000_000


class UsageError(Exception):
    """The run cannot start as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one conversation asks.

    Args:
        turns: the user's messages, at least one; each is sent after the answer to the last.
        category: label for the report; may be empty.
        max_tokens: limit for each answer; None = the run's.
        prediction: text the answer will largely repeat, for Predicted Outputs.
    """

    turns: tuple[str, ...]
    category: str = ""
    max_tokens: int | None = None
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """One server under test.

    Args:
        name: label in every table.
        url: base address without `/v1`.
        model: model id to send; empty until asked from the server.
        continuous_usage: whether the server takes `stream_options.continuous_usage_stats`.
    """

    name: str
    url: str
    model: str = ""
    continuous_usage: bool = True


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of asking: `body` is merged into every request of the arm.

    With `prediction`, a prompt that knows a likely answer sends it (Predicted Outputs).
    """

    name: str
    body: Mapping[str, object] = field(default_factory=dict)
    prediction: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of the comparison: a target asked by way of an arm. The first is the baseline."""

    name: str
    target: Target
    arm: Arm


@dataclass(frozen=True, slots=True)
class Level:
    """How hard to push: requests always in flight (closed loop) or arrivals a second (open)."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}" + ("/s" if self.kind == "rate" else "")


@dataclass(frozen=True, slots=True)
class Block:
    """The unit that runs alone: one lane, one level, one round.

    All lanes of a round get the same `indices`, hence the same prompts, seeds and limits.
    """

    level: Level
    round: int
    lane: Lane
    indices: range

    def __str__(self) -> str:
        return f"{self.level}, round {self.round + 1}, {self.lane.name}"


def make_lanes(targets: Sequence[Target], arms: Sequence[Arm]) -> list[Lane]:
    """Every target with every arm; names are as short as stays unambiguous."""
    if len(arms) == 1:
        return [Lane(target.name, target, arms[0]) for target in targets]
    if len(targets) == 1:
        return [Lane(arm.name, targets[0], arm) for arm in arms]
    return [Lane(f"{t.name}/{a.name}", t, a) for t in targets for a in arms]


def lay_out(level: Level, lanes: Sequence[Lane], rounds: int, requests: int | None) -> list[Block]:
    """The blocks of one level, in order.

    Lanes alternate, forwards in even rounds and backwards in odd ones (ABBA): a machine that
    slowly warms up, throttles or fills its cache then favours no lane.

    Args:
        requests: requests for each lane over all rounds; None = only time bounds them.

    Raises:
        UsageError: a round would have fewer requests than are to be in flight.
    """
    share = UNBOUNDED if requests is None else requests // rounds
    if (level.kind == "concurrency" and share < level.value) or share < 1:
        raise UsageError(
            f"--requests {requests} over {rounds} rounds is {share} a round, which never reaches "
            f"{level}. Ask for at least {max(1, int(level.value)) * rounds} requests."
        )
    blocks = []
    for number in range(rounds):
        first = number * share
        last = first + share if requests is None or number < rounds - 1 else requests
        ordered = lanes if number % 2 == 0 else list(reversed(lanes))
        blocks += [Block(level, number, lane, range(first, last)) for lane in ordered]
    return blocks
