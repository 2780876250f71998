"""From a step's logits to the tokens that are kept: the one interface for drawing.

Everything about a step's logits that decides what is said is asked for in a single call, so
that a sampler may leave them on a device and return nothing but the kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.processors import Selector, process_logits
from engine.sampling.rows import SamplingRow
from engine.sampling.verify import (
    Chance,
    KeyedChance,
    Outcome,
    Rows,
    block,
    probabilities,
    rejection,
    tree_rejection,
)
from engine.tree import follow

_RULES: dict[str, Callable[[Rows, Sequence[int], Tensor, Chance], Outcome]] = {
    "rejection": rejection,
    "block": block,
}


@dataclass(frozen=True, slots=True)
class Draw:
    """What is to be drawn for one sequence.

    Attributes:
        rows: of the step's logits, its own. The last k + 1 follow its committed tokens and each
            of its k draft tokens; those before, if any, only have to be sound.
        draft: k draft tokens; None = nothing is drawn.
        context: what the row after so many draft tokens is about; of a draft that branches, what
            the row of the last committed token (0) or of a node (its index + 1) is about. Under
            rejection rules its `step` names the step, so that no coin is ever thrown twice.
        rule: "match", "rejection" or "block".
        proposal: [k, V'] probabilities that the draft was drawn from, for rules that need them;
            ids from V' on had none.
        parents: of a draft that branches: see `engine.tree`. None = a chain.
    """

    rows: range
    draft: Sequence[int] | None
    context: Callable[[int], SamplingRow]
    rule: str = "match"
    proposal: Tensor | None = None
    parents: Sequence[int] | None = None

    def way(self, tokens: Sequence[int]) -> Sequence[int]:
        """The draft tokens, by their indices, that a text goes along."""
        draft = self.draft or ()
        if self.parents is not None:
            return follow(tokens, draft, self.parents)
        same = (a == b for a, b in zip(tokens, draft, strict=False))
        return range(len(list(takewhile(bool, same))))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of it.

    Attributes:
        tokens: the accepted draft tokens, then the target's own; none if nothing was drawn.
        sound: whether all of its rows that plain decoding would have had are numbers: rows
            behind a refused draft token decide nothing.
    """

    tokens: list[int]
    sound: bool


class Sampler(Protocol):
    """Draws the tokens of a step. All samplers give the same tokens, bit for bit."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """What every sequence says next.

        Args:
            logits: [R, V] of the step, wherever they are; never changed.
            draws: one for each sequence.
        """
        ...


class RowSampler:
    """Row by row, each as if it were alone.

    Under "match" the target's own token is drawn at every row, and a draft token kept while it
    is equal. Rows are drawn depth by depth for all sequences at once, since what follows a
    refused draft token is never needed.

    Args:
        vocab_size: ids from here on are padding of the model's output layer.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """See `Sampler.draw`."""
        selector = Selector(logits, self.vocab_size)
        kept: list[list[int]] = [self._weigh(logits, draw) for draw in draws]
        self._match(selector, draws, kept)
        sound = selector.sound()
        return [
            Drawn(tokens, all(sound[row] for row in deciding(draw, tokens)))
            for draw, tokens in zip(draws, kept, strict=True)
        ]

    def _weigh(self, logits: Tensor, draw: Draw) -> list[int]:
        """What a draft with probabilities is worth by them; nothing for all others."""
        if draw.draft is None or draw.proposal is None or draw.rule == "match":
            return []
        own = logits[drawn_from(draw)][:, : self.vocab_size]
        return weigh_draft(draw, own)

    def _match(self, selector: Selector, draws: Sequence[Draw], kept: list[list[int]]) -> None:
        """Appends to `kept` the target's own tokens of every sequence that has none yet, up to
        the first that differs from its draft: rows beyond that one are never looked at."""
        at = {  # the row that each of them has come to, among those it draws from
            i: 0
            for i, (draw, tokens) in enumerate(zip(draws, kept, strict=True))
            if draw.draft is not None and not tokens
        }
        while at:
            picks = [drawn_from(draws[i]).start + row for i, row in at.items()]
            tokens = selector.select(picks, [draws[i].context(row) for i, row in at.items()])
            for i, token in zip(at, tokens, strict=True):
                kept[i].append(token)
            ways = {i: draws[i].way(kept[i]) for i in at}
            at = {i: way[-1] + 1 for i, way in ways.items() if len(way) == len(kept[i])}


def drawn_from(draw: Draw) -> slice:
    """The rows that follow its committed tokens and each of its draft tokens."""
    return slice(draw.rows.stop - 1 - len(draw.draft or ()), draw.rows.stop)


def deciding(draw: Draw, kept: Sequence[int]) -> list[int]:
    """The rows that plain decoding would have had for the tokens that were kept."""
    if draw.draft is None:
        return list(draw.rows)
    first = len(draw.rows) - len(draw.draft)
    return [*draw.rows[:first], *(draw.rows[first + node] for node in draw.way(kept[:-1]))]


def weigh_draft(draw: Draw, logits: Tensor) -> list[int]:
    """Judges one sequence's draft by probabilities; one that branches by `tree_rejection`,
    whichever of the two rules is wanted.

    Args:
        draw: has k draft tokens, their probabilities, and "rejection" or "block" for a rule.
        logits: [k + 1, V] of the target, without padding of the vocabulary.

    Returns:
        The accepted draft tokens, then the correction or bonus.
    """
    draft, proposal, first = draw.draft, draw.proposal, draw.context(0)
    assert draft is not None
    assert proposal is not None
    missing = logits.shape[1] - proposal.shape[1]
    if missing:
        proposal = torch.nn.functional.pad(proposal, (0, missing))
    chance = KeyedChance(first.seed, first.choice, first.position, first.step)
    rows = _LazyRows(logits, draw.context)
    if draw.parents is not None:
        way, token = tree_rejection(rows, draft, draw.parents, proposal, chance)
        return [*(draft[node] for node in way), token]
    outcome = _RULES[draw.rule](rows, draft, proposal, chance)
    return [*draft[: outcome.accepted], outcome.token]


class _LazyRows:
    """The target's distributions, each computed at its first use: rows beyond the first
    rejection never are."""

    def __init__(self, logits: Tensor, contexts: Callable[[int], SamplingRow]) -> None:
        self._logits = logits
        self._contexts = contexts
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, depth: int, /) -> Tensor:
        if depth not in self._rows:
            processed = process_logits(self._logits[depth : depth + 1], [self._contexts(depth)])
            self._rows[depth] = probabilities(processed)[0]
        return self._rows[depth]
