"""All drafters of a server behind one `propose`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from engine.draft.drafter import Drafter, DraftProposal, Verdict
from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class DrafterPortfolio:
    """Sends every sequence to its drafter, each drafter once per step with all its sequences;
    what the planner wants to know beforehand (see `Advisor`) it asks here, too.

    A drafter that raises is switched off for good and the step goes on without its guesses:
    no answer may depend on a drafter, and neither may a request's survival.

    Args:
        drafters: by name.
        vocab_size: a draft is cut before the first id that the target does not know.
        clock: seconds, for what each drafter takes.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def names(self) -> tuple[str, ...]:
        """Drafters that work."""
        return tuple(self._drafters)

    # -- before a step -------------------------------------------------------------------

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """See `Advisor.outlook`."""
        bucket: int | None = self._ask(name, "outlook", 0, sequence)
        return bucket if name in self._drafters else None

    def preview(self, name: str, sequence: Sequence, length: int) -> list[int] | None:
        """See `Advisor.preview`."""
        draft: list[int] | None = self._ask(name, "preview", None, sequence, length)
        return draft

    def backlog(self, name: str, sequence: Sequence) -> int:
        """See `Advisor.backlog`."""
        tokens: int = self._ask(name, "backlog", 0, sequence)
        return tokens

    def _ask(self, name: str, question: str, default: Any, *arguments: object) -> Any:
        """A drafter's answer; the default if it cannot tell. Asked often, so kept short."""
        method = getattr(self._drafters.get(name), question, None)
        if method is None:
            return default
        try:
            return method(*arguments)
        except Exception:
            self._switch_off(name)
            return default

    # -- in a step -----------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """One list of draft tokens per sequence, never longer than its length."""
        tokens: list[list[int]] = [[] for _ in sequences]
        weights: list[torch.Tensor | None] = [None for _ in sequences]
        seconds: dict[str, float] = {}
        forwards = 0
        groups: dict[str, list[int]] = defaultdict(list)
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if length and sequence.drafter in self._drafters:
                groups[sequence.drafter].append(i)
        for name, members in groups.items():
            began = self._clock()
            with self._switched_off_if_it_raises(name) as drafter:
                proposal = drafter.propose(
                    [sequences[i] for i in members], [lengths[i] for i in members]
                )
                forwards += proposal.forwards
                drawn_from = proposal.probabilities or [None] * len(members)
                for i, draft, rows in zip(members, proposal.tokens, drawn_from, strict=True):
                    tokens[i] = self._trim(draft, lengths[i])
                    weights[i] = rows if rows is None else rows[: len(tokens[i])]
            seconds[name] = self._clock() - began
        return DraftProposal(tokens, weights, seconds, forwards)

    def commit(self, sequences: Seq[Sequence], verdicts: Seq[Verdict]) -> None:
        """Tells every drafter what became of the sequences it may draft for."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, sequence in enumerate(sequences):
            for name in sequence.drafters:
                if name in self._drafters:
                    groups[name].append(i)
        for name, members in groups.items():
            with self._switched_off_if_it_raises(name) as drafter:
                drafter.commit(
                    [sequences[i] for i in members], [verdicts[i] for i in members], None
                )

    def release(self, sequence: Sequence) -> None:
        """Lets every drafter forget a sequence that has ended."""
        for name in self.names:
            with self._switched_off_if_it_raises(name) as drafter:
                drafter.release(sequence)

    @contextlib.contextmanager
    def _switched_off_if_it_raises(self, name: str) -> Iterator[Drafter]:
        try:
            yield self._drafters[name]
        except Exception:
            self._switch_off(name)

    def _switch_off(self, name: str) -> None:
        """Called while its exception is handled, which is logged."""
        logger.exception("drafter %s failed and is switched off; answers are unaffected", name)
        del self._drafters[name]

    def _trim(self, draft: list[int], length: int) -> list[int]:
        kept = draft[:length]
        for i, token in enumerate(kept):
            if not 0 <= token < self._vocab_size:
                return kept[:i]
        return kept
