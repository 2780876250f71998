"""Keyed noise: what it depends on, what it does not, and that it is noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Purpose, gumbel, noise_key, race, uniform
from engine.sampling.noise import race_row
from tests.sampling.support import ODDS, chi_square_odds, make_row

MASK = (1 << 64) - 1


def reference_gumbel(key: int, token: int) -> float:
    """The definition, with Python's own integers and logarithms."""
    z = (key + token * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    z ^= z >> 31
    u = ((z >> 12) + 0.5) / 2**52
    return -math.log(-math.log1p(-u))


@given(st.integers(0, MASK), st.lists(st.integers(0, 2**31), min_size=1, max_size=40))
def test_gumbel_noise_is_what_it_is_defined_to_be(key: int, tokens: list[int]) -> None:
    noise = gumbel(key, torch.tensor(tokens)).tolist()
    assert noise == pytest.approx([reference_gumbel(key, t) for t in tokens], rel=1e-12, abs=1e-14)


def test_keys_never_change_between_releases() -> None:
    assert noise_key(0, 0, 0, Purpose.TOKEN) == 0x7D20777C9759EFF2
    assert noise_key(-1, 3, 1000, Purpose.ACCEPT, step=7, index=2) == 0x9567C75BD0A4355C


def test_each_part_of_the_name_changes_the_key() -> None:
    names = list(product((0, 1, 2**63 - 1), (0, 1), (0, 1), Purpose, (0, 1), (0, 1)))
    assert len({noise_key(*name) for name in names}) == len(names)


def test_seeds_are_64_bits_signed_or_not() -> None:
    assert noise_key(-1, 0, 0, Purpose.TOKEN) == noise_key(2**64 - 1, 0, 0, Purpose.TOKEN)
    assert noise_key(-(2**63), 0, 0, Purpose.TOKEN) == noise_key(2**63, 0, 0, Purpose.TOKEN)


def test_uniforms_lie_in_zero_to_one() -> None:
    assert uniform(0) == 0.0
    assert uniform(MASK) == 1.0 - 2.0**-53


def test_extreme_bits_give_finite_noise() -> None:
    """Key 0 and token 0 mix to 0, the smallest uniform there is."""
    smallest, largest = -math.log(-math.log1p(-(1 - 2**-53))), -math.log(-math.log1p(-(2**-53)))
    noise = torch.cat([gumbel(k, torch.arange(100_000)) for k in range(3)])
    assert bool(noise.isfinite().all())
    assert smallest <= float(noise.min()) < float(noise.max()) <= largest
    assert -3.7 < smallest < largest < 36.8


def test_gumbel_noise_follows_its_distribution() -> None:
    noise = torch.cat(
        [gumbel(noise_key(1, 0, t, Purpose.TOKEN), torch.arange(1000)) for t in range(100)]
    )
    assert scipy.stats.kstest(noise.numpy(), "gumbel_r").pvalue > ODDS


def test_even_the_smallest_bits_are_random() -> None:
    """Mean and spread of exp(-exp(-g)) = 1 - u ... seen through its last bits."""
    u = -torch.expm1(-torch.exp(-gumbel(99, torch.arange(65536))))
    low = (u * 2**40).long() & 15
    assert chi_square_odds(torch.bincount(low, minlength=16), torch.full((16,), 1 / 16)) > ODDS


NEIGHBOURS: dict[str, Callable[[int], tuple[int, int, int, Purpose, int, int]]] = {
    "seeds": lambda i: (i, 0, 5, Purpose.TOKEN, 0, 0),
    "negative seeds": lambda i: (-i, 0, 5, Purpose.TOKEN, 0, 0),
    "choices": lambda i: (3, i, 5, Purpose.TOKEN, 0, 0),
    "positions": lambda i: (3, 0, i, Purpose.TOKEN, 0, 0),
    "steps": lambda i: (3, 0, 5, Purpose.TOKEN, i, 0),
    "indices": lambda i: (3, 0, 5, Purpose.TOKEN, 0, i),
    "purposes": lambda i: (3, 0, i // 5, Purpose(i % 5), 0, 0),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbours_are_independent(kind: str) -> None:
    """Noise of the same token under neighbouring keys, and of neighbouring tokens."""
    keys = [noise_key(*NEIGHBOURS[kind](i)) for i in range(400)]
    noise = torch.stack([gumbel(key, torch.arange(100)) for key in keys])
    octile = (torch.exp(-torch.exp(-noise)) * 8).long().clamp(max=7)  # uniform on 0 to 7
    for first, second in ((octile[:-1], octile[1:]), (octile[:, :-1], octile[:, 1:])):
        pairs = torch.bincount((first * 8 + second).flatten(), minlength=64)
        assert chi_square_odds(pairs, torch.full((64,), 1 / 64)) > ODDS


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbouring_uniforms_are_independent(kind: str) -> None:
    numbers = torch.tensor([uniform(noise_key(*NEIGHBOURS[kind](i))) for i in range(20_000)])
    octile = (numbers * 8).long()
    pairs = torch.bincount(octile[:-1] * 8 + octile[1:], minlength=64)
    assert chi_square_odds(pairs, torch.full((64,), 1 / 64)) > ODDS


def test_purposes_do_not_share_noise() -> None:
    ids = torch.arange(2000)
    noise = torch.stack([gumbel(noise_key(1, 0, 9, p), ids) for p in Purpose])
    correlation = torch.corrcoef(noise) - torch.eye(len(Purpose))
    assert float(correlation.abs().max()) < 0.12  # 5 standard deviations of 1 / sqrt(2000)


P = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)
DRAWS: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "positions": lambda i: (11, 0, i),
    "seeds": lambda i: (i, 0, 17),
    "choices": lambda i: (11, i, 17),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_race_draws_from_the_distribution(kind: str) -> None:
    counts = torch.zeros(6)
    pairs = torch.zeros(36)
    previous = 0
    for i in range(20_000):
        token = race_row(noise_key(*DRAWS[kind](i), Purpose.TOKEN), None, P.log())
        counts[token] += 1
        pairs[previous * 6 + token] += 1
        previous = token
    assert chi_square_odds(counts, P) > ODDS
    assert chi_square_odds(pairs, torch.outer(P, P).flatten()) > ODDS  # no memory


def test_a_large_race_draws_from_the_distribution() -> None:
    """Beyond the size at which candidates are screened, in the buckets of a real vocabulary."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 2
    bucket = torch.arange(5000) % 10
    expected = torch.zeros(10, dtype=torch.float64)
    expected.index_add_(0, bucket, logits.double().softmax(0))
    counts = torch.zeros(10)
    for i in range(5000):
        counts[bucket[race_row(noise_key(5, 0, i, Purpose.TOKEN), None, logits)]] += 1
    assert chi_square_odds(counts, expected) > ODDS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, MASK),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0, 1e7]),
    shift=st.sampled_from([0.0, -1e4, 3e6]),
    masked=st.booleans(),
)
def test_screening_never_changes_the_winner(
    seed: int, scale: float, shift: float, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(6000, generator=generator) * scale + shift
    if masked:
        logits[torch.rand(6000, generator=generator) < 0.5] = -torch.inf
    expected = int((gumbel(seed, torch.arange(6000)) + logits).argmax())
    assert race_row(seed, None, logits) == expected


#: The key under which token 0 mixes to 64 ones: the worst noise there is.
UNLUCKY = 0xCF9A04AFFA6BADC0


@pytest.mark.parametrize("behind", [0.0, 0.05, 0.3, 0.7, 0.9, 30.0])
def test_screening_survives_the_worst_luck(behind: float) -> None:
    """float32 takes token 0's noise for better than it is by 0.79; it may lead or trail."""
    noise = gumbel(UNLUCKY, torch.arange(4000))
    assert float(noise[0]) == pytest.approx(-math.log(53 * math.log(2)))
    rival = 1 + int(noise[1:].argmax())
    for sign in (1.0, -1.0):
        logits = torch.zeros(4000)
        logits[0] = float(noise[rival] - noise[0]) + sign * (behind + 0.01)
        assert race_row(UNLUCKY, None, logits) == (0 if sign > 0 else rival)


@given(st.integers(0, 1000), st.integers(10, 300), st.data())
def test_noise_depends_on_neither_support_nor_vocabulary(
    seed: int, size: int, data: st.DataObject
) -> None:
    """Tokens outside the support, or beyond the vocabulary, may be there or not."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    row = make_row(seed=seed)
    winner = race(logits, [row])[0]
    kept = data.draw(st.sets(st.integers(0, size - 1)))
    smaller = torch.full_like(logits, -torch.inf)
    smaller[0, [*kept, winner]] = logits[0, [*kept, winner]]
    assert race(smaller, [row]) == [winner]
    assert race(torch.cat([logits, torch.full((1, 50), -torch.inf)], 1), [row]) == [winner]
    assert race(logits[:, : winner + 1], [row]) == [winner]


def test_equal_scores_go_to_the_lowest_id() -> None:
    weights = torch.full((3000,), -torch.inf)
    weights[[7, 9]] = torch.inf  # infinitely far ahead, whatever their noise
    assert int((gumbel(1, torch.arange(3000)) + weights).argmax()) == 7


def test_a_shared_race_agrees_as_often_as_the_theory_says() -> None:
    """A drafter with the target's noise guesses its token with probability
    sum_x 1 / sum_y max(p_y / p_x, q_y / q_x); with noise of its own, with sum_x p_x q_x."""
    q = torch.tensor([0.2, 0.3, 0.1, 0.2, 0.1, 0.1], dtype=torch.float64)
    ratios = torch.maximum(P[None] / P[:, None], q[None] / q[:, None])
    expected = {Purpose.TOKEN: float((1 / ratios.sum(1)).sum()), Purpose.DRAFT: float(P @ q)}
    variation = float((P - q).abs().sum()) / 2
    assert (1 - variation) / (1 + variation) <= expected[Purpose.TOKEN] <= 1 - variation
    for purpose, chance in expected.items():
        hits = 0
        for i in range(10_000):
            token = race_row(noise_key(1, 0, i, Purpose.TOKEN), None, P.log())
            hits += token == race_row(noise_key(1, 0, i, purpose), None, q.log())
        counts = torch.tensor([hits, 10_000 - hits])
        assert chi_square_odds(counts, torch.tensor([chance, 1 - chance])) > ODDS
