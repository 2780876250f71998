"""Acceptance estimates: censoring, shrinkage, change, memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine.control.outcomes import Outcomes

from engine.cache.pages import PageTable
from engine.control.acceptance import AcceptanceModel
from engine.sequence import Sequence
from engine.types import Request


def make_sequence(number: int = 0) -> Sequence:
    return Sequence(Request(f"r{number}", (1,)), 0, number, 0, PageTable(""), "lookup", 8, 100)


def play(
    model: AcceptanceModel, slot: int, draft: int, accepted: int, bucket: int = 0, cut: bool = False
) -> None:
    """One draft: judged, `accepted` kept, the next one refused unless cut off."""
    model.settle()
    estimate, _ = model.estimate(np.array([slot]), np.array([bucket]))
    refused = accepted < draft and not cut
    model.note(
        Outcomes([slot], [bucket], [float(estimate[0, 0])], [draft], [draft], [accepted], [refused])
    )


def acceptance(model: AcceptanceModel, slot: int, bucket: int = 0) -> list[float]:
    model.settle()
    estimate, _ = model.estimate(np.array([slot]), np.array([bucket]))
    return [float(p) for p in estimate[0]]


def test_censored_depths_do_not_bias_the_estimate() -> None:
    """Every depth is accepted with probability 0.7, but deep ones are rarely judged at all."""
    model = AcceptanceModel(4)
    slot = model.slot(make_sequence(), "lookup")
    rng = random.Random(1)
    sums = np.zeros(4)
    for step in range(3000):
        accepted = 0
        while accepted < 4 and rng.random() < 0.7:
            accepted += 1
        play(model, slot, 4, accepted)
        if step >= 1000:
            sums += acceptance(model, slot)
    assert sums / 2000 == pytest.approx([0.7] * 4, abs=0.05)


def test_a_draft_cut_by_the_end_of_the_text_refuses_nothing() -> None:
    model = AcceptanceModel(4)
    slot = model.slot(make_sequence(), "lookup")
    for _ in range(100):
        play(model, slot, 4, 2, cut=True)
    assert min(acceptance(model, slot)[:2]) > 0.9
    assert acceptance(model, slot)[2] > 0.5  # unjudged: what is assumed, and the good company


def test_depths_are_told_apart() -> None:
    model = AcceptanceModel(3)
    slot = model.slot(make_sequence(), "lookup")
    rng = random.Random(2)
    for _ in range(600):
        play(model, slot, 3, int(rng.random() < 0.9))  # depth 2 is always refused
    first, second, _ = acceptance(model, slot)
    assert first == pytest.approx(0.9, abs=0.1)
    assert second < 0.15


def test_a_new_sequence_starts_at_the_mean_of_the_others() -> None:
    model = AcceptanceModel(4)
    for number in range(30):
        slot = model.slot(make_sequence(number), "lookup")
        for _ in range(8):
            play(model, slot, 4, 0)
    assert acceptance(model, model.slot(make_sequence(99), "lookup"))[0] < 0.1
    assert acceptance(model, model.slot(make_sequence(100), "other"))[0] > 0.5


def test_one_long_request_does_not_own_the_mean() -> None:
    model = AcceptanceModel(4)
    for number in range(20):
        slot = model.slot(make_sequence(number), "lookup")
        for _ in range(8):
            play(model, slot, 4, 4)
    outlier = model.slot(make_sequence(50), "lookup")
    for _ in range(500):
        play(model, outlier, 4, 0)
    assert acceptance(model, outlier)[0] < 0.1
    assert acceptance(model, model.slot(make_sequence(99), "lookup"))[0] > 0.7


def test_unlike_sequences_are_told_apart_and_alike_ones_are_not() -> None:
    def spread(odds: list[float]) -> float:
        model, rng = AcceptanceModel(1), random.Random(3)
        slots = [model.slot(make_sequence(n), "lookup") for n in range(len(odds))]
        for _ in range(150):
            for slot, p in zip(slots, odds, strict=True):
                play(model, slot, 1, int(rng.random() < p))
        return float(np.std([acceptance(model, slot)[0] for slot in slots]))

    assert spread([0.2, 0.9] * 8) > 0.25
    # Their own counts alone would scatter by sqrt(0.25 / 33), about 0.09.
    assert spread([0.5] * 16) < 0.05


def test_an_abrupt_change_is_followed_within_twenty_drafts() -> None:
    model = AcceptanceModel(4)
    slot = model.slot(make_sequence(), "lookup")
    for _ in range(200):
        play(model, slot, 4, 4)
    for _ in range(20):
        play(model, slot, 4, 0)
    assert acceptance(model, slot)[0] < 0.35
    for _ in range(20):
        play(model, slot, 4, 4)
    assert acceptance(model, slot)[0] > 0.65


def test_buckets_are_told_apart() -> None:
    model = AcceptanceModel(2)
    for number in range(20):
        slot = model.slot(make_sequence(number), "lookup")
        for _ in range(8):
            play(model, slot, 2, 0, bucket=0)
            play(model, slot, 2, 2, bucket=4)
    fresh = model.slot(make_sequence(99), "lookup")
    assert acceptance(model, fresh, bucket=4)[0] > acceptance(model, fresh, bucket=0)[0] + 0.5


def test_a_drafter_that_stays_silent_is_known_to() -> None:
    model = AcceptanceModel(4)
    slot = model.slot(make_sequence(), "lookup")
    for _ in range(40):
        model.note(Outcomes([slot], [0], [0.6], [4], [0], [0], [False]))
    model.settle()
    _, offers = model.estimate(np.array([slot]), np.array([0]))
    assert offers[0, 0] < 0.1
    assert (np.diff(offers[0]) <= 0).all()
    assert acceptance(model, slot)[0] == pytest.approx(0.6)  # nothing was judged


def test_survival_needs_probabilities() -> None:
    model, rng = AcceptanceModel(8), random.Random(4)
    slots = [model.slot(make_sequence(n), "lookup") for n in range(5)]
    for _ in range(500):
        play(model, rng.choice(slots), 8, rng.randint(0, 8), bucket=rng.randint(0, 5))
    for bucket in range(6):
        for slot in slots:
            assert all(0.0 < p < 1.0 for p in acceptance(model, slot, bucket))


def test_released_slots_are_used_again_and_come_back_empty() -> None:
    model = AcceptanceModel(4)
    for number in range(1000):
        sequence = make_sequence(number)
        slot = model.slot(sequence, "lookup")
        play(model, slot, 4, 4 * (number % 2))
        model.release(sequence)
    assert model.num_slots == 0
    assert len(model._drafter) == 8
    fresh = [acceptance(model, model.slot(make_sequence(2000 + n), "lookup")) for n in range(3)]
    assert fresh[0] == fresh[1] == fresh[2]


def test_growing_keeps_what_was_learnt() -> None:
    model = AcceptanceModel(2)
    slot = model.slot(make_sequence(), "lookup")
    for _ in range(30):
        play(model, slot, 2, 0)
    before = acceptance(model, slot)
    for number in range(1, 100):
        model.slot(make_sequence(number), "lookup")
    assert acceptance(model, slot) == before
    assert model.num_slots == 100


def test_the_description_is_plain_data() -> None:
    model = AcceptanceModel(2)
    play(model, model.slot(make_sequence(), "lookup"), 2, 1)
    rows = model.describe()["lookup"]
    assert [row["depth"] for row in rows] == [1, 2]
    assert rows[0]["acceptance"] > rows[1]["acceptance"]
