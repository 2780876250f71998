"""`SamplingRow`: what one row of logits needs to know to become a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One position of one sequence that awaits a token.

    Args:
        params: how the caller wants tokens drawn.
        prompt: token ids of the prompt.
        generated: committed tokens after the prompt, then the draft tokens before this row.
        position: absolute index of the token to be drawn; the first token after a prompt of
            length n has position n.
        seed: 64 bits that key the request's noise.
        choice: which of the request's n choices this is.
        eos_token_ids: tokens that end a text of this model.
        step: which of the sequence's steps this is, for draws whose noise must not come again
            when a later step draws the same position anew; 0 for all others.
        allowed: one bit for each token that the request's grammar allows here, as in
            `engine.grammar.Matcher.allowed`; None = it allows all, or there is none.
    """

    params: SamplingParams
    prompt: Sequence[int]
    generated: Sequence[int]
    position: int
    seed: int
    choice: int
    eos_token_ids: frozenset[int]
    step: int = 0
    allowed: bytes | None = None
