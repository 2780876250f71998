"""The verdict over one sequence's draft: how much of it is kept, and the token that follows.

Three lossless rules. The tokens kept and the one that follows are distributed exactly as if
the target had generated them alone.

- `match`: the target draws its own tokens, the draft is kept while equal. Any drafter, and the
  very tokens of plain decoding.
- `rejection`: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). Draft tokens must
  be draws from the given proposal distributions, with noise of their own.
- `block`: block verification (Sun et al. 2025, algorithm 2). As `rejection`, and never keeps
  less on average.

Of a draft that branches, `match` follows the child that the target says; `tree_rejection` tries
the children of a node one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.noise import Purpose, noise_key, race_row, uniform
from engine.tree import children


@dataclass(frozen=True, slots=True)
class Outcome:
    """`accepted` draft tokens are kept; `token` follows them: the correction of the first
    rejected draft token, or the bonus after a fully accepted draft."""

    accepted: int
    token: int


class Rows(Protocol):
    """The target's distribution p [V] after each number of draft tokens: a tensor [k + 1, V], or
    something that computes a row when it is asked for."""

    def __getitem__(self, depth: int, /) -> Tensor: ...


class Chance(Protocol):
    """Where a rule gets its randomness; a test may walk all branches instead."""

    def accepts(self, depth: int, weight: float, limit: float, index: int = 0) -> bool:
        """True with probability min(1, weight / limit), never if `weight` is 0.

        Args:
            depth: 0 for the first draft token.
            weight: 0 or more.
            limit: 0 or more.
            index: of the coin among those for the same depth.
        """

    def draw(self, depth: int, weights: Tensor, purpose: Purpose) -> int:
        """A token id with probability proportional to `weights` [V], some of them positive."""


@dataclass(frozen=True, slots=True)
class KeyedChance:
    """Randomness of one sequence in one step, from keyed noise.

    Args:
        seed: of the request.
        choice: of the sequence.
        position: absolute index of the first draft token.
        step: must differ between the sequence's steps under `block`, which looks at the noise
            of positions that it then leaves to the next step; 0 is exact under `rejection`.
    """

    seed: int
    choice: int
    position: int
    step: int = 0

    def accepts(self, depth: int, weight: float, limit: float, index: int = 0) -> bool:
        """u * limit < weight, strictly: u may be 0, and weight 0 is never accepted."""
        return uniform(self._key(depth, Purpose.ACCEPT, index)) * limit < weight

    def draw(self, depth: int, weights: Tensor, purpose: Purpose) -> int:
        """An exponential race over the tokens of positive weight."""
        return race_row(self._key(depth, purpose), None, weights.double().log())

    def _key(self, depth: int, purpose: Purpose, index: int = 0) -> int:
        position = self.position + depth
        return noise_key(self.seed, self.choice, position, purpose, self.step, index)


def probabilities(processed: Tensor) -> Tensor:
    """Softmax of `process_logits`'s rows [R, V] in float64, each row as if it were alone."""
    return torch.stack([row.double().softmax(0) for row in processed])


def match(target_tokens: Sequence[int], draft: Sequence[int]) -> int:
    """How many draft tokens equal what the target chose.

    Args:
        target_tokens: the target's own k + 1 tokens; entry i is chosen with the first i draft
            tokens before it. Entry `match(...)` is the correction or bonus.
        draft: k tokens from anywhere.
    """
    if len(target_tokens) != len(draft) + 1:
        raise ValueError(
            f"{len(draft)} draft tokens need {len(draft) + 1} target tokens, "
            f"not {len(target_tokens)}."
        )
    for depth, token in enumerate(draft):
        if token != target_tokens[depth]:
            return depth
    return len(draft)


