"""Verdicts with the noise that production uses: whole texts, over several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.sampling import KeyedChance, Purpose, block, noise_key, rejection
from engine.sampling import verify as verify_module
from engine.sampling.noise import race_row
from tests.sampling.support import ODDS, Rule, chi_square_odds

dist = partial(torch.tensor, dtype=torch.float64)


def speculate(
    rule: Rule, p: Tensor, q: Tensor, length: int, chances: Callable[[int, int], KeyedChance]
) -> list[int]:
    """`length` tokens, two drafted per step; `chances(position, step)` keys each verdict."""
    text: list[int] = []
    step = 0
    while len(text) < length:
        chance = chances(len(text), step)
        draft = [draft_token(chance, depth, q, step) for depth in range(2)]
        outcome = rule(p.expand(3, -1), draft, q.expand(2, -1), chance)
        text += [*draft[: outcome.accepted], outcome.token]
        step += 1
    return text[:length]


def draft_token(
    chance: KeyedChance, depth: int, q: Tensor, step: int, purpose: Purpose = Purpose.DRAFT
) -> int:
    key = noise_key(chance.seed, chance.choice, chance.position + depth, purpose, step)
    return race_row(key, None, q.log())


def odds_of_texts(
    rule: Rule, chances: Callable[[int, int, int], KeyedChance], samples: int = 3000
) -> float:
    p, q = dist([0.5, 0.5]), dist([0.9, 0.1])
    counts = torch.zeros(16)
    for seed in range(samples):
        bits = speculate(rule, p, q, 4, lambda position, step, s=seed: chances(s, position, step))
        counts[int("".join(map(str, bits)), 2)] += 1
    return chi_square_odds(counts, torch.full((16,), 1 / 16))


def test_block_with_step_keyed_noise_is_lossless_over_steps() -> None:
    odds = odds_of_texts(block, lambda seed, position, step: KeyedChance(seed, 0, position, step))
    assert odds > ODDS


def test_block_with_position_keyed_noise_is_noticed() -> None:
    odds = odds_of_texts(block, lambda seed, position, _: KeyedChance(seed, 0, position))
    assert odds < 1e-20


def test_rejection_with_position_keyed_noise_is_lossless_over_steps() -> None:
    odds = odds_of_texts(rejection, lambda seed, position, _: KeyedChance(seed, 0, position))
    assert odds > ODDS


@pytest.mark.parametrize(
    ("purpose", "lossless"), [(Purpose.DRAFT, True), (Purpose.RESIDUAL, False)]
)
def test_drafts_must_not_share_the_noise_of_the_verdict(purpose: Purpose, lossless: bool) -> None:
    p = dist([0.45, 0.4, 0.05, 0.1])
    q = dist([0.05, 0.3, 0.15, 0.5])
    counts = torch.zeros(4)
    for seed in range(6000):
        chance = KeyedChance(seed, 0, 10)
        draft = [draft_token(chance, 0, q, 0, purpose)]
        outcome = rejection(p.expand(2, -1), draft, q[None], chance)
        counts[draft[0] if outcome.accepted else outcome.token] += 1
    odds = chi_square_odds(counts, p)
    assert odds > ODDS if lossless else odds < 1e-9


def test_the_accept_coin_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "uniform", lambda _: 0.0)
    chance = KeyedChance(0, 0, 0)
    assert not chance.accepts(0, 0.0, 1.0)
    assert not chance.accepts(0, 0.0, 0.0)
    assert chance.accepts(0, 1e-300, 1.0)


def test_keyed_chance_accepts_as_often_as_it_should() -> None:
    base = KeyedChance(7, 0, 0)
    hits = sum(replace(base, position=t).accepts(0, 0.3, 0.5) for t in range(20000))
    odds = chi_square_odds(torch.tensor([hits, 20000 - hits]), torch.tensor([0.6, 0.4]))
    assert odds > ODDS
