"""The `lookup` drafter: repeats what followed the same words earlier in the same request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.draft.automaton import SuffixAutomaton
from engine.draft.drafter import DraftProposal, Verdict
from engine.draft.prediction import PredictionCursor
from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch

#: Shortest repeated suffix, in tokens, that is worth a guess.
MIN_MATCH = 2

#: Buckets of match length: 2, 3, 4-5, 6-9, 10 and more; one further for predictions.
_BUCKETS = 5


@dataclass(slots=True)
class _Memory:
    """What the drafter knows of one sequence."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursor: PredictionCursor | None = None
    predicted: bool = False  # the last draft came from the caller's prediction


class LookupDrafter:
    """Drafts from a suffix automaton over each request's prompt and output, and from the
    caller's prediction of the answer while the output follows it; costs no model.

    Its proposals are deterministic, so *match* verification accepts a draft token x with
    probability p(x), which no other rule could improve.
    """

    name = "lookup"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        self.min_match = min_match
        self._memories: dict[Sequence, _Memory] = {}

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
        """Counts what became of predicted tokens; automata catch up when asked for a draft."""
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            memory = self._memories.get(sequence)
            if memory is not None and memory.predicted:
                memory.predicted = False
                sequence.accepted_prediction_tokens += verdict.accepted
                sequence.rejected_prediction_tokens += verdict.drafted - verdict.accepted

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`."""
        self._memories.pop(sequence, None)

    def outlook(self, sequence: Sequence) -> int | None:
        """How promising a draft would be: a bucket that grows with the length of the match, or
        None where there is nothing to offer. A followed prediction is the best of all."""
        memory = self._catch_up(sequence)
        if memory.cursor is not None and memory.cursor.draft(1):
            return _BUCKETS
        length = memory.automaton.match_length
        if length < self.min_match:
            return None
        return min(_BUCKETS - 1, (length - self.min_match).bit_length())

    def _draft(self, sequence: Sequence, length: int) -> list[int]:
        if length == 0:
            return []
        memory = self._catch_up(sequence)
        if memory.cursor is not None:
            draft = memory.cursor.draft(length)
            memory.predicted = bool(draft)
            if draft:
                return draft
        return memory.automaton.draft(length, self.min_match)

    def _catch_up(self, sequence: Sequence) -> _Memory:
        """Reads the committed tokens it has not seen."""
        memory = self._memories.get(sequence)
        if memory is None:
            memory = self._memories[sequence] = _Memory()
            if sequence.request.speculation.prediction:
                memory.cursor = PredictionCursor(sequence.request.speculation.prediction)
        known = memory.automaton.num_tokens
        if known < len(sequence.tokens):
            memory.automaton.extend(sequence.tokens[known:])
            if memory.cursor is not None:
                memory.cursor.follow(sequence.tokens[max(known, sequence.prompt_length) :])
        return memory
