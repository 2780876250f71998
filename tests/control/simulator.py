"""Machines and texts made of numbers, and a loop that drives a real planner through them.

The clock is virtual and all randomness a function of a seed, so a run is deterministic. What a
drafter would get right is a property of the text (of stream and position), not of the planner:
every planner faces the same text.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from engine.cache.pages import TARGET, PageTable
from engine.calibration import Calibration
from engine.control.adaptive import AdaptivePlanner
from engine.control.costs import CostModel
from engine.control.planner import Assignment, Mode, Planner
from engine.draft.drafter import Verdict
from engine.meter.gain import Gain
from engine.meter.meter import Meter
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence, Status
from engine.stats import StepStats
from engine.sweep import calibrate
from engine.types import Request, SamplingParams

PROMPT = 64

#: Tokens of a stream, if a world does not say otherwise.
STREAM = 400

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does, on whatever machine.

    Attributes:
        sequences: in the pass.
        rows: query tokens of the pass, drafts included.
        context: cached tokens that it reads.
        asked: sequences that draft.
        rounds: longest draft.
        depth: most tokens that one sequence emits.
    """

    sequences: int
    rows: int
    context: int
    asked: int
    rounds: int
    depth: int


@dataclass(frozen=True)
class Machine:
    """Seconds of everything a step does.

    Attributes:
        curve: of the pass by query tokens.
        context: per cached token read.
        sequence: per sequence in the pass.
        draft: (per call, per sequence, per round); with rounds it is a model that drafts.
        overhead: (per step, per row of logits).
        noise: relative standard deviation of a pass.
        pauses: probability of a pass that takes twenty times as long.
    """

    curve: Callable[[int], float]
    context: float = 0.0
    sequence: float = 0.0
    draft: tuple[float, float, float] = (2e-5, 1e-5, 0.0)
    overhead: tuple[float, float] = (3e-4, 2e-5)
    noise: float = 0.02
    pauses: float = 0.0

    @property
    def drafter(self) -> str:
        return "model" if self.draft[2] else "lookup"

    def pass_seconds(self, rows: int, sequences: int, context: int) -> float:
        return self.curve(rows) + self.sequence * sequences + self.context * context

    def seconds(self, work: Work, slowness: float = 1.0) -> tuple[float, float, float]:
        """Of drafting, the pass (which alone is slowed down), and the rest of a step."""
        call, each, per_round = self.draft
        draft = call + each * work.asked + per_round * work.rounds if work.asked else 0.0
        verify = self.pass_seconds(work.rows, work.sequences, work.context) * slowness
        rest = self.overhead[0] + self.overhead[1] * work.rows + 2e-5 * work.depth
        return draft, verify, rest

    def slowness(self, chance: random.Random) -> float:
        """Of the next pass, by noise and pauses."""
        noise = math.exp(chance.gauss(0.0, self.noise))
        return noise * 20.0 if chance.random() < self.pauses else noise

    def calibrate(self, most_rows: int = 512) -> Calibration:
        def measure(rows: int, sequences: int, context: int, _: int) -> float:
            return self.pass_seconds(rows, sequences, sequences * context)

        return calibrate(
            measure,
            most_rows=most_rows, most_sequences=64, long_context=1024, seconds=1e9,
        )  # fmt: skip

    def calibrate_drafts(self) -> dict[str, Calibration]:
        if self.drafter != "model":
            return {}
        # What a round takes besides its pass is left to be learnt.
        return {"model": Calibration(((1, 0.9 * self.draft[2]),), 0.0, 0.0, 0.0)}


def _h200(rows: int) -> float:
    """An 8B model in bfloat16: weights in 3.4 ms, compute-bound near 200, tiles of 64 rows."""
    tiles = 64 * math.ceil(rows / 64)
    return 2e-4 + max(3.4e-3, 3.4e-3 * tiles / 206)


def _a10(rows: int) -> float:
    """A 1.7B model in bfloat16: weights in 6 ms, knee near 96, shapes captured at powers of 2."""
    captured = 1 << (rows - 1).bit_length() if rows <= 64 else 32 * math.ceil(rows / 32)
    return 5e-4 + max(6e-3, 6e-3 * captured / 96)


def _laptop(rows: int) -> float:
    """A 135M model in float32 on two cores: every query token costs."""
    return 13e-3 * (1 + 0.22 * (rows - 1)) if rows < 5 else 13e-3 * (1.0 + 0.17 * rows)


