"""Which lossless rule judges a sequence's drafts, and the rule applied to the target's rows.

====================================  ===========================================
a step in which ...                   is judged by
====================================  ===========================================
the request is greedy, or has a seed  match: the very tokens of plain decoding
the draft has no probabilities        match: no rule keeps more of it
all others                            `UNSEEDED`, or the rule that was configured
====================================  ===========================================

Sampling without a seed promises a distribution and no particular text, so the last line may
spend that freedom on keeping more of each draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampling.processors import process_logits
from engine.sampling.rows import SamplingRow
from engine.sampling.verify import (
    Chance,
    KeyedChance,
    Outcome,
    Rows,
    block,
    probabilities,
    rejection,
)
from engine.types import SamplingParams

#: What "auto" means for unseeded sampling from a probabilistic draft: docs/sampling.md has the
#: measurement.
UNSEEDED = "block"

_RULES: dict[str, Callable[[Rows, Sequence[int], Tensor, Chance], Outcome]] = {
    "rejection": rejection,
    "block": block,
}


def choose_rule(policy: str, params: SamplingParams) -> str:
    """The rule for one request's drafts, should they come with probabilities.

    Args:
        policy: "auto", "match", "rejection" or "block".
        params: of the request.

    Returns:
        "match", "rejection" or "block".
    """
    if params.greedy or params.seed is not None:
        return "match"
    return UNSEEDED if policy == "auto" else policy


def weigh_draft(
    rule: str,
    logits: Tensor,
    contexts: Callable[[int], SamplingRow],
    draft: Sequence[int],
    proposal: Tensor,
) -> list[int]:
    """Judges one sequence's draft by probabilities.

    Args:
        rule: "rejection" or "block".
        logits: [k + 1, V] of the target, without padding of the vocabulary.
        contexts: what the row after so many draft tokens is about; `step` names the step, so
            that no coin is ever thrown twice.
        draft: k tokens.
        proposal: [k, V'] probabilities they were drawn from; ids from V' on had none.

    Returns:
        The accepted draft tokens, then the correction or bonus.
    """
    first = contexts(0)
    missing = logits.shape[1] - proposal.shape[1]
    if missing:
        proposal = torch.nn.functional.pad(proposal, (0, missing))
    chance = KeyedChance(first.seed, first.choice, first.position, first.step)
    outcome = _RULES[rule](_LazyRows(logits, contexts), draft, proposal, chance)
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
