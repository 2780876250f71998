"""The shape of a draft that branches; of integers alone.

Node i follows its parent: `parents[i]` is the parent's index, below i, or -1 for the last
committed token. So every leading part of a draft is a tree itself, and a chain is -1, 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of nodes, each the child of the one before it.

    Attributes:
        begin: nodes on the way that belong to other branches.
        way: all nodes from the root to its end.
    """

    begin: int
    way: list[int]


def is_chain(parents: Seq[int]) -> bool:
    """Whether each node follows the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def way_to(node: int, parents: Seq[int]) -> list[int]:
    """The nodes from the root to a node, itself included; none for the root, -1."""
    way: list[int] = []
    while node != -1:
        way.append(node)
        node = parents[node]
    return way[::-1]


def depths(parents: Seq[int]) -> list[int]:
    """How many nodes lie between each node and the root: 0 for those that follow the root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == -1 else found[parent] + 1)
    return found


def branches(parents: Seq[int]) -> list[Branch]:
    """Cuts a tree into branches, each node into one: the first child goes on with its parent's,
    every other one begins its own. The first branch begins at the root, and may be empty."""
    found = [Branch(0, [])]
    ends = {-1: found[0]}  # by last node
    for node, parent in enumerate(parents):
        branch = ends.pop(parent, None)
        if branch is None:
            way = way_to(parent, parents)
            branch = Branch(len(way), way)
            found.append(branch)
        branch.way.append(node)
        ends[node] = branch
    return found


def follow(tokens: Seq[int], nodes: Seq[int], parents: Seq[int]) -> list[int]:
    """The way that a text takes through a tree, as far as it goes.

    Args:
        tokens: what comes after the last committed token.
        nodes: the token of every node; siblings may be alike.
        parents: of every node.
    """
    ends = [-1]
    for token in tokens:
        deeper = [n for n in range(len(nodes)) if parents[n] in ends and nodes[n] == token]
        if not deeper:
            break
        ends = deeper
    return way_to(ends[0], parents)


def children(node: int, parents: Seq[int]) -> list[int]:
    """Those that follow a node, or the root, -1."""
    return [other for other in range(node + 1, len(parents)) if parents[other] == node]
