"""An account of one per cent of the time, and what it is spent on."""

from __future__ import annotations

import pytest

from engine.cache.pages import PageTable
from engine.control.probes import Prober
from engine.sequence import Sequence
from engine.types import Request


def make_sequence() -> Sequence:
    return Sequence(Request("r", (1,)), 0, 0, 0, PageTable(""), "lookup", 8, 100)


def opened(steps: int = 0) -> Prober:
    """A prober whose plain steps take a second."""
    prober = Prober()
    for _ in range(1 + steps):
        prober.pass_time(1.0, 1.0)
    return prober


def test_nothing_is_spent_before_there_was_a_step() -> None:
    assert not Prober().probe([make_sequence()], 1, 1e-6, 0.0)


def test_the_account_fills_with_one_per_cent_up_to_its_limit() -> None:
    prober = opened()
    assert prober.credit == pytest.approx(2.01)
    for _ in range(100):
        prober.pass_time(1.0, 1.0)
    assert prober.credit == pytest.approx(3.01)
    for _ in range(10_000):
        prober.pass_time(1.0, 1.0)
    assert prober.credit == 8.0  # a long quiet time buys no long time of losses


def test_what_is_expected_to_be_lost_is_paid() -> None:
    prober, sequences = opened(), [make_sequence()]
    assert prober.probe(sequences, 1, price=1.0, brings=0.4)
    assert prober.spent == pytest.approx(0.6)
    assert not prober.probe(sequences, 9, price=2.0, brings=0.0)
    assert prober.spent == pytest.approx(0.6)
    # A prediction of no loss may be what is wrong.
    assert prober.probe(sequences, 9, price=1.0, brings=5.0)
    assert prober.spent == pytest.approx(0.85)


def test_probes_that_fail_grow_rare() -> None:
    prober, sequence, waits, last = opened(1000), make_sequence(), [], 0
    for step in range(1, 600):
        prober.pass_time(1.0, 1.0)
        if prober.due(sequence, step) and prober.probe([sequence], step, 0.1, 0.0):
            waits.append(step - last)
            last = step
    assert waits[1:5] == [4, 8, 16, 32]
    assert set(waits[5:]) == {32}


def test_one_that_succeeds_is_soon_followed_by_another() -> None:
    prober, sequence, step = opened(1000), make_sequence(), 100
    for _ in range(4):
        assert prober.probe([sequence], step, 0.5, 0.0)
        assert not prober.due(sequence, step + 3)
        step += 32
    before = prober.credit
    prober.succeeded(sequence, step, worth=0.3)
    assert prober.due(sequence, step + 3)
    assert prober.credit == pytest.approx(before + 0.18)  # most of the token's worth comes back
    prober.succeeded(sequence, step, worth=0.3)
    assert prober.credit == pytest.approx(before + 0.18)  # once


def test_sequences_that_end_are_forgotten() -> None:
    prober, sequence = opened(), make_sequence()
    assert prober.probe([sequence], 1, 0.5, 0.0)
    assert prober.num_sequences == 1
    prober.release(sequence)
    prober.release(sequence)
    assert prober.num_sequences == 0


def test_plain_steps_are_seen_now_and_then_at_every_batch_size() -> None:
    """One in twenty while few were seen, one in a hundred once the last is long ago."""
    prober = Prober(seed=1)
    shadows = [step for step in range(1, 20_001) if _shadow(prober, 4, step)]
    few = [step for step in shadows if step <= 400]
    assert 8 <= len(few) <= 40
    later = len(shadows) - len(few)
    # Every 64 steps, and then a hundred on average: 120 in 19,600, and 60 to 180 beyond any doubt.
    assert 60 < later < 180
    assert _any(prober, 9, range(20_001, 20_200))  # another batch size is unknown again


def _shadow(prober: Prober, batch: int, step: int) -> bool:
    found = prober.shadow(batch, step, None)
    if found:
        prober.plain(batch, step)
    return found


def _any(prober: Prober, batch: int, steps: range) -> bool:
    return any(prober.shadow(batch, step, None) for step in steps)


def test_a_shadow_step_that_costs_too_much_waits() -> None:
    prober = opened()
    assert not any(prober.shadow(1, step, loss=50.0) for step in range(500))
    assert any(prober.shadow(1, step, loss=0.1) for step in range(500))
