"""Exploration stays within its account and does not forget anybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cache.pages import PageTable
from engine.control.allocate import Margins
from engine.control.explore import Explorer
from engine.sequence import Sequence
from engine.types import Request


def make_sequences(count: int) -> list[Sequence]:
    return [
        Sequence(Request(f"r{n}", (1,)), 0, n, 0, PageTable(""), "lookup", 8, 100)
        for n in range(count)
    ]


def losing(count: int, loss: float, joint: float | None = None, worth: float = 0.0) -> Margins:
    """Probes that bring nothing as far as is known."""
    return Margins(
        brings=[0.0] * count,
        price=[loss] * count,
        joint=[loss if joint is None else joint] * count,
        promise=[1.0] * count,
        drafters=["model"] * count,
        token_seconds=worth,
    )


def test_probes_cost_at_most_one_per_cent() -> None:
    explorer, sequences = Explorer(), make_sequences(4)
    probes = 0
    for step in range(1, 20_001):
        if explorer.any_due(step, sequences):
            probes += len(explorer.probes(step, sequences, [0] * 4, losing(4, 0.005)))
        explorer.account.pass_time(0.01, 0.01)
    assert explorer.account.spent <= 0.01 * 200 + 2 * 0.01  # and two plain steps to open with
    assert probes * 0.005 > 0.9 * 0.01 * 200


def test_probes_that_fail_grow_rare_for_everybody() -> None:
    """Who comes anew need not fail all over again, and still has a first try."""
    explorer, tries = Explorer(), []
    for generation, sequence in enumerate(make_sequences(10)):
        for step in range(100 * generation, 100 * generation + 100):
            explorer.account.pass_time(1.0, 1.0)  # there is credit for any number of probes
            if explorer.any_due(step, [sequence]):
                tries += explorer.probes(step, [sequence], [0], losing(1, 1e-6))
        explorer.release(sequence)
    assert 20 <= len(tries) <= 35  # at first after 8 steps, later after 32; not every 8


def test_after_a_success_everybody_is_tried_more_often() -> None:
    explorer, (one, other) = Explorer(), make_sequences(2)
    explorer.account.pass_time(1.0, 1.0)
    for step in (0, 8, 24, 56):
        assert explorer.any_due(step, [one])
        assert explorer.probes(step, [one], [0], losing(1, 1e-6)) == [0]
    assert not explorer.any_due(84, [one])
    assert not explorer.any_due(84, [other])
    explorer.succeeded(one, 84)
    assert explorer.any_due(85, [one])
    assert explorer.probes(85, [one], [0], losing(1, 1e-6)) == [0]
    assert explorer.any_due(96, [one])


def test_pricing_waits_until_there_is_credit() -> None:
    explorer, (sequence,) = Explorer(), make_sequences(1)
    explorer.account.pass_time(0.01, 0.01)
    assert explorer.any_due(4, [sequence])
    assert explorer.probes(4, [sequence], [0], losing(1, 0.03)) == []
    assert not explorer.any_due(8, [sequence])
    for _ in range(200):
        explorer.account.pass_time(0.01, 0.01)
    assert explorer.any_due(12, [sequence])
    assert explorer.probes(12, [sequence], [0], losing(1, 0.03)) == [0]


def test_who_can_never_be_paid_for_does_not_hold_up_the_others() -> None:
    """A long prompt to catch up with may cost more than the account ever holds."""
    explorer, sequences = Explorer(), make_sequences(2)
    for _ in range(10_000):
        explorer.account.pass_time(0.01, 0.01)
    dear = replace(losing(2, 0.01), price=[1.0, 0.01], joint=[1.0, 0.01])
    assert explorer.probes(4, sequences, [0, 0], dear) == [1]


def test_everybody_is_probed() -> None:
    explorer, sequences = Explorer(), make_sequences(16)
    seen: set[int] = set()
    for step in range(1, 2000):
        if explorer.any_due(step, sequences):
            seen.update(explorer.probes(step, sequences, [0] * 16, losing(16, 0.0002)))
        explorer.account.pass_time(0.01, 0.01)
    assert seen == set(range(16))


def test_success_is_followed_up_at_once() -> None:
    explorer, (sequence,) = Explorer(), make_sequences(1)
    explorer.account.pass_time(1.0, 1.0)
    assert explorer.any_due(4, [sequence])
    assert explorer.probes(4, [sequence], [0], losing(1, 0.001)) == [0]
    assert not explorer.any_due(5, [sequence])
    explorer.succeeded(sequence, 4)
    assert explorer.any_due(5, [sequence])


def test_what_cannot_pay_is_never_tried() -> None:
    explorer, sequences = Explorer(), make_sequences(1)
    explorer.account.pass_time(1.0, 1.0)
    hopeless = replace(losing(1, 0.02), promise=[-0.001])
    assert explorer.probes(4, sequences, [0], hopeless) == []


def test_a_probe_is_never_quite_free() -> None:
    """If the model says that drafts cost nothing, it may be the model that is wrong."""
    explorer, sequences = Explorer(), make_sequences(1)
    explorer.account.pass_time(0.01, 0.01)
    free = replace(losing(1, 0.004), brings=[0.005])
    assert explorer.probes(4, sequences, [0], free) == [0]
    assert explorer.account.spent == 0.001


def test_a_long_quiet_time_buys_no_long_time_of_losses() -> None:
    explorer = Explorer()
    for _ in range(100_000):
        explorer.account.pass_time(0.01, 0.01)
    assert explorer.account.credit <= 8 * 0.01 + 1e-12


def test_shadow_steps_are_rare_and_end_when_the_baseline_is_fresh() -> None:
    explorer = Explorer(seed=3)
    explorer.account.credit = 1e9
    rates = [
        sum(explorer.shadow(samples, age, 0.001) for _ in range(10_000)) / 10_000
        for samples, age in ((0, 0), (10, 0), (100, 1000), (100, 3))
    ]
    # Within five deviations of 5, 2, 1 and 0 per cent.
    assert abs(rates[0] - 0.05) < 0.011
    assert abs(rates[1] - 0.02) < 0.007
    assert abs(rates[2] - 0.01) < 0.005
    assert rates[3] == 0.0


def test_shadow_steps_wait_for_credit_unless_ordered() -> None:
    explorer = Explorer()
    assert not any(explorer.shadow(0, 0, 1.0) for _ in range(1000))
    assert any(explorer.shadow(0, 0, None) for _ in range(1000))


def test_it_forgets_who_has_left() -> None:
    explorer = Explorer()
    for sequence in make_sequences(500):
        explorer.account.pass_time(1.0, 1.0)
        explorer.probes(4, [sequence], [0], losing(1, 0.001))
        explorer.succeeded(sequence, 4)
        explorer.release(sequence)
    assert explorer.num_sequences == 0
    assert not explorer._eager


def test_a_draft_models_round_is_shared() -> None:
    """Once it is called, further sequences are tried until they cost as much again."""
    explorer, sequences = Explorer(), make_sequences(16)
    for _ in range(10_000):
        explorer.account.pass_time(0.1, 0.1)
    group = explorer.probes(4, sequences, [0] * 16, losing(16, 0.07, joint=0.01))
    assert len(group) == 1 + 7
    assert explorer.account.spent == pytest.approx(0.14)
    again = explorer.probes(8, sequences, [0] * 16, losing(16, 0.07, joint=0.01))
    assert not set(group) & set(again)


def test_a_group_waits_until_it_can_be_paid_as_a_whole() -> None:
    """Else the first would use up what there is, time and again, and never share."""
    explorer, sequences = Explorer(), make_sequences(8)
    explorer.account.pass_time(0.1, 0.1)
    explorer.account.credit = 0.1
    assert explorer.probes(4, sequences, [0] * 8, losing(8, 0.07, joint=0.01)) == []
    assert not explorer.any_due(8, sequences)
    explorer.account.credit = 0.141
    assert explorer.any_due(8, sequences)
    assert len(explorer.probes(8, sequences, [0] * 8, losing(8, 0.07, joint=0.01))) == 8


def test_only_one_drafter_is_probed_at_a_time() -> None:
    explorer, sequences = Explorer(), make_sequences(4)
    explorer.account.pass_time(0.1, 0.1)
    both = replace(losing(4, 0.07, joint=0.01), drafters=["a", "b", "a", "b"])
    assert explorer.probes(4, sequences, [0] * 4, both) == [0, 2]
    assert explorer.probes(8, sequences, [0] * 4, both) == [1, 3]


def test_a_probe_that_was_right_gets_back_what_it_brought() -> None:
    explorer, sequences = Explorer(), make_sequences(1)
    explorer.account.pass_time(0.1, 0.1)
    before = explorer.account.credit
    assert explorer.probes(4, sequences, [0], losing(1, 0.03, worth=0.02)) == [0]
    explorer.succeeded(sequences[0], 4)
    assert explorer.account.spent == pytest.approx(0.01)
    assert explorer.account.credit == pytest.approx(before - 0.01)
    assert explorer.probes(5, sequences, [0], losing(1, 0.03, worth=0.05)) == [0]
    explorer.succeeded(sequences[0], 5)  # never more than was paid
    explorer.succeeded(sequences[0], 6)  # and but once
    assert explorer.account.spent == pytest.approx(0.01)
