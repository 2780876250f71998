"""The `lookup` drafter: repeats what followed the same words earlier in the same request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from engine.draft.automaton import SuffixAutomaton
from engine.draft.drafter import DraftProposal, Verdict
from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch

#: Shortest repeated suffix, in tokens, that is worth a guess.
MIN_MATCH = 2


class LookupDrafter:
    """Drafts from a suffix automaton over each request's prompt and output; costs no model.

    Its proposals are deterministic, so *match* verification accepts a draft token x with
    probability p(x), which no other rule could improve.
    """

    name = "lookup"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        self.min_match = min_match
        self._automata: dict[Sequence, SuffixAutomaton] = {}

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        return DraftProposal(
            [self._draft(s, length) for s, length in zip(sequences, lengths, strict=True)]
        )

    def commit(
        self,
        sequences: Seq[Sequence],
        verdicts: Seq[Verdict],
        hidden_states: torch.Tensor | None,
    ) -> None:
        """Nothing to do: the automaton catches up when it is asked for a draft."""

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`."""
        self._automata.pop(sequence, None)

    def _draft(self, sequence: Sequence, length: int) -> list[int]:
        if length == 0:
            return []
        automaton = self._automata.get(sequence)
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton()
        automaton.extend(sequence.tokens[automaton.num_tokens :])
        return automaton.draft(length, self.min_match)
