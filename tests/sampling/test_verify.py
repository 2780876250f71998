"""Losslessness of the verification rules, exactly, and that the tests would notice a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.sampling import (
    Chance,
    KeyedChance,
    Outcome,
    Purpose,
    block,
    match,
    probabilities,
    rejection,
)
from tests.sampling.support import (
    Rule,
    World,
    assert_lossless,
    random_world,
)

dist = partial(torch.tensor, dtype=torch.float64)

SIZES = [(2, 1), (2, 4), (3, 3), (4, 1), (4, 2), (4, 3)]


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize(("size", "depth"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_distributed_as_the_targets(
    rule: Rule, size: int, depth: int, seed: int
) -> None:
    assert_lossless(rule, random_world(size, depth, seed))


@pytest.mark.parametrize("rule", [rejection, block])
def test_four_tokens_four_deep(rule: Rule) -> None:
    assert_lossless(rule, random_world(4, 4, seed=3))


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_equal_models_accept_everything(rule: Rule, depth: int) -> None:
    world = random_world(3, depth, seed=5) if depth else World([dist([0.2, 0.8])], [])
    same = World(world.target, world.target[:-1])
    if depth:
        assert assert_lossless(rule, same) == pytest.approx(depth, abs=1e-12)
    else:
        outcome = rule(dist([[0.2, 0.8]]), [], torch.empty(0, 2), KeyedChance(1, 0, 5))
        assert outcome.accepted == 0


@pytest.mark.parametrize("rule", [rejection, block])
def test_disjoint_models_accept_nothing(rule: Rule) -> None:
    p, q = dist([0.3, 0.7, 0.0]), dist([0.0, 0.0, 1.0])
    assert assert_lossless(rule, context_free(p, q, 3)) == 0.0


@pytest.mark.parametrize("rule", [rejection, block])
def test_deterministic_drafts(rule: Rule) -> None:
    p, q = dist([0.3, 0.6, 0.1]), dist([0.0, 1.0, 0.0])
    expected = assert_lossless(rule, context_free(p, q, 2))
    assert expected == pytest.approx(0.6 + 0.36, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_rejection_accepts_one_minus_total_variation(seed: int) -> None:
    world = random_world(4, 1, seed)
    expected = float(torch.minimum(world.target[0], world.proposal[0]).sum())
    assert assert_lossless(rejection, world) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_block_never_accepts_less_than_rejection(seed: int) -> None:
    world = random_world(3, 3, seed)
    gain = assert_lossless(block, world) - assert_lossless(rejection, world)
    assert gain > -1e-12


def test_the_example_of_the_block_verification_paper() -> None:
    p, q = dist([1 / 3, 2 / 3]), dist([2 / 3, 1 / 3])
    world = context_free(p, q, 2)
    assert assert_lossless(rejection, world) == pytest.approx(10 / 9, abs=1e-12)
    assert assert_lossless(block, world) == pytest.approx(11 / 9, abs=1e-12)


def context_free(p: Tensor, q: Tensor, depth: int) -> World:
    size = p.shape[0]
    return World(
        [p.expand((size,) * d + (size,)) for d in range(depth + 1)],
        [q.expand((size,) * d + (size,)) for d in range(depth)],
    )


# Broken rules: each was shipped by someone, and each must be noticed.


def uniform_proposal(rule: Rule) -> Rule:
    """Pretends that drafts were drawn uniformly."""
    return lambda p, x, q, chance: rule(p, x, torch.full_like(q, 1 / q.shape[1]), chance)


def sharper_proposal(rule: Rule) -> Rule:
    """A temperature on the drafter's side that its drafts were not drawn with."""

    def broken(p: Tensor, x: Sequence[int], q: Tensor, chance: Chance) -> Outcome:
        sharp = q**2
        return rule(p, x, sharp / sharp.sum(-1, keepdim=True), chance)

    return broken


def sharper_target(rule: Rule) -> Rule:
    """A temperature on the target's side that plain decoding would not use."""

    def broken(p: Tensor, x: Sequence[int], q: Tensor, chance: Chance) -> Outcome:
        sharp = p**2
        return rule(sharp / sharp.sum(-1, keepdim=True), x, q, chance)

    return broken


class Redrawn:
    """Hands the tokens after a rejection to another distribution."""

    def __init__(self, chance: Chance, weights: Callable[[int], Tensor], purpose: Purpose) -> None:
        self.chance, self.weights, self.purpose = chance, weights, purpose

    def accepts(self, depth: int, weight: float, limit: float) -> bool:
        return self.chance.accepts(depth, weight, limit)

    def draw(self, depth: int, weights: Tensor, purpose: Purpose) -> int:
        other = self.weights(depth) if purpose is self.purpose else weights
        return self.chance.draw(depth, other, purpose)


def residual_from_target(rule: Rule) -> Rule:
    """Draws the correction from p instead of the excess of p over q."""
    return lambda p, x, q, chance: rule(p, x, q, Redrawn(chance, lambda d: p[d], Purpose.RESIDUAL))


