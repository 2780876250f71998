"""Recursive rejection over trees is lossless, exactly; and the test would notice a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sampling import Chance, KeyedChance, rejection
from engine.sampling.verify import tree_rejection
from engine.tree import children, depths, way_to
from tests.sampling.support import Branches, World, assert_lossless, random_world

TreeRule = Callable[[Tensor, Sequence[int], Sequence[int], Tensor, Chance], tuple[list[int], int]]

TREES = [
    [-1, -1],
    [-1, -1, -1],
    [-1, -1, 0],
    [-1, -1, 0, 0],
    [-1, 0, 0, -1, 3],
    [-1, -1, 1, 1, 0],
]


class Coins(Branches):
    """A script of as many coins as children are tried."""

    def accepts(self, _depth: int, weight: float, limit: float, _index: int = 0) -> bool:
        return super().accepts(len(self._taken), weight, limit)


def drawings(
    world: World, parents: Sequence[int], replacement: bool
) -> Iterator[tuple[float, tuple[int, ...], Tensor]]:
    """(probability, tokens, what each of them was drawn from) of every way to draw a tree."""
    size = world.target[0].shape[0]
    for tokens in itertools.product(range(size), repeat=len(parents)):
        probability, rows = 1.0, []
        for node, parent in enumerate(parents):
            before = [tokens[n] for n in way_to(parent, parents)]
            q = world.proposal[len(before)][tuple(before)].clone()
            for elder in children(parent, parents) if not replacement else ():
                if elder < node:
                    q[tokens[elder]] = 0.0
            # With nothing left to draw from, anything may be said to have been drawn.
            q = q / q.sum() if q.sum() > 0 else torch.full_like(q, 1 / size)
            rows.append(q)
            probability *= float(q[tokens[node]])
        if probability > 0.0:
            yield probability, tokens, torch.stack(rows)


def texts(world: World, parents: Sequence[int], rule: TreeRule, replacement: bool) -> Tensor:
    """Probability of every text, those beyond the verdict's token drawn from the target."""
    tails = world.tails()
    joint = torch.zeros_like(tails[0])
    for drawn, tokens, rows in drawings(world, parents, replacement):
        ways = [[], *(way_to(node, parents) for node in range(len(parents)))]
        befores = [tuple(tokens[n] for n in way) for way in ways]
        target = torch.stack([world.target[len(b)][b] for b in befores])
        scripts: list[list[bool]] = [[]]
        while scripts:
            chance = Coins(scripts.pop())
            way, _ = rule(target, tokens, parents, rows, chance)
            scripts += chance.untaken
            kept = tuple(tokens[n] for n in way)
            assert chance.weights is not None
            later = tails[len(kept) + 1][kept]
            weights = chance.weights.reshape((-1,) + (1,) * (later.dim() - 1))
            joint[kept] += drawn * chance.probability * later * weights
    return joint


def is_lossless(parents: Sequence[int], rule: TreeRule, seed: int, replacement: bool) -> bool:
    world = random_world(3, max(depths(parents)) + 1, seed)
    found = texts(world, parents, rule, replacement)
    return bool((found - world.tails()[0]).abs().max() < 1e-12)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_texts_are_distributed_as_the_targets(parents: list[int], replacement: bool) -> None:
    assert all(is_lossless(parents, tree_rejection, seed, replacement) for seed in range(3))


@pytest.mark.parametrize("depth", [1, 3])
def test_of_a_chain_it_is_rejection(depth: int) -> None:
    """Verdict by verdict, by the same coins."""
    chain = list(range(-1, depth - 1))
    dice = torch.Generator().manual_seed(3)
    p, q = (torch.rand(n, 4, generator=dice, dtype=torch.float64) for n in (depth + 1, depth))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    for seed in range(200):
        draft = torch.multinomial(q, 1, generator=dice).flatten().tolist()
        chance = KeyedChance(seed, 0, 5)
        kept = rejection(p, draft, q, chance)
        way, token = tree_rejection(p, draft, chain, q, chance)
        assert (len(way), token) == (kept.accepted, kept.token)
    assert_lossless(rejection, random_world(3, depth, 1))


def same_coin(p: Any, x: Any, parents: Any, q: Any, chance: Chance) -> tuple[list[int], int]:
    """Tries every child against p, as if none had been refused before it."""
    way: list[int] = []
    node = -1
    while True:
        weights = p[node + 1]
        for child in children(node, parents):
            if chance.accepts(0, float(p[node + 1][x[child]]), float(q[child, x[child]])):
                way.append(child)
                node = child
                break
            weights = (weights - q[child]).clamp(min=0)
            weights = weights / weights.sum() if weights.sum() > 0 else p[node + 1]
        else:
            return way, chance.draw(0, weights, 2)  # type: ignore[arg-type]


def as_if_replaced(p: Any, x: Any, parents: Any, q: Any, chance: Chance) -> tuple[list[int], int]:
    """Takes all children of a node for draws from what its first child was drawn from."""
    told = torch.stack([q[children(parents[n], parents)[0]] for n in range(len(parents))])
    return tree_rejection(p, x, parents, told, chance)


@pytest.mark.parametrize("rule", [same_coin, as_if_replaced])
def test_a_broken_rule_is_noticed(rule: TreeRule) -> None:
    assert not is_lossless([-1, -1, 0, 0], rule, seed=1, replacement=False)


def test_siblings_have_coins_of_their_own() -> None:
    chance = KeyedChance(7, 0, 5)
    found = {
        tuple(KeyedChance(seed, 0, 5).accepts(0, 0.5, 1.0, index) for index in range(2))
        for seed in range(60)
    }
    assert len(found) == 4
    assert chance.accepts(1, 1.0, 1.0, 3)
