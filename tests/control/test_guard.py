"""The guard closes what loses, waits longer each time, and leaves winners alone."""

from __future__ import annotations

import random

from engine.control.guard import Guard


def run(guard: Guard, steps: int, loss: float, noise: float = 0.0, seed: int = 1) -> int:
    """Speculates whenever it is allowed to; returns how often that was."""
    rng, speculative = random.Random(seed), 0
    for _ in range(steps):
        if guard.closed(1):
            guard.observe(1, None)
        else:
            speculative += 1
            guard.observe(1, loss + rng.gauss(0.0, noise))
    return speculative


def test_a_lasting_loss_is_stopped_with_growing_pauses() -> None:
    guard = Guard()
    assert run(guard, 10_000, loss=0.3) <= 8 * 9  # pauses 64, 128, ..., each bought by 8 steps
    assert guard.records[1].trips >= 6


def test_a_gain_is_left_alone_even_if_noisy() -> None:
    assert run(Guard(), 5000, loss=-0.2, noise=1.0) == 5000


def test_a_loss_too_small_to_matter_is_tolerated() -> None:
    assert run(Guard(), 2000, loss=0.005) == 2000


def test_noise_around_nothing_is_seldom_mistaken_for_a_loss() -> None:
    # 2.5 standard errors, looked at again and again: a few per cent of the time at most.
    assert run(Guard(), 5000, loss=0.0, noise=0.5) > 4000


def test_it_opens_again_and_forgives() -> None:
    guard = Guard()
    run(guard, 400, loss=0.3)
    trips = guard.records[1].trips
    assert run(guard, 4000, loss=-0.3) > 3000
    assert trips > 1
    assert guard.records[1].trips == 0


def test_batch_sizes_are_judged_apart() -> None:
    guard = Guard()
    for _ in range(20):
        guard.observe(16, 0.4)
    assert guard.closed(16)
    assert guard.closed(31)
    assert not guard.closed(1)
    assert not guard.closed(32)
