"""The `model` drafter where drafts may branch: it keeps the likeliest continuations, not one.

As EAGLE-2 does it: level by level the nodes that are likeliest so far are read, all in one pass,
and each brings its likeliest children; in the end the best nodes of all levels are proposed. Since
a node is never likelier than its parent, they are a tree. Where tokens are sampled, the likeliest
children are those that come first in a race with the noise that the target will use. So drafts
are matched under every rule, and any shape is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from engine.batch import Span
from engine.draft.drafter import DraftProposal, StepView
from engine.draft.entry import DrafterContext
from engine.draft.model import DraftModelLimits, ModelDrafter, _Draft, parts_of
from engine.draft.tree import renumber
from engine.model.passes import Runner, can_branch
from engine.sampling import Purpose, noise_key, process_logits
from engine.sampling.noise import gumbel
from engine.sequence import Sequence
from engine.tree import follow, way_to

#: Tokens, by the draft model's own probability, that take part in a race with the target's noise.
_RACING = 128


@dataclass(slots=True)
class _Tree(_Draft):
    """One sequence's tree in the making; `length` is its budget of nodes.

    Attributes:
        depth: most tokens on a way.
        parents: of each node.
        scores: of each node, the log of how likely the target is to come there.
        read: nodes whose K/V is there, in the order in which it lies behind the text.
        pages: of the sequence, when it was drafted for.
        newest: nodes of the deepest level.
    """

    depth: int = 0
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    newest: int = 0

    def best(self) -> list[int]:
        """The likeliest nodes within the budget, in order."""
        ranked = sorted(range(len(self.tokens)), key=lambda n: (-self.scores[n], n))
        return sorted(ranked[: self.length])

    def to_read(self, level: int) -> list[int]:
        """Nodes of a level, from 1, whose children could still be among the best: as many as a
        level has on average, and no more than there are pages for."""
        if level >= self.depth:
            return []
        first = len(self.tokens) - self.newest
        best = [n for n in self.best() if n >= first]
        width = min(-(-self.length // self.depth), self.length - len(self.read))
        return sorted(sorted(best, key=lambda n: -self.scores[n])[: max(0, width)])


class TreeModelDrafter(ModelDrafter):
    """Draft rounds of a causal language model that follow several continuations at once.

    Lengths are budgets of nodes; how deep a tree may be says the sequence.
    """

    def __init__(
        self, runner: Runner, limits: DraftModelLimits, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(runner, limits, eos_token_ids)
        self._trees: dict[Sequence, _Tree] = {}  # of the step under way

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        self._trees.clear()
        self._forwards = 0
        wanted = []
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            room = self.limits.max_model_len - len(sequence.tokens)
            depth = min(sequence.max_depth, room, length)
            pages = list(sequence.table.pages)
            wanted.append(_Tree(i, sequence, length if depth > 0 else 0, depth=depth, pages=pages))
        found, logits = self._catch_up([tree for tree in wanted if tree.length > 0])
        ready = [tree for tree in found if isinstance(tree, _Tree)]  # all of them
        reading = [(tree, [-1]) for tree in ready]
        level = 1
        while reading:
            self._sprout(reading, logits)
            reading = [(tree, nodes) for tree, _ in reading if (nodes := tree.to_read(level))]
            logits = self._read_nodes(reading)
            level += 1
        self._trees.update((tree.sequence, tree) for tree in ready)
        kept = [tree.best() for tree in wanted]
        return DraftProposal(
            [[tree.tokens[n] for n in best] for tree, best in zip(wanted, kept, strict=True)],
            forwards=self._forwards,
            parents=[renumber(best, t.parents) for t, best in zip(wanted, kept, strict=True)],
        )

    def observe(self, view: StepView) -> None:
        """Brings the K/V of accepted nodes that it has read to where it belongs."""
        moves: list[tuple[int, int]] = []
        size = self.limits.page_size
        for part in view.sequences:
            tree = self._trees.pop(part.sequence, None)
            if tree is None:
                continue
            accepted = part.verdict.emitted[: part.verdict.accepted]
            way = follow(accepted, tree.tokens, tree.parents)
            start = len(part.sequence.tokens) - len(part.verdict.emitted)
            kept = 0
            for node in way:
                if node not in tree.read:
                    break
                places = start + tree.read.index(node), start + kept
                if places[0] != places[1]:
                    old, new = (tree.pages[p // size] * size + p % size for p in places)
                    moves.append((old, new))
                kept += 1
            part.sequence.table.num_cached[self.limits.store] += kept
        if moves and can_branch(self.runner):
            sources, targets = torch.tensor(moves, device=self.runner.device).T.contiguous()
            self.runner.move(sources, targets)

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`."""
        self._trees.pop(sequence, None)

    def _read_nodes(self, reading: Seq[tuple[_Tree, list[int]]]) -> torch.Tensor:
        """Feeds nodes whose parents have been read; returns a row of logits for each."""
        spans = []
        for tree, nodes in reading:
            order = [*tree.read, *nodes]
            parents = renumber(order, tree.parents)
            tokens = [tree.tokens[n] for n in nodes]
            start, table = len(tree.sequence.tokens), tree.sequence.table
            spans.append(Span(tokens, start, table, len(nodes), parents, len(tree.read)))
            tree.read = order
        return self._forward(spans)

    def _sprout(self, reading: Seq[tuple[_Tree, list[int]]], logits: torch.Tensor) -> None:
        """Adds the likeliest children of nodes, from a row of logits for each."""
        rows = [(tree, node) for tree, nodes in reading for node in nodes]
        contexts = []
        for tree, node in rows:
            before = [tree.tokens[n] for n in way_to(node, tree.parents)]
            contexts.append(self._row(tree.sequence, before))
        processed = process_logits(logits, contexts)
        totals = processed.logsumexp(-1).tolist()
        values, ids = processed.topk(min(_RACING, processed.shape[1]))
        for tree, _ in reading:
            tree.newest = 0
        for (tree, node), row, total, top, found in zip(
            rows, contexts, totals, values.double(), ids, strict=True
        ):
            if row.params.greedy:
                likely = top - total
            else:  # by how much each is ahead of the others in the race
                key = noise_key(row.seed, row.choice, row.position, Purpose.TOKEN)
                top, order = (top + gumbel(key, found)).sort(descending=True)
                likely, found = top.log_softmax(0), found[order]
            above = tree.scores[node] if node >= 0 else 0.0
            for token, score in zip(
                found[: tree.length].tolist(), likely[: tree.length].tolist(), strict=True
            ):
                if score > -torch.inf:
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.scores.append(above + score)
                    tree.newest += 1


def make_drafter(context: DrafterContext) -> TreeModelDrafter:
    """The drafter around the draft model that was loaded for it."""
    return TreeModelDrafter(*parts_of(context))
