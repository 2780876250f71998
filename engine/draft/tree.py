"""Drafts that branch: each node's token follows its parent's.

`parents[i]` is the index of node i's parent within the draft, below i; -1 stands for the last
committed token. So every leading part of a draft is a tree itself, and a chain is -1, 0, 1, ...
"""

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


def prune(tokens: Seq[int], parents: Seq[int], budget: int, vocab_size: int) -> list[int]:
    """Nodes that may be checked, in order: the first `budget` ones, without those whose id the
    target does not know and all that follows them."""
    kept: set[int] = set()
    for node in range(min(budget, len(tokens))):
        known = 0 <= tokens[node] < vocab_size
        if known and (parents[node] == -1 or parents[node] in kept):
            kept.add(node)
    return sorted(kept)


def first_path(nodes: Seq[int], parents: Seq[int]) -> list[int]:
    """The first way from the root to a leaf: of several children always the one that was drafted
    first. Of a chain it is everything.

    A chain is all that attention and judge check so far. It stays lossless under every rule:
    which child is followed depends on the order only, never on its token or probability.

    Args:
        nodes: those that count, in order; with a node its parent.
        parents: of every node of the draft.
    """
    path: list[int] = []
    last = -1
    for node in nodes:
        if parents[node] == last:
            path.append(node)
            last = node
    return path
