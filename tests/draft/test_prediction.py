"""Predicted outputs: followed while they hold, found again after an edit, and never believed."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.draft.lookup import LookupDrafter
from engine.draft.prediction import PredictionCursor
from engine.types import Request, SpeculationParams
from tests.fakes import Run, ask, make_engine, run

PROMPT = (5, 9, 3, 7)
COUNT = 48


def predicted(request: Request, prediction: tuple[int, ...]) -> Request:
    return dataclasses.replace(request, speculation=SpeculationParams(prediction=prediction))


def answer(prediction: tuple[int, ...] = (), *, max_draft: int = 4, **sampling: object) -> Run:
    built = make_engine(drafter=LookupDrafter(), max_draft=max_draft)
    request = ask("r", PROMPT, COUNT, ignore_eos=True, **sampling)
    return run(built, [predicted(request, prediction)], check=True)


def test_it_starts_at_the_beginning_and_moves_along():
    cursor = PredictionCursor([1, 2, 3, 4, 5])
    assert cursor.draft(2) == [1, 2]
    cursor.follow([1, 2])
    assert cursor.draft(9) == [3, 4, 5]
    cursor.follow([3, 4, 5])
    assert cursor.draft(9) == []


@pytest.mark.parametrize(
    ("said", "goes_on"),
    [
        ([1, 2, 9, 4, 5, 6], [7, 8]),  # one token replaced
        ([1, 2, 4, 5, 6], [7, 8]),  # one left out
        ([1, 2, 9, 9, 9, 3, 4, 5], [6, 7, 8]),  # three put in
        ([9, 9, 9], []),  # lost
    ],
)
def test_it_finds_its_place_after_an_edit(said, goes_on):
    cursor = PredictionCursor([1, 2, 3, 4, 5, 6, 7, 8])
    cursor.follow(said)
    assert cursor.draft(9) == goes_on


def test_of_several_places_the_nearest_ahead_is_taken():
    text = [1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3, 30]
    cursor = PredictionCursor(text)
    cursor.follow([1, 2, 3, 10, 99, 1, 2, 3])
    assert cursor.draft(1) == [20]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"]
)
def test_no_prediction_changes_the_answer(sampling):
    truth = answer(**sampling).answers["r"].tokens
    dice = random.Random(0)
    wrong = tuple(dice.randrange(97) for _ in range(300))
    edited = (*truth[:20], 1, 1, *truth[22:])
    for prediction in (truth, truth[:7], wrong, edited, truth * 20, (2,) * 50):
        assert answer(prediction, **sampling).answers["r"].tokens == truth


@pytest.mark.parametrize("max_draft", [1, 4, 7])
def test_an_exact_prediction_costs_one_pass_per_draft(max_draft):
    truth = answer(temperature=0.0).answers["r"].tokens
    stats = answer(truth, max_draft=max_draft, temperature=0.0).answers["r"].choices[0].end.stats
    assert stats.target_passes == 1 + -(-(COUNT - 1) // (max_draft + 1))
    assert stats.rejected_prediction_tokens == 0
    assert stats.accepted_prediction_tokens == stats.accepted_tokens


def test_a_wrong_prediction_is_counted_as_rejected():
    truth = answer(temperature=0.0).answers["r"].tokens
    # Right at first, since no draft is checked before the first token is out.
    wrong = (truth[0], *[(truth[1] + 1) % 97] * 40)
    stats = answer(wrong, temperature=0.0).answers["r"].choices[0].end.stats
    assert stats.accepted_prediction_tokens == 0
    assert stats.rejected_prediction_tokens > 0
