"""Rows to sample, odds of a histogram, and all branches of a verification rule at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import scipy.stats
import torch
from torch import Tensor

from engine.sampling import Chance, Outcome, Purpose, SamplingRow, Selector
from engine.types import SamplingParams

EOS = frozenset({2})

#: A sound implementation fails a statistical test once in this many runs; the seeds are fixed,
#: so that it either always passes or never does.
ODDS = 1e-6

Rule = Callable[[Tensor, Sequence[int], Tensor, Chance], Outcome]


def make_row(
    prompt: Sequence[int] = (1,),
    generated: Sequence[int] = (),
    seed: int = 0,
    choice: int = 0,
    **params: Any,
) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        prompt=prompt,
        generated=generated,
        position=len(prompt) + len(generated),
        seed=seed,
        choice=choice,
        eos_token_ids=EOS,
    )


def select_tokens(
    logits: Tensor, rows: Sequence[SamplingRow], vocab_size: int | None = None
) -> list[int]:
    """One token for each row of logits."""
    return Selector(logits, vocab_size).select(range(len(logits)), rows)


def chi_square_odds(counts: Tensor, probabilities: Tensor) -> float:
    """How likely counts at least this far from `probabilities` are by chance alone."""
    expected = probabilities.double() / probabilities.double().sum() * counts.double().sum()
    assert expected.min() >= 5, "too few samples for a chi-square test"
    return float(scipy.stats.chisquare(counts.double(), expected).pvalue)


@dataclass
class Branches:
    """A `Chance` that follows a script of verdicts, then says yes, and notes what it leaves out."""

    script: list[bool]
    probability: float = 1.0
    untaken: list[list[bool]] = field(default_factory=list)
    weights: Tensor | None = None
    _taken: list[bool] = field(default_factory=list)

    def accepts(self, depth: int, weight: float, limit: float) -> bool:
        assert depth == len(self._taken), "each depth has one coin"
        chance = min(1.0, weight / limit) if limit > 0.0 else float(weight > 0.0)
        if len(self._taken) < len(self.script):
            verdict = self.script[len(self._taken)]
        else:
            verdict = chance > 0.0
            if 0.0 < chance < 1.0:
                self.untaken.append([*self._taken, False])
        self._taken.append(verdict)
        self.probability *= chance if verdict else 1.0 - chance
        return verdict

    def draw(self, depth: int, weights: Tensor, purpose: Purpose) -> int:
        assert self.weights is None, "one step draws one token"
        assert 0 <= depth <= len(self._taken)
        assert purpose in (Purpose.RESIDUAL, Purpose.BONUS)
        self.weights = weights.double() / weights.double().sum()
        return 0


def branches(
    rule: Rule, target: Tensor, draft: Sequence[int], proposal: Tensor
) -> Iterator[tuple[float, Outcome, Tensor | None]]:
    """(probability, outcome, distribution of its token) of every way a rule can decide.

    The distribution is None if the rule chose its token without drawing.
    """
    scripts: list[list[bool]] = [[]]
    while scripts:
        chance = Branches(scripts.pop())
        outcome = rule(target, draft, proposal, chance)
        scripts += chance.untaken
        yield chance.probability, outcome, chance.weights


@dataclass
class World:
    """A target and a drafter over V tokens whose distributions depend on the whole prefix.

    `target[d]` and `proposal[d]` have d + 1 axes: d tokens before, then the token's probability.
    """

    target: list[Tensor]
    proposal: list[Tensor]

    @property
    def depth(self) -> int:
        return len(self.proposal)

    def rows(self, draft: Sequence[int]) -> tuple[Tensor, Tensor]:
        p = torch.stack([self.target[d][tuple(draft[:d])] for d in range(self.depth + 1)])
        q = [self.proposal[d][tuple(draft[:d])] for d in range(self.depth)]
        return p, torch.stack(q)

    def tails(self) -> list[Tensor]:
        """[d] = probability of all later tokens given the first d: shape [V] * (depth + 1)."""
        tail = torch.ones_like(self.target[-1])
        found = [tail]
        for p in reversed(self.target):
            tail = tail * p.reshape(p.shape + (1,) * (tail.dim() - p.dim()))
            found.append(tail)
        return found[::-1]


def random_world(size: int, depth: int, seed: int) -> World:
    """Dirichlet conditionals, some tokens impossible for the target, some for the drafter."""
    generator = torch.Generator().manual_seed(seed)

    def conditional(axes: int) -> Tensor:
        weights = torch.rand((size,) * axes, generator=generator, dtype=torch.float64) ** 2
        weights *= torch.rand(weights.shape, generator=generator) > 0.15
        weights[..., 0] += 0.05 * (weights.sum(-1) == 0)
        return weights / weights.sum(-1, keepdim=True)

    return World(
        [conditional(d + 1) for d in range(depth + 1)], [conditional(d + 1) for d in range(depth)]
    )


def assert_lossless(rule: Rule, world: World) -> float:
    """Enumerates drafts and verdicts: the tokens must be the target's, to 1e-12.

    What follows the verdict's token is drawn from the target, so whole texts of depth + 1
    tokens are compared.

    Returns:
        Expected number of accepted draft tokens.
    """
    size = world.target[0].shape[0]
    tails = world.tails()
    joint = torch.zeros_like(tails[0])
    expected = 0.0
    for draft in itertools.product(range(size), repeat=world.depth):
        p, q = world.rows(draft)
        drafted = float(torch.stack([q[d, x] for d, x in enumerate(draft)]).prod())
        if drafted == 0.0:
            continue
        for probability, outcome, weights in branches(rule, p, draft, q):
            kept = draft[: outcome.accepted]
            if weights is None:
                weights = torch.zeros(size, dtype=torch.float64)
                weights[outcome.token] = 1.0
            later = tails[outcome.accepted + 1][kept]
            text = later * weights.reshape((size,) + (1,) * (later.dim() - 1))
            joint[kept] += drafted * probability * text
            expected += drafted * probability * outcome.accepted
    assert abs(float(tails[0].sum()) - 1.0) < 1e-12, "the world is not normalised"
    error = float((joint - tails[0]).abs().max())
    assert error < 1e-12, f"a text's probability is off by {error:.3g}"
    return expected
