"""All drafters of a server behind one `propose`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.draft.drafter import Drafter, DrafterTraits, DraftProposal, SequenceView, StepView
from engine.draft.tree import check_parents, prune, renumber
from engine.sequence import Sequence
from engine.tree import branches, is_chain

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
        traits: by name; whoever has none named has the default ones.
        trees: whether the target takes drafts that branch; otherwise of each the first way is
            kept.
        clock: seconds, for what each drafter takes: the draft cost.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        traits: Mapping[str, DrafterTraits] = MappingProxyType({}),
        *,
        trees: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._traits = {name: traits.get(name, DrafterTraits()) for name in drafters}
        self._trees = trees
        self._clock = clock

    @property
    def names(self) -> tuple[str, ...]:
        """Drafters that work."""
        return tuple(self._drafters)

    @property
    def prediction_readers(self) -> tuple[str, ...]:
        """Drafters that work and draft from a request's `prediction`."""
        return tuple(name for name in self._drafters if self._traits[name].reads_predictions)

    @property
    def grammar_readers(self) -> tuple[str, ...]:
        """Drafters that work and draft from a request's grammar."""
        return tuple(name for name in self._drafters if self._traits[name].reads_grammars)

    # -- before a step -------------------------------------------------------------------

    def outlook(self, name: str, sequence: Sequence) -> int | None:
        """See `Advisor.outlook`."""
        bucket: int | None = self._ask(name, "outlook", 0, sequence)
        return bucket if name in self._drafters else None

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

    def features(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """Layers whose features a pass over these sequences must bring, for `observe`."""
        layers: set[int] = set()
        for name in {name for sequence in sequences for name in self._drafters_of(sequence)}:
            layers.update(self._traits[name].features)
        return tuple(sorted(layers))

    def propose(
        self, sequences: Seq[Sequence], lengths: Seq[int], drafters: Seq[str]
    ) -> DraftProposal:
        """One list of draft tokens per sequence, never longer than its length, nor deeper than the
        sequence may go.

        Args:
            drafters: who drafts for each sequence; a name that is not, or no longer, here drafts
                nothing.
        """
        tokens: list[list[int]] = [[] for _ in sequences]
        weights: list[torch.Tensor | None] = [None for _ in sequences]
        parents: list[list[int] | None] = [None for _ in sequences]
        seconds: dict[str, float] = {}
        forwards = 0
        groups: dict[str, list[int]] = defaultdict(list)
        for i, (_, length, name) in enumerate(zip(sequences, lengths, drafters, strict=True)):
            if length and name in self._drafters:
                groups[name].append(i)
        for name, members in groups.items():
            began = self._clock()
            with self._switched_off_if_it_raises(name) as drafter:
                asked, own = [sequences[i] for i in members], [lengths[i] for i in members]
                if not self._traits[name].branches:
                    own = [min(n, s.max_depth) for s, n in zip(asked, own, strict=True)]
                proposal = drafter.propose(asked, own)
                forwards += proposal.forwards
                for i, cut in zip(members, self._cut(proposal, asked, own), strict=True):
                    tokens[i], weights[i], parents[i] = cut
            seconds[name] = self._clock() - began
        return DraftProposal(tokens, weights, seconds, forwards, parents, drafters)

    def observe(self, view: StepView) -> None:
        """Tells every drafter what became of the sequences it may draft for.

        Args:
            view: of the whole step, with the features that `features` has asked for.
        """
        groups: dict[str, list[SequenceView]] = defaultdict(list)
        for part in view.sequences:
            for name in self._drafters_of(part.sequence):
                groups[name].append(part)
        for name, parts in groups.items():
            with self._switched_off_if_it_raises(name) as drafter:
                features = {layer: view.features[layer] for layer in self._traits[name].features}
                drafter.observe(StepView(tuple(parts), features))

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

    def _drafters_of(self, sequence: Sequence) -> list[str]:
        """Drafters that may be asked for a sequence: none if it never drafts."""
        if sequence.draft_limit == 0:
            return []
        return [name for name in sequence.drafters if name in self._drafters]

    def _cut(
        self, proposal: DraftProposal, sequences: Seq[Sequence], lengths: Seq[int]
    ) -> Iterator[tuple[list[int], torch.Tensor | None, list[int] | None]]:
        """A drafter's drafts within their lengths and the vocabulary; what each token of theirs
        was drawn from; and their parents, where they branch."""
        weights = proposal.probabilities or [None] * len(lengths)
        trees = proposal.parents or [None] * len(lengths)
        drafts = zip(sequences, proposal.tokens, weights, trees, lengths, strict=True)
        for sequence, draft, rows, tree, length in drafts:
            if tree is None:
                kept = self._trim(draft, min(length, sequence.max_depth))
                yield kept, rows if rows is None else rows[: len(kept)], None
                continue
            check_parents(draft, tree)
            nodes = prune(draft, tree, length, sequence.max_depth, self._vocab_size)
            if not self._trees:
                nodes = [nodes[n] for n in branches(renumber(nodes, tree))[0].way]
            parents = renumber(nodes, tree)
            chosen = rows if rows is None or nodes == list(range(len(rows))) else rows[nodes]
            yield [draft[n] for n in nodes], chosen, None if is_chain(parents) else parents

    def _trim(self, draft: list[int], length: int) -> list[int]:
        kept = draft[:length]
        for i, token in enumerate(kept):
            if not 0 <= token < self._vocab_size:
                return kept[:i]
        return kept
