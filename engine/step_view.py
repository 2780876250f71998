"""What drafters are shown of a step: which rows of the target's pass were whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from engine.draft.drafter import SequenceView, StepView, Verdict
from engine.sequence import Sequence

if TYPE_CHECKING:
    import torch


class Rows(Protocol):
    """One scheduled sequence's rows in a pass: see `SequenceView`."""

    @property
    def sequence(self) -> Sequence:
        """Whose they are."""

    @property
    def first_row(self) -> int:
        """In the pass."""

    @property
    def position(self) -> int:
        """Of the token in the first row."""

    @property
    def num_fed(self) -> int:
        """Rows of committed tokens."""

    @property
    def num_drafts(self) -> int:
        """Rows of draft tokens behind them."""


def view_step(
    rows: Iterable[Rows],
    verdicts: Mapping[Sequence, Verdict],
    features: Mapping[int, torch.Tensor],
) -> StepView:
    """A step that is over.

    Args:
        rows: of all scheduled sequences.
        verdicts: what was kept; a sequence without one has failed, and is left out.
        features: [T, hidden size] by layer.
    """
    views = [
        SequenceView(s, one.first_row, one.position, one.num_fed, one.num_drafts, verdicts[s])
        for one in rows
        if (s := one.sequence) in verdicts
    ]
    return StepView(tuple(views), features)
