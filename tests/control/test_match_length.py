"""What a match is worth is learnt by its length and its source."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from engine.cache.pages import TARGET
from engine.control.adaptive import AdaptivePlanner
from engine.draft.drafter import Advisor, NoAdvice, Verdict
from engine.draft.lookup import STORED, LookupDrafter
from engine.draft.portfolio import DrafterPortfolio
from engine.draft.store import AnswerStore
from engine.meter.meter import Meter
from engine.sequence import Sequence
from tests.control.simulator import LAPTOP, planner_for
from tests.control.test_adaptive import decodes, make_sequence, make_stats

VOCAB = 12


class Blind(NoAdvice):
    """Tells the planner that there is something to offer, and keeps from it what that rests on."""

    def __init__(self, portfolio: DrafterPortfolio) -> None:
        self._portfolio = portfolio

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        return None if self._portfolio.outlook(name, sequence) is None else 0


def some(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(count)]


def written(dice: random.Random, length: int) -> list[int]:
    """Noise, in which two tokens repeat by chance alone, and long copies of one passage."""
    passage, text = some(dice, 200), []
    text += passage
    while len(text) < length:
        start = dice.randrange(140)
        text += some(dice, 40) + passage[start : start + 60]
    return text


def play(
    planner: AdaptivePlanner, portfolio: DrafterPortfolio, text: list[int]
) -> dict[int, float]:
    """Writes the text; returns mean draft lengths by what the drafter knew, late in the text."""
    sequence, meter = make_sequence(room=10**6), Meter(planner.costs)
    lengths: dict[int, list[int]] = defaultdict(list)
    at = 0
    while at < len(text) - 10:
        known = portfolio.outlook("lookup", sequence)
        plan = decodes(sequence)
        (length,) = planner.choose(plan).lengths
        draft = portfolio.propose([sequence], [length], ["lookup"]).tokens[0]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[at + accepted]:
            accepted += 1
        emitted = text[at : at + accepted + 1]
        if known is not None and at > len(text) // 2:
            lengths[known].append(length)
        at += len(emitted)
        sequence.append(emitted)
        sequence.table.num_cached[TARGET] = len(sequence.tokens) - 1
        stats = make_stats(0.02 * (1 + 0.15 * len(draft)), len(emitted))
        verdicts = [Verdict(emitted, len(draft), accepted)]
        planner.observe(plan, verdicts, stats, meter.observe(plan, verdicts, stats))
    return {bucket: sum(own) / len(own) for bucket, own in lengths.items() if len(own) >= 10}


def planned(advisor: Advisor) -> AdaptivePlanner:
    return planner_for(LAPTOP, advisor=advisor)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_longer_after_long_matches(seed: int) -> None:
    text = written(random.Random(seed), 8000)
    told, blind = (DrafterPortfolio({"lookup": LookupDrafter()}, VOCAB) for _ in range(2))
    knows = play(planned(told), told, text)
    guesses = play(planned(Blind(blind)), blind, text)
    assert knows[4] > 5
    assert knows[0] < 0.5
    assert knows[4] - knows[0] > 2 * abs(guesses[4] - guesses[0])


def test_stored_answers_are_judged_apart_from_the_own_text() -> None:
    """Own repeats are chance, stored ones are copies: each has the length it deserves."""
    dice = random.Random(5)
    store = AnswerStore(1 << 22)
    portfolio = DrafterPortfolio({"lookup": LookupDrafter(store=store)}, 10**6)
    text: list[int] = []
    for number in range(100):
        passage = [VOCAB + 50 * number + n for n in range(50)]  # occurs once in the text
        store.add("", (), passage)
        text += some(dice, 40) + passage
    found = play(planned(portfolio), portfolio, text)
    assert max(found[0], found[1]) < 0.5
    assert max(found[STORED + n] for n in range(5) if STORED + n in found) > 5
