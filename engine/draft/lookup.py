"""The `lookup` drafter: repeats what followed the same words earlier in the same request, or in
an answer that the same tenant was given before.

The field calls this n-gram speculation or prompt lookup decoding. Here the n-gram has no fixed
n: a suffix automaton finds the longest suffix of the text that occurred before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.cache.pages import PRIVATE
from engine.draft.automaton import SuffixAutomaton
from engine.draft.drafter import DraftProposal, StepView
from engine.draft.entry import DrafterContext
from engine.draft.prediction import PredictionCursor
from engine.draft.store import AnswerStore, StoreCursor
from engine.sequence import Sequence

#: Shortest repeated suffix, in tokens, that is worth a guess.
MIN_MATCH = 2

#: Buckets of what a draft rests on: own matches of 2, 3, 4-5, 6-9, 10 and more tokens; a
#: followed prediction; stored matches of 4-7, 8-15, 16-31, 32-63, 64 and more.
_LONGEST = 4
PREDICTED = 5
STORED = 6


@dataclass(slots=True)
class _Memory:
    """What the drafter knows of one sequence."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursor: PredictionCursor | None = None
    stored: StoreCursor | None = None
    predicted: bool = False  # the last draft came from the caller's prediction


class LookupDrafter:
    """Drafts from a suffix automaton over each request's prompt and output, from the caller's
    prediction of the answer while the output follows it, and from past answers where they match
    more of the text than the request itself does; costs no model.

    Its proposals are deterministic, so *match* verification accepts a draft token x with
    probability p(x), which no other rule could improve.

    Args:
        min_match: shortest repeated suffix of the own text to draft from, in tokens.
        store: of past answers, which grows by every sequence that ends; None = keep none.
        branches: whether drafts from the own text may branch; lengths are budgets of nodes then.
    """

    name = "lookup"

    def __init__(
        self, min_match: int = MIN_MATCH, store: AnswerStore | None = None, branches: bool = False
    ) -> None:
        self.min_match = min_match
        self._branches = branches
        self._store = store
        self._memories: dict[Sequence, _Memory] = {}

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        drafts = [self._draft(s, length) for s, length in zip(sequences, lengths, strict=True)]
        return DraftProposal([d for d, _ in drafts], parents=[parents for _, parents in drafts])

    def observe(self, view: StepView) -> None:
        """Counts what became of predicted tokens; automata catch up when asked for a draft."""
        for part in view.sequences:
            sequence, verdict = part.sequence, part.verdict
            memory = self._memories.get(sequence)
            if memory is not None and memory.predicted:
                memory.predicted = False
                sequence.accepted_prediction_tokens += verdict.accepted
                sequence.rejected_prediction_tokens += verdict.drafted - verdict.accepted

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`; the answer goes into the store."""
        known = self._memories.pop(sequence, None)
        request = sequence.request
        if known is None or self._store is None or request.cache_salt == PRIVATE:
            return
        answer = sequence.tokens[sequence.prompt_length :]
        self._store.add(request.cache_salt, request.prompt, answer)

    def outlook(self, sequence: Sequence) -> int | None:
        """How promising a draft would be: a bucket that says what it would rest on, or None
        where there is nothing to offer."""
        memory = self._catch_up(sequence)
        if memory.cursor is not None and memory.cursor.draft(1):
            return PREDICTED
        length = memory.automaton.match_length
        if memory.stored is not None and memory.stored.length > length:
            return STORED + min(_LONGEST, (memory.stored.length // 4).bit_length() - 1)
        if length < self.min_match:
            return None
        return min(_LONGEST, (length - self.min_match).bit_length())

    def _draft(self, sequence: Sequence, length: int) -> tuple[list[int], list[int] | None]:
        """Tokens, and their parents if they may branch."""
        if length == 0:
            return [], None
        memory = self._catch_up(sequence)
        if memory.cursor is not None and (draft := memory.cursor.draft(length)):
            memory.predicted = True
            return draft, None
        memory.predicted = False
        stored, own = memory.stored, memory.automaton
        if stored is not None and stored.length > own.match_length:
            return stored.draft(length), None
        if self._branches:
            return own.tree(length, sequence.max_depth, self.min_match)
        return own.draft(length, self.min_match), None

    def _catch_up(self, sequence: Sequence) -> _Memory:
        """Reads the committed tokens it has not seen."""
        memory = self._memories.get(sequence)
        if memory is None:
            memory = self._memories[sequence] = _Memory()
            if sequence.request.speculation.prediction:
                memory.cursor = PredictionCursor(sequence.request.speculation.prediction)
            if self._store is not None:
                memory.stored = StoreCursor()
        known = memory.automaton.num_tokens
        if known < len(sequence.tokens):
            memory.automaton.extend(sequence.tokens[known:])
            if memory.cursor is not None:
                memory.cursor.follow(sequence.tokens[max(known, sequence.prompt_length) :])
            if self._store is not None and memory.stored is not None:
                salt = sequence.request.cache_salt
                self._store.follow(memory.stored, salt, sequence.tokens, known)
        return memory


def make_drafter(context: DrafterContext) -> LookupDrafter:
    """The drafter that the settings ask for."""
    speculation = context.config.speculation
    memory, branches = speculation.lookup_store_bytes, speculation.max_nodes > 0
    return LookupDrafter(store=AnswerStore(memory) if memory else None, branches=branches)
