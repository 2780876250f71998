"""Clients that ask again once they are answered, on virtual time: what speculation does to whole
answers, the wait for their first token included.

Rows are dear on this machine: a pass takes 13 ms with one, 23 ms with four, and 3 ms for each token
of a prompt. Longer steps delay whoever waits for a first token, so with answers of a few tokens
what is won by drafting could be lost there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from engine.cache.pages import TARGET
from engine.calibration import Calibration
from engine.control.adaptive import AdaptivePlanner
from engine.control.costs import CostModel
from engine.control.planner import Mode
from engine.draft.drafter import Verdict
from engine.load import loads_of
from engine.meter.gain import Gain
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from tests.control.simulator import _uniform as uniform
from tests.control.test_adaptive import make_stats
from tests.desk import Desk
from tests.machine import Machine

DEAR = Machine(base=10.0, row=2.6, head=0.5, sequence=0.1, read=0.001, pair=0.0005)
MOST_ROWS = 513

#: A client reads its answer and asks again while the next step runs already.
THINKING = 2e-3


def calibrated(machine: Machine) -> Calibration:
    """What timing that machine's passes finds."""

    def curve(heads: int) -> tuple[tuple[int, float], ...]:
        priced = ((rows, machine.base + machine.row * rows) for rows in (1, MOST_ROWS))
        return tuple((n, 1e-3 * (t + machine.head * min(n, heads))) for n, t in priced)

    terms = (1e-3 * price for price in (machine.sequence, machine.read, machine.pair))
    return Calibration(curve(MOST_ROWS), *terms, prompt=curve(1))


@dataclass
class Clients:
    """Four of them, until so many answers were asked for and given.

    Attributes:
        acceptance: of each draft token.
        answers: shortest and longest, in tokens.
    """

    mode: Mode
    acceptance: float
    answers: tuple[int, int]
    count: int = 60
    now: float = 0.0
    first_token_seconds: float = 0.0  # of all answers together
    tokens: int = 0
    _asked: dict[Sequence, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        costs = CostModel(calibrated(DEAR), MOST_ROWS)
        self.planner = AdaptivePlanner(8, costs, self.mode)
        self.desk = Desk(
            num_pages=500, page_size=16, budget=512, most=8, stretch=2.0, cost=costs.target
        )
        self._due = [3e-3 * number for number in range(4)]
        self._dice = random.Random(1)
        self._left = self.count

    @property
    def rate(self) -> float:
        """Tokens a second of whole answers."""
        return self.tokens / self.now

    def run(self) -> Clients:
        """Until all are answered."""
        scheduler = self.desk.scheduler
        while self._left or scheduler.running or scheduler.waiting:
            if not scheduler.running and not scheduler.waiting:
                self.now = max(self.now, min(self._due))
            self._ask()
            self._step(scheduler.plan())
        return self

    def _ask(self) -> None:
        for at in [at for at in self._due if at <= self.now][: self._left]:
            self._due.remove(at)
            self._left -= 1
            prompt, answer = self._dice.randint(10, 40), self._dice.randint(*self.answers)
            [sequence] = self.desk.add(prompt, max_tokens=answer, max_draft=8)
            self._asked[sequence] = at

    def _step(self, plan: StepPlan) -> None:
        lengths = self.planner.choose(plan).lengths
        verdicts = []
        for part, length in zip(plan.scheduled, lengths, strict=True):
            key, accepted = (part.sequence.ticket, part.sequence.num_generated), 0
            while accepted < length and uniform(key[0], key[1] + accepted, 2) < self.acceptance:
                accepted += 1
            verdicts.append(Verdict([7] * (accepted + 1) if part.samples else [], length, accepted))
        load = loads_of(plan)[1].with_drafts(plan, lengths)
        verify = DEAR.seconds(load.rows, load.sequences, load.context, load.attention, load.silent)
        drafting, rest = 3e-5 * any(lengths), 5e-4 + 2e-5 * load.batch
        self.now += verify + drafting + rest
        self._commit(plan, verdicts)
        emitted = sum(len(verdict.emitted) for verdict in verdicts)
        stats = replace(
            make_stats(verify + drafting + rest, emitted),
            draft_seconds=drafting,
            verify_seconds=verify,
        )
        self.planner.observe(plan, verdicts, stats, Gain())
        for sequence in [s for s in plan.sequences if s.room <= 0]:
            self.desk.scheduler.remove(sequence)
            self.planner.release(sequence)
            self._due.append(self.now + THINKING)

    def _commit(self, plan: StepPlan, verdicts: list[Verdict]) -> None:
        for part, verdict in zip(plan.scheduled, verdicts, strict=True):
            sequence, table = part.sequence, part.sequence.table
            table.num_cached[TARGET] += part.num_feed
            if part.samples:
                if not sequence.num_generated:
                    self.first_token_seconds += self.now - self._asked[sequence]
                sequence.append(verdict.emitted)
                sequence.last_draft = verdict.drafted
                table.num_cached[TARGET] = len(sequence.tokens) - 1
                self.tokens += len(verdict.emitted)
            self.desk.pool.commit(table, sequence.tokens)
            self.desk.pool.truncate(table, len(sequence.tokens))


@pytest.mark.parametrize(
    ("acceptance", "answers", "least"),
    [(0.3, (4, 12), 0.97), (0.5, (4, 12), 1.0), (0.5, (16, 48), 0.97), (0.7, (16, 48), 1.04)],
)
def test_whole_answers_come_no_slower_than_without_speculation(
    acceptance: float, answers: tuple[int, int], least: float
) -> None:
    """Where drafts hardly pay, one per cent is for looking again, and one for chance: who shares a
    step with whom differs from then on, which moves the rate of so short a run by that much."""
    count = 150 if answers[0] == 4 else 80
    off, auto = (Clients(mode, acceptance, answers, count).run() for mode in (Mode.OFF, Mode.AUTO))
    assert off.tokens == auto.tokens
    assert auto.rate > least * off.rate
    assert auto.first_token_seconds < 1.1 * off.first_token_seconds
