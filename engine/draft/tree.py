"""What a drafter's tree must be, and what of it may be checked; its shape is `engine.tree`'s."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def check_parents(tokens: Seq[int], parents: Seq[int]) -> None:
    """Refuses what is no tree.

    Raises:
        ValueError: naming the node.
    """
    if len(parents) != len(tokens):
        raise ValueError(f"{len(tokens)} draft tokens have {len(parents)} parents; give each one")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"the parent of draft token {node} is {parent}; it must lie from -1 (the last "
                f"committed token) to {node - 1}"
            )


def prune(
    tokens: Seq[int], parents: Seq[int], budget: int, depth: int, vocab_size: int
) -> list[int]:
    """Nodes that may be checked, in order: the first `budget` ones at most `depth` deep, without
    those whose id the target does not know and all that follows them.

    What is left out does not depend on tokens that the target knows, so that whatever rule judges
    the rest is still lossless.
    """
    kept: dict[int, int] = {}  # node -> its depth
    for node in range(min(budget, len(tokens))):
        known = 0 <= tokens[node] < vocab_size
        above = 0 if parents[node] == -1 else kept.get(parents[node], depth)
        if known and above < depth:
            kept[node] = above + 1
    return list(kept)


def renumber(nodes: Seq[int], parents: Seq[int]) -> list[int]:
    """Parents of the nodes that are kept, each of which has its own among them, by their new
    numbers."""
    new = {node: number for number, node in enumerate(nodes)} | {-1: -1}
    return [new[parents[node]] for node in nodes]
