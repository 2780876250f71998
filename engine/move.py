"""Drafts that branch, once they are judged: what is kept of one is brought to where a chain would
have put it. So nobody behind this point has to know that there were branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import torch

from engine.layout import SequenceRows
from engine.model.passes import Runner, can_branch


def move_accepted(
    ways: Iterable[tuple[SequenceRows, Seq[int]]],
    runner: Runner,
    features: Mapping[int, torch.Tensor],
) -> None:
    """Moves the keys, values and features of accepted nodes to the front of their drafts.

    Args:
        ways: a sequence's rows, with the nodes of its draft that were accepted, each behind the
            one before; the sequence still has the pages it had in the pass.
        runner: of the pass; its store is changed.
        features: of the pass, [T, hidden] by layer; changed in place.
    """
    slots: list[tuple[int, int]] = []  # from, to
    states: list[tuple[int, int]] = []
    size = runner.store.page_size
    for rows, way in ways:
        pages = rows.sequence.table.pages
        for depth, node in enumerate(way):
            if node == depth:
                continue
            places = (rows.num_fed + node, rows.num_fed + depth)
            old, new = (
                pages[p // size] * size + p % size for p in (rows.position + i for i in places)
            )
            slots.append((old, new))
            states.append((rows.first_row + places[0], rows.first_row + places[1]))
    if not slots:
        return
    assert can_branch(runner)
    sources, targets = torch.tensor(slots, device=runner.device).T.contiguous()
    runner.move(sources, targets)
    sources, targets = torch.tensor(states).T.contiguous()
    with torch.inference_mode():  # what a model computed in that mode may only be changed there
        for state in features.values():
            here = state.device
            state.index_copy_(0, targets.to(here), state[sources.to(here)])