def rejection(target: Rows, draft: Sequence[int], proposal: Tensor, chance: Chance) -> Outcome:
    """Speculative sampling: accept with probability min(1, p / q), else correct and stop.

    Args:
        target: k + 1 rows of probabilities p; row i follows the first i draft tokens. None is
            looked at beyond the first rejection.
        draft: k tokens; token i was drawn from proposal[i], whether or not to draft it was
            decided without knowing it.
        proposal: [k, V] probabilities q, exactly those the drafts were drawn from.
        chance: independent of the noise the drafts were drawn with.
    """
    for depth, token in enumerate(draft):
        p, q = float(target[depth][token]), float(proposal[depth, token])
        if not chance.accepts(depth, p, q):
            residual = _residual(1.0, target[depth], proposal[depth])
            return Outcome(depth, chance.draw(depth, residual, Purpose.RESIDUAL))
    return Outcome(len(draft), chance.draw(len(draft), target[len(draft)], Purpose.BONUS))


def block(target: Rows, draft: Sequence[int], proposal: Tensor, chance: Chance) -> Outcome:
    """Block verification: the draft is judged as a whole, the last success counts.

    Arguments as of `rejection`; `chance` must be new in every step (see `KeyedChance`).
    """
    accepted, kept, carry = 0, 1.0, 1.0
    for depth, token in enumerate(draft):
        p, q = float(target[depth][token]), float(proposal[depth, token])
        carry = min(1.0, carry * p / q) if q > 0.0 else 0.0
        if carry == 0.0:
            break  # nothing beyond an impossible token can be kept
        weight, limit = carry, 1.0
        if depth + 1 < len(draft):
            weight = float(_excess(carry, target[depth + 1], proposal[depth + 1]).sum())
            limit = weight + 1.0 - carry
            if limit <= 0.0:
                weight = limit = 1.0
        if chance.accepts(depth, weight, limit):
            accepted, kept = depth + 1, carry
    if accepted == len(draft):
        return Outcome(accepted, chance.draw(accepted, target[accepted], Purpose.BONUS))
    residual = _residual(kept, target[accepted], proposal[accepted])
    return Outcome(accepted, chance.draw(accepted, residual, Purpose.RESIDUAL))


def tree_rejection(
    target: Rows, draft: Sequence[int], parents: Sequence[int], proposal: Tensor, chance: Chance
) -> tuple[list[int], int]:
    """Recursive rejection (multi-round speculative sampling, as in SpecInfer): at each node its
    children are tried in order, each against what the ones refused before it have left of p.

    Args:
        target: k + 1 rows of probabilities p: row 0 follows the committed tokens, row i + 1
            node i. None is looked at but those of the nodes that are kept.
        draft: k tokens.
        parents: of each, the index of the one it follows, below its own; -1 = none.
        proposal: [k, V] probabilities q: of each node what it was drawn from, given the siblings
            before it; whether to draft it was decided without knowing it.
        chance: independent of the noise the drafts were drawn with.

    Returns:
        The nodes that are kept, and the token that follows them.
    """
    way: list[int] = []
    node = -1
    while True:
        depth, weights, family = len(way), target[node + 1], children(node, parents)
        for index, child in enumerate(family):
            p, q = float(weights[draft[child]]), float(proposal[child, draft[child]])
            if chance.accepts(depth, p, q, index):
                way.append(child)
                node = child
                break
            residual = _residual(1.0, weights, proposal[child])
            weights = residual / residual.sum()
        else:
            purpose = Purpose.RESIDUAL if family else Purpose.BONUS
            return way, chance.draw(depth, weights, purpose)


def _excess(scale: float, p: Tensor, q: Tensor) -> Tensor:
    """max(scale * p - q, 0) in float64."""
    return (scale * p.double() - q.double()).clamp_(min=0.0)


def _residual(scale: float, p: Tensor, q: Tensor) -> Tensor:
    """Weights of the correction: the excess, or p where rounding left no excess at all (then p
    and q are equal, and rejecting had no probability to begin with)."""
    excess = _excess(scale, p, q)
    return excess if bool(excess.any()) else p