def most_likely_correction(rule: Rule) -> Rule:
    """Takes the target's best token after a rejection, without any residual."""

    def best(p: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(p.argmax(), p.shape[0]).double()

    return lambda p, x, q, chance: rule(
        p, x, q, Redrawn(chance, lambda d: best(p[d]), Purpose.RESIDUAL)
    )


def bonus_from_last_row(rule: Rule) -> Rule:
    """Draws the bonus from the row that judged the last draft token."""
    return lambda p, x, q, chance: rule(p, x, q, Redrawn(chance, lambda d: p[d - 1], Purpose.BONUS))


def unscaled_block_residual(rule: Rule) -> Rule:
    """Block verification whose residual forgets the carried probability."""
    return lambda p, x, q, chance: rule(
        p, x, q, Redrawn(chance, lambda d: (p[d] - q[d]).clamp(min=0) + 1e-300, Purpose.RESIDUAL)
    )


#: What breaks any rule with a proposal.
BREAKS = (
    uniform_proposal,
    sharper_proposal,
    sharper_target,
    residual_from_target,
    most_likely_correction,
    bonus_from_last_row,
)


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize("breaks", BREAKS)
def test_a_broken_rule_is_noticed(rule: Rule, breaks: Callable[[Rule], Rule]) -> None:
    with pytest.raises(AssertionError, match="probability is off"):
        assert_lossless(breaks(rule), random_world(3, 2, seed=1))


def test_an_unscaled_block_residual_is_noticed() -> None:
    with pytest.raises(AssertionError, match="probability is off"):
        assert_lossless(unscaled_block_residual(block), random_world(3, 3, seed=1))


def test_dropping_unlikely_drafts_is_noticed() -> None:
    def broken(p: Tensor, x: Sequence[int], q: Tensor, chance: Chance) -> Outcome:
        kept = list(itertools.takewhile(lambda d: float(q[d, x[d]]) > 0.3, range(len(x))))
        return rejection(p[: len(kept) + 1], x[: len(kept)], q[: len(kept)], chance)

    with pytest.raises(AssertionError, match="probability is off"):
        assert_lossless(broken, random_world(3, 2, seed=1))


class Bonusless(Redrawn):
    """Has no bonus to give."""

    def draw(self, depth: int, weights: Tensor, purpose: Purpose) -> int:
        return -1 if purpose is Purpose.BONUS else self.chance.draw(depth, weights, purpose)


def test_a_missing_bonus_is_noticed() -> None:
    def broken(p: Tensor, x: Sequence[int], q: Tensor, chance: Chance) -> Outcome:
        outcome = rejection(p, x, q, Bonusless(chance, lambda d: p[d], Purpose.BONUS))
        return Outcome(len(x) - 1, x[-1]) if outcome.token < 0 else outcome

    p, q = dist([1 / 3, 2 / 3]), dist([2 / 3, 1 / 3])
    accepted = assert_lossless(broken, context_free(p, q, 2))  # lossless, but a token short
    assert accepted == pytest.approx(10 / 9 - 4 / 9, abs=1e-12)


def test_every_step_emits_one_token_more_than_it_accepts() -> None:
    p = dist([0.5, 0.5, 0.0])
    for rule, seed in itertools.product((rejection, block), range(50)):
        outcome = rule(p.expand(3, -1), [0, 1], p.expand(2, -1), KeyedChance(seed, 0, 0))
        assert outcome.accepted == 2
        assert outcome.token in (0, 1)


def test_rounding_that_leaves_no_residual_still_yields_a_possible_token() -> None:
    p = dist([[0.0, 1.0 - 2**-40], [0.0, 1.0]])
    q = dist([[0.0, 1.0]])

    class Refuses(Redrawn):
        def accepts(self, *_: float) -> bool:
            return False

    chance = Refuses(KeyedChance(0, 0, 0), lambda d: p[d], Purpose.BONUS)
    assert rejection(p, [1], q, chance) == Outcome(0, 1)
    assert block(p, [1], q, chance) == Outcome(0, 1)


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_draft_that_the_target_cannot_say_is_never_kept(rule: Rule) -> None:
    p = dist([1.0, 0.0]).expand(4, -1)
    q = dist([0.5, 0.5]).expand(3, -1)
    for seed in range(100):
        outcome = rule(p, [0, 1, 0], q, KeyedChance(seed, 0, 0))
        assert outcome.accepted <= 1
        assert outcome.token == 0


def test_match_keeps_what_is_equal() -> None:
    assert match([5, 6, 7], [5, 6]) == 2
    assert match([5, 6, 7], [5, 9]) == 1
    assert match([5, 6, 7], [4, 6]) == 0
    assert match([5], []) == 0
    with pytest.raises(ValueError, match="2 draft tokens need 3 target tokens, not 2"):
        match([5, 6], [5, 6])


def test_probabilities_are_each_rows_own() -> None:
    logits = torch.randn(5, 101)
    logits[2, ::2] = -torch.inf
    together = probabilities(logits)
    assert together.dtype == torch.float64
    for row, alone in zip(together, logits, strict=True):
        assert torch.equal(row, probabilities(alone[None])[0])
    torch.testing.assert_close(together.sum(-1), torch.ones(5).double())
