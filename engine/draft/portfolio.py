"""All drafters of a server behind one `propose`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.draft.drafter import Drafter, DraftProposal, Verdict
from engine.sequence import Sequence

logger = logging.getLogger(__name__)


class DrafterPortfolio:
    """Sends every sequence to its drafter, each drafter once per step with all its sequences.

    A drafter that raises is switched off for good and the step goes on without its guesses:
    no answer may depend on a drafter, and neither may a request's survival.

    Args:
        drafters: by name.
        vocab_size: a draft is cut before the first id that the target does not know.
    """

    def __init__(self, drafters: Mapping[str, Drafter], vocab_size: int) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size

    @property
    def names(self) -> tuple[str, ...]:
        """Drafters that work."""
        return tuple(self._drafters)

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """One list of draft tokens per sequence, never longer than its length."""
        tokens: list[list[int]] = [[] for _ in sequences]
        groups: dict[str, list[int]] = defaultdict(list)
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if length and sequence.drafter in self._drafters:
                groups[sequence.drafter].append(i)
        for name, members in groups.items():
            drafts = self._ask(name, [sequences[i] for i in members], [lengths[i] for i in members])
            for i, draft in zip(members, drafts, strict=True):
                tokens[i] = self._trim(draft, lengths[i])
        return DraftProposal(tokens)

    def commit(self, sequences: Seq[Sequence], verdicts: Seq[Verdict]) -> None:
        """Tells every drafter what became of its sequences."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, sequence in enumerate(sequences):
            if sequence.drafter in self._drafters:
                groups[sequence.drafter].append(i)
        for name, members in groups.items():
            self._drafters[name].commit(
                [sequences[i] for i in members], [verdicts[i] for i in members], None
            )

    def release(self, sequence: Sequence) -> None:
        """Lets every drafter forget a sequence that has ended."""
        for drafter in self._drafters.values():
            drafter.release(sequence)

    def _ask(self, name: str, sequences: Seq[Sequence], lengths: Seq[int]) -> list[list[int]]:
        try:
            return self._drafters[name].propose(sequences, lengths).tokens
        except Exception:
            logger.exception("drafter %s failed and is switched off; answers are unaffected", name)
            del self._drafters[name]
            return [[] for _ in sequences]

    def _trim(self, draft: list[int], length: int) -> list[int]:
        kept = draft[:length]
        for i, token in enumerate(kept):
            if not 0 <= token < self._vocab_size:
                return kept[:i]
        return kept
