"""Acceptance estimates: censoring, shrinkage, change, memory."""

from __future__ import annotations

import random

import pytest

from engine.cache.pages import PageTable
from engine.control.acceptance import AcceptanceModel
from engine.draft.drafter import Verdict
from engine.sequence import Sequence
from engine.types import Request


def make_sequence(number: int = 0) -> Sequence:
    return Sequence(Request(f"r{number}", (1,)), 0, number, 0, PageTable(""), "lookup", 8, 100)


def play(
    model: AcceptanceModel, sequence: Sequence, draft: int, accepted: int, bucket: int = 0
) -> None:
    """One draft: judged, `accepted` kept, the next one refused."""
    verdict = Verdict([5] * (accepted + 1), draft, accepted)
    model.learn(sequence, "lookup", bucket, verdict)


def draw(dice: random.Random, odds: float, draft: int) -> int:
    """How many of a draft's tokens are kept where each is with these odds."""
    accepted = 0
    while accepted < draft and dice.random() < odds:
        accepted += 1
    return accepted


@pytest.mark.parametrize("draft", [1, 4, 8])
def test_censored_tokens_do_not_bias_the_estimate(draft: int) -> None:
    """What follows a refusal was never judged, however long the draft."""
    model, sequence, dice = AcceptanceModel(), make_sequence(), random.Random(1)
    total = 0.0
    for step in range(3000):
        play(model, sequence, draft, draw(dice, 0.7, draft))
        total += model.estimate(sequence, "lookup", 0) * (step >= 1000)
    assert total / 2000 == pytest.approx(0.7, abs=0.05)


def test_a_draft_cut_by_the_end_of_the_text_refuses_nothing() -> None:
    model, sequence = AcceptanceModel(), make_sequence()
    for _ in range(100):
        model.learn(sequence, "lookup", 0, Verdict([5, 5], 4, 2))
    assert model.estimate(sequence, "lookup", 0) > 0.9


def test_a_new_sequence_starts_at_the_mean_of_the_others() -> None:
    model = AcceptanceModel()
    assert model.estimate(make_sequence(), "lookup", 0) > 0.5  # optimistic enough to try
    for number in range(30):
        sequence = make_sequence(number)
        for _ in range(8):
            play(model, sequence, 4, 0)
        model.release(sequence)
    assert model.estimate(make_sequence(99), "lookup", 0) < 0.1
    assert model.pools["lookup"].overall < 0.1


def test_sequences_that_differ_are_told_apart() -> None:
    model, dice = AcceptanceModel(), random.Random(2)
    good, bad = make_sequence(0), make_sequence(1)
    for _ in range(200):
        play(model, good, 4, draw(dice, 0.9, 4))
        play(model, bad, 4, draw(dice, 0.1, 4))
    assert model.estimate(good, "lookup", 0) > 0.75
    assert model.estimate(bad, "lookup", 0) < 0.25


def test_sequences_that_are_alike_are_not() -> None:
    """Their estimates would differ by chance, and planning would prefer the lucky ones: the
    spread stays well below that of the counts they come from, which is about 0.12."""
    model, dice = AcceptanceModel(), random.Random(3)
    sequences = [make_sequence(number) for number in range(32)]
    spread = 0.0
    for step in range(300):
        for sequence in sequences:
            play(model, sequence, 4, draw(dice, 0.7, 4))
        if step >= 100:
            found = [model.estimate(sequence, "lookup", 0) for sequence in sequences]
            mean = sum(found) / len(found)
            spread += (sum((one - mean) ** 2 for one in found) / len(found)) ** 0.5 / 200
    assert spread < 0.03


def test_buckets_are_told_apart() -> None:
    model, sequence = AcceptanceModel(), make_sequence()
    for _ in range(60):
        play(model, sequence, 4, 0, bucket=0)
        play(model, sequence, 4, 4, bucket=3)
    for number in (0, 7):  # itself, and one that nothing is known of
        asked = sequence if number == 0 else make_sequence(number)
        assert model.estimate(asked, "lookup", 0) < 0.2
        assert model.estimate(asked, "lookup", 3) > 0.8


def test_refusals_in_a_row_are_believed_whatever_went_before() -> None:
    """One sequence of always right drafts is all that the pool knows of."""
    model, sequence = AcceptanceModel(), make_sequence()
    for _ in range(200):
        play(model, sequence, 4, 4)
    assert model.estimate(sequence, "lookup", 0) > 0.9
    for _ in range(50):
        play(model, sequence, 1, 0)
    assert model.estimate(sequence, "lookup", 0) < 0.02
    play(model, sequence, 1, 1)
    assert model.estimate(sequence, "lookup", 0) > 0.05  # and a success ends it


def test_memory_is_bounded_by_the_sequences_alive() -> None:
    model = AcceptanceModel()
    for number in range(500):
        sequence = make_sequence(number)
        sequence.drafters = ("lookup", "model")
        play(model, sequence, 4, 2)
        model.learn(sequence, "model", 0, Verdict([5, 5], 3, 1))
        assert model.num_sequences == 2
        model.release(sequence)
    assert model.num_sequences == 0


def test_what_is_known_is_told() -> None:
    model = AcceptanceModel()
    for _ in range(600):
        play(model, make_sequence(), 4, 3, bucket=2)
    pool = model.pools["lookup"]
    assert pool.overall == pytest.approx(1.0, abs=0.06)  # of a draft's first token
    assert pool.estimates == {2: pytest.approx(1.0, abs=0.06)}
    assert pool.factors() == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=0.2)
    assert pool.total.judged == pytest.approx(200, rel=0.05)  # of which each counts 0.995


def test_acceptance_that_falls_with_depth_is_told_from_texts_that_differ() -> None:
    """Half of the sequences are at 0.9, half at 0.6; behind, a head's acceptance falls. What is
    left of ten thousand drafts is off by four standard errors at most."""
    falls = (1.0, 0.75, 0.5, 0.25)
    model, dice = AcceptanceModel(), random.Random(5)
    sequences = [make_sequence(number) for number in range(8)]
    for _ in range(1250):
        for number, sequence in enumerate(sequences):
            first, kept = 0.9 if number % 2 else 0.6, 0
            while kept < 4 and dice.random() < first * falls[kept]:
                kept += 1
            play(model, sequence, 4, kept)
    assert model.by_depth("lookup", 4) == pytest.approx(falls, abs=0.08)
    for number, sequence in enumerate(sequences):
        found = model.estimate(sequence, "lookup", 0)
        assert found == pytest.approx(0.9 if number % 2 else 0.6, abs=0.25)
    assert list(model.by_depth("lookup", 6)[4:]) == [model.by_depth("lookup", 4)[3]] * 2


def test_where_depth_changes_nothing_none_is_seen() -> None:
    model, dice = AcceptanceModel(), random.Random(6)
    sequences = [make_sequence(number) for number in range(8)]
    for _ in range(500):
        for sequence in sequences:
            play(model, sequence, 8, draw(dice, 0.8, 8))
    assert min(model.by_depth("lookup", 8)) > 0.93
