"""What drafters are shown of a step: which rows of the target's pass were whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.cache.pages import TARGET
from engine.draft.drafter import DraftProposal, SequenceView, StepView, Verdict
from engine.scheduler import StepPlan
from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch

_UNJUDGED = Verdict([], 0, 0)


def rows_of(plan: StepPlan, proposal: DraftProposal) -> list[SequenceView]:
    """Every scheduled sequence's rows, in the order in which they are packed, with nothing kept
    yet. Call it before the caches move on."""
    views, row = [], 0
    for scheduled, draft in zip(plan.scheduled, proposal.tokens, strict=True):
        sequence, fed = scheduled.sequence, scheduled.num_feed
        position = sequence.table.num_cached[TARGET]
        views.append(SequenceView(sequence, row, position, fed, len(draft), _UNJUDGED))
        row += fed + len(draft)
    return views


def view_step(
    rows: Iterable[SequenceView],
    verdicts: Mapping[Sequence, Verdict],
    features: Mapping[int, torch.Tensor],
) -> StepView:
    """A step that is over.

    Args:
        rows: of all scheduled sequences, from `rows_of`.
        verdicts: what was kept; a sequence without one has failed, and is left out.
        features: [T, hidden size] by layer.
    """
    kept = (one for one in rows if one.sequence in verdicts)
    return StepView(tuple(replace(one, verdict=verdicts[one.sequence]) for one in kept), features)
