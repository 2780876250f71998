"""Drafts and grammars: forced text is a draft that costs nothing, and no draft leaves a grammar."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.draft.drafter import DraftProposal, StepView
from engine.draft.entry import DrafterContext
from engine.sequence import Sequence


class GrammarDrafter:
    """Drafts what a request's grammar leaves no choice about: keys, quotes and brackets of a JSON
    schema, for instance. It is accepted wherever the model spells it as its tokenizer does."""

    name = "grammar"

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        return DraftProposal(
            [_forced(s)[:length] for s, length in zip(sequences, lengths, strict=True)]
        )

    def outlook(self, sequence: Sequence) -> int | None:
        """Whether anything is forced; all that is rests on the same."""
        return 0 if _forced(sequence) else None

    def observe(self, view: StepView) -> None:
        """What a grammar forces depends on nothing but the output."""

    def release(self, sequence: Sequence) -> None:
        """Keeps nothing."""


def _forced(sequence: Sequence) -> list[int]:
    return [] if sequence.grammar is None else sequence.grammar.forced(sequence.output)


def make_drafter(_: DrafterContext) -> GrammarDrafter:
    """The drafter; it needs nothing of the engine."""
    return GrammarDrafter()


def within_grammars(proposal: DraftProposal, sequences: Seq[Sequence]) -> DraftProposal:
    """A proposal without what the sequences' grammars forbid, and all that follows it.

    Under rules that weigh a draft by its probabilities, the first forbidden token itself stays:
    the rule is sure to refuse it, and draws from the right remainder only if it does. Had the
    draft been cut before it, whether that token is checked would depend on what it is.

    Args:
        proposal: chains, or trees by `parents`.
        sequences: whose they are.
    """
    concerned = [i for i, s in enumerate(sequences) if s.grammar is not None and proposal.tokens[i]]
    if not concerned:
        return proposal
    tokens = list(proposal.tokens)
    weights = None if proposal.probabilities is None else list(proposal.probabilities)
    parents = None if proposal.parents is None else list(proposal.parents)
    for i in concerned:
        own = None if weights is None else weights[i]
        weighed = own is not None and sequences[i].verification != "match"
        tree = None if parents is None else parents[i]
        nodes = _kept(sequences[i], tokens[i], tree, weighed)
        if len(nodes) == len(tokens[i]):
            continue
        tokens[i] = [tokens[i][node] for node in nodes]
        if weights is not None and own is not None:
            weights[i] = own[nodes]
        if parents is not None and tree is not None:
            place = {-1: -1} | {node: n for n, node in enumerate(nodes)}
            parents[i] = [place[tree[node]] for node in nodes]
    return replace(proposal, tokens=tokens, probabilities=weights, parents=parents)


def _kept(
    sequence: Sequence, tokens: Seq[int], parents: Seq[int] | None, weighed: bool
) -> list[int]:
    """Places in a draft that may be checked, in order.

    Args:
        weighed: keep a forbidden token, but nothing behind it.
    """
    grammar, output = sequence.grammar, sequence.output
    assert grammar is not None
    if parents is None:
        fits = grammar.fitting(output, tokens)
        return list(range(min(len(tokens), fits + weighed)))
    wanted = sequence.request.sampling.grammar
    ends = frozenset() if wanted is None else wanted.end_tokens
    paths: dict[int, list[int]] = {-1: output}
    kept = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in paths:
            continue
        fits = grammar.fitting(paths[parent], [token])
        if fits and token not in ends:  # what is behind an end is never said
            paths[node] = [*paths[parent], token]
        if fits or weighed:
            kept.append(node)
    return kept