H200 = Machine(_h200, context=3e-8, overhead=(8e-4, 1e-5))
A10 = Machine(_a10, context=1e-7, overhead=(8e-4, 1e-5))
LAPTOP = Machine(_laptop, context=1.2e-6, sequence=1e-4)
MACHINES = {"h200": H200, "a10": A10, "laptop": LAPTOP}

#: The same machines with a draft model of a tenth to a fifth of the target: rounds cost, and all
#: sequences that draft share them.
WITH_DRAFT_MODEL = {
    "h200, draft model": replace(H200, draft=(2e-4, 1e-5, 5e-4)),
    "a10, draft model": replace(A10, draft=(3e-4, 1e-5, 1e-3)),
    "laptop, draft model": replace(LAPTOP, draft=(3e-4, 6e-5, 2.5e-3)),
}

#: (stream, position) -> (probability that a draft token there is right, that one is offered).
Text = Callable[[int, int], tuple[float, float]]


def constant(acceptance: float, offered: float = 1.0) -> Text:
    return lambda stream, position: (acceptance, offered)  # noqa: ARG005


def switching(before: float, after: float, at: int) -> Text:
    """Code up to a position, prose from there on."""
    return lambda stream, position: (before if position < at else after, 1.0)  # noqa: ARG005


def bursty(stream: int, position: int) -> tuple[float, float]:
    """Stretches of about sixty tokens of copied text, between stretches of new text."""
    copied = _uniform(stream, position // 60, 7) < 0.5
    return (0.92, 0.95) if copied else (0.1, 0.3)


def mixed(stream: int, position: int) -> tuple[float, float]:  # noqa: ARG001
    """Every stream has its own acceptance."""
    return ((0.9, 0.7, 0.4, 0.1)[stream % 4], 1.0)


def _uniform(*key: int) -> float:
    """A number in [0, 1) that only the key decides (the mixing steps of splitmix64)."""
    mixed = 0
    for part in key:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed / 2.0**64


@functools.lru_cache(maxsize=1 << 17)  # every planner faces the same text
def is_right(text: Text, stream: int, position: int, seed: int) -> bool:
    """Whether a draft token is what the text goes on with."""
    return _uniform(stream, position, 2, seed) < text(stream, position)[0]


@functools.lru_cache(maxsize=1 << 17)
def is_offered(text: Text, stream: int, position: int, seed: int) -> bool:
    """Whether the drafter has something to say."""
    return _uniform(stream, position, 1, seed) < text(stream, position)[1]


@dataclass
class Log:
    """What happened in a run."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    lengths: list[float] = field(default_factory=list)  # mean draft length by step
    positions: list[int] = field(default_factory=list)  # of the first stream, by step
    work: list[Work] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    meter: Meter = field(default_factory=lambda: Meter(CostModel()))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class World:
    """A closed loop: `batch` streams decode; whoever is done makes room for a new one."""

    def __init__(self, machine: Machine, text: Text, batch: int, seed: int = 1) -> None:
        self.machine = machine
        self.text = text
        self.batch = batch
        self.seed = seed
        self.length = STREAM  # tokens of a stream
        self.max_draft = 8
        self.prefill_every = 0  # steps between prefill chunks of 64 tokens, 0 = none
        self.planning = (0.0, 0.0)  # seconds of choosing and observing in every step
        self.scale = lambda step: 1.0  # noqa: ARG005  (the machine's slowness, by step)
        self._random = random.Random(seed)
        self._streams = 0
        self._live: list[tuple[int, Sequence]] = []

    def run(self, planner: Planner, tokens: int) -> Log:
        """Decodes that many tokens."""
        costs = planner.costs if isinstance(planner, AdaptivePlanner) else CostModel()
        log = Log(meter=Meter(costs))
        while log.tokens < tokens:
            while len(self._live) < self.batch:
                self._live.append((self._streams, self._new_sequence()))
                self._streams += 1
            self._step(planner, log)
        return log

    def _new_sequence(self) -> Sequence:
        name = f"stream-{self._streams}"
        request = Request(name, (1,) * PROMPT, SamplingParams(max_tokens=self.length))
        sequence = Sequence(
            request, 0, self._streams, 0, PageTable(""), self.machine.drafter, self.max_draft,
            PROMPT + self.length,
        )  # fmt: skip
        sequence.append([0])
        sequence.table.num_cached[TARGET] = PROMPT
        return sequence

    def _step(self, planner: Planner, log: Log) -> None:
        live = self._live
        parts = [
            ScheduledSequence(s, 1, True, min(self.max_draft, max(0, s.room - 1))) for _, s in live
        ]
        if self.prefill_every and log.steps % self.prefill_every == 0:
            prompt = Sequence(Request("prompt", (1,) * 64), 0, 0, 0, PageTable(""), "none", 0, 80)
            parts.append(ScheduledSequence(prompt, 64, False))
        plan = StepPlan(tuple(parts), 0, 0, 0)
        assignment = planner.choose(plan)
        lengths = assignment.lengths
        assert all(0 <= n <= part.granted_drafts for n, part in zip(lengths, parts, strict=True))
        verdicts = [
            self._judge(i, s, n, name)
            for (i, s), n, name in zip(live, lengths, assignment.drafters, strict=False)
        ] + [Verdict([], 0, 0)] * (len(parts) - len(live))
        stats = self._stats(plan, assignment, verdicts, log)
        log.lengths.append(sum(lengths) / len(live))
        log.positions.append(len(live[0][1].tokens) - PROMPT)
        for (_, sequence), verdict in zip(live, verdicts, strict=False):
            sequence.append(verdict.emitted)
            sequence.table.num_cached[TARGET] = len(sequence.tokens) - 1
            if sequence.room <= 0:  # the engine releases before it lets the planner observe
                sequence.status = Status.FINISHED
                planner.release(sequence)
        gain = log.meter.observe(plan, verdicts, stats)
        planner.observe(plan, verdicts, stats, gain)
        log.gains.append(gain)
        self._live = [(i, s) for i, s in live if s.status is not Status.FINISHED]
        log.seconds += stats.seconds
        log.tokens += stats.emitted_tokens
        log.steps += 1

    def _judge(self, stream: int, sequence: Sequence, length: int, drafter: str) -> Verdict:  # noqa: ARG002
        position = len(sequence.tokens) - PROMPT
        if not length or not is_offered(self.text, stream, position, self.seed):
            return Verdict([0], 0, 0)
        accepted = 0
        while accepted < length and is_right(self.text, stream, position + accepted, self.seed):
            accepted += 1
        return Verdict([0] * (accepted + 1), length, accepted)

    def _stats(
        self, plan: StepPlan, assignment: Assignment, verdicts: Seq[Verdict], log: Log
    ) -> StepStats:
        work = Work(
            sequences=len(plan.scheduled),
            rows=sum(part.num_feed for part in plan.scheduled) + sum(v.drafted for v in verdicts),
            context=sum(s.sequence.table.num_cached[TARGET] + s.num_feed for s in plan.scheduled),
            asked=sum(1 for n in assignment.lengths if n),
            rounds=max(assignment.lengths),
            depth=max(v.accepted for v in verdicts) + 1,
        )
        log.work.append(work)
        slowness = self.machine.slowness(self._random) * self.scale(log.steps)
        draft, verify, sample = self.machine.seconds(work, slowness)
        return StepStats(
            seconds=draft + verify + sample + sum(self.planning),
            draft_seconds=draft, verify_seconds=verify,
            sample_seconds=sample, plan_seconds=self.planning[0],
            choose_seconds=self.planning[0], learn_seconds=self.planning[1],
            running=len(plan.scheduled), waiting=0, prefill_tokens=plan.prefill_tokens,
            decode_sequences=sum(bool(v.emitted) for v in verdicts),
            emitted_tokens=sum(len(v.emitted) for v in verdicts),
            drafted_by_position=(), accepted_by_position=(), pages_used=0, pages_total=1,
            preemptions=0, prefix_query_tokens=0, prefix_hit_tokens=0,
        )  # fmt: skip


def planner_for(
    machine: Machine, mode: Mode = Mode.AUTO, calibrated: bool = True, **options: Any
) -> AdaptivePlanner:
    """The real planner, with the costs of a machine."""
    costs = CostModel(
        machine.calibrate() if calibrated else None,
        512,
        machine.calibrate_drafts() if calibrated else {},
    )
    return AdaptivePlanner(8, costs, mode, **options)
