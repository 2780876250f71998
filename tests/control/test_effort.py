"""Deciding rests where it costs more than it brings, and wakes when there is much to gain."""

from __future__ import annotations

from engine.control.effort import Effort


def worked(effort: Effort, batch: int, steps: range, spent: float, saved: float) -> int:
    """Decides whenever it may; returns how often."""
    decided = 0
    for step in steps:
        if not effort.rests(batch, step):
            effort.note(batch, spent, saved)
            decided += 1
    return decided


def test_it_rests_most_steps_where_deciding_does_not_pay() -> None:
    for batch, every in ((1, 4), (7, 4), (9, 8), (15, 12), (32, 16)):
        effort = Effort()
        assert worked(effort, batch, range(64), spent=1e-3, saved=1e-3) == 64
        rests = [effort.rests(batch, step) for step in range(64, 464)]
        assert rests == [step % every != 0 for step in range(64, 464)]
        effort = Effort()
        assert worked(effort, batch, range(64), spent=1e-3, saved=1e-5) == 64
        rests = [effort.rests(batch, step) for step in range(64, 464)]
        assert rests == [step % (2 * every) != 0 for step in range(64, 464)]  # next to nothing


def test_it_never_rests_where_deciding_pays() -> None:
    assert worked(Effort(), 32, range(1000), spent=1e-3, saved=2.1e-3) == 1000
    assert worked(Effort(), 32, range(1064), spent=1e-3, saved=1.9e-3) <= 64 + 64


def test_one_good_find_wakes_it_up() -> None:
    """From nothing to fifty times what deciding takes."""
    effort = Effort()
    worked(effort, 1, range(1000), spent=1e-4, saved=0.0)
    assert worked(effort, 1, range(1000, 1008), spent=1e-4, saved=5e-3) >= 4
    assert worked(effort, 1, range(1008, 1058), spent=1e-4, saved=5e-3) == 50


def test_batch_sizes_are_told_apart() -> None:
    effort = Effort()
    worked(effort, 32, range(200), spent=1e-3, saved=0.0)
    assert effort.rests(63, 201)
    assert not effort.rests(31, 201)
    assert not effort.rests(64, 201)
