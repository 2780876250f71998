"""Steps that read prompts stay within their bound even where the prices of passes are wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.cache.pages import TARGET
from engine.calibration import Calibration
from engine.control.costs import VerifyCost
from engine.load import loads_of
from engine.pace import Pace
from tests.desk import Desk
from tests.machine import Machine

TRUE = Machine()
PROMPT = 6500


def calibrated(believed: Machine) -> VerifyCost:
    """What would be calibrated on such a machine."""
    rows = [2**i for i in range(10)]
    curve = tuple((n, believed.seconds(n, 0, 0, 0)) for n in rows)
    prompt = tuple((n, believed.seconds(n, 0, 0, 0, n - 1)) for n in rows)
    terms = believed.sequence / 1e3, believed.read / 1e3, believed.pair / 1e3
    return VerifyCost(Calibration(curve, *terms, prompt=prompt), 512)


def watch(believed: Machine, *, stretch: float = 2.0, slower: float = 1.0) -> list[float]:
    """Steps while a prompt is read beside two streams: what each takes of its plain time. Halfway
    the machine becomes `slower`. All that learns from passes does."""
    dice, cost = random.Random(5), calibrated(believed)
    desk = Desk(num_pages=300, page_size=128, budget=512, most=64, stretch=stretch, cost=cost)
    for _ in range(2):
        desk.add(20, max_tokens=9000)
    ratios: list[float] = []

    def step() -> float:
        plan = desk.scheduler.plan()
        decode, whole = loads_of(plan)
        factor = (slower if prompt and prompt.table.num_cached[TARGET] > PROMPT // 2 else 1.0) * (
            dice.lognormvariate(0.0, 0.1)
        )
        took, plain = (
            factor * TRUE.seconds(x.rows, x.sequences, x.context, x.attention, x.silent)
            for x in (whole, decode)
        )
        desk.finish(plan)
        desk.scheduler.observe(0, took)
        cost.update(whole, took)
        return took / plain

    prompt = None
    for _ in range(30):
        step()
    [prompt] = desk.add(PROMPT)
    while not prompt.num_generated:
        ratios.append(step())
    return sorted(ratios)


WRONG = {
    "right": TRUE,
    "attention costs nothing": replace(TRUE, pair=0.0, read=0.0),
    "attention costs four times as much": replace(TRUE, pair=4 * TRUE.pair, read=4 * TRUE.read),
    "tokens of prompts cost a third": replace(TRUE, row=TRUE.row / 3),
    "prompts cost next to nothing": replace(TRUE, row=TRUE.row / 6, pair=0.0, read=0.0),
    "passes cost twice as much": Machine(*(2 * term for term in (6, 0.3, 0.1, 0.05, 5e-4, 5e-4))),
}


@pytest.mark.parametrize("prices", WRONG)
def test_the_bound_holds_whatever_prices_say(prices: str) -> None:
    """What is allowed is also used, but for what is less than a token, which in the end takes half
    a plain step: a prompt is not held up for a price that is too high."""
    ratios = watch(WRONG[prices])
    assert ratios[int(0.95 * len(ratios))] <= 2.5
    assert ratios[len(ratios) // 2] > 1.35


def test_without_a_look_at_passes_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "observe", lambda *_: None)
    ratios = watch(WRONG["attention costs nothing"])
    assert ratios[int(0.95 * len(ratios))] > 3


def test_a_machine_that_slows_down_is_no_prompt_that_costs_more() -> None:
    steady, slowed = watch(TRUE), watch(TRUE, slower=3.0)
    assert len(slowed) < 1.25 * len(steady)
    assert slowed[int(0.95 * len(slowed))] <= 2.5


def test_one_step_in_a_while_reads_no_prompt_and_tells_what_a_plain_step_takes() -> None:
    desk = Desk(num_pages=300, page_size=128, budget=512, most=64, cost=TRUE)
    desk.add(20, max_tokens=9000)
    desk.step()
    [prompt] = desk.add(PROMPT)
    fed = []
    for _ in range(68):
        plan = desk.step()
        fed.append(any(part.sequence is prompt for part in plan.scheduled))
        desk.scheduler.observe(0, 0.02)
    assert [i for i, read in enumerate(fed) if not read] == [16, 33, 50, 67]


def test_without_prices_or_a_bound_nothing_is_learnt() -> None:
    for cost, stretch in ((None, 2.0), (TRUE, 0.0)):
        desk = Desk(num_pages=300, page_size=128, budget=512, cost=cost, stretch=stretch)
        desk.add(20, max_tokens=100)
        for _ in range(3):
            desk.step()
            desk.scheduler.observe(0, 5.0)
        desk.add(PROMPT)
        for _ in range(5):
            desk.step()
            desk.scheduler.observe(0, 50.0)
        assert desk.scheduler.pace.factor == 1.0


def test_a_single_pass_that_takes_for_ever_changes_little() -> None:
    pace, plain, whole = Pace(TRUE), (2, 2, 100, 100, 0), (20, 3, 120, 460, 17)
    for _ in range(20):
        for load in (plain, whole):
            pace.observe(plain, load, TRUE.seconds(*load))
    assert pace.factor == pytest.approx(1.0, rel=0.01)
    pace.observe(plain, whole, 1000.0)
    assert 1.0 < pace.factor < 1.5
    pace.observe(plain, plain, 1000.0)
    pace.observe(plain, whole, TRUE.seconds(*whole))
    assert pace.factor < 1.5
