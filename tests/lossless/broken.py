"""Judges with a fault, for tests that must notice it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from engine.judge import Judge
from engine.sampling import SamplingRow
from engine.sequence import Sequence


class Leaky(Judge):
    """Penalties also see the draft tokens that the last step rejected."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rejected: dict[Sequence, list[int]] = {}

    def judge(self, plan: Any, proposal: Any, logits: Tensor) -> Any:
        judgements = super().judge(plan, proposal, logits)
        for s, draft, judgement in zip(plan.scheduled, proposal.tokens, judgements, strict=True):
            self.rejected[s.sequence] = draft[judgement.verdict.accepted :]
        return judgements

    def _row(self, sequence: Any, draft: Any, depth: int, step: int = 0) -> SamplingRow:
        row = super()._row(sequence, draft, depth, step)
        leaked = self.rejected.get(sequence, [])
        return dataclasses.replace(row, generated=[*row.generated, *leaked])


class Generous(Judge):
    """Keeps the first draft token whatever the target says, and goes on as if it had said so."""

    def _match(self, plan: Any, drafts: Any, selector: Any, ends: Any, chosen: Any) -> None:
        super()._match(plan, drafts, selector, ends, chosen)
        for said, draft in zip(chosen, drafts, strict=True):
            if draft and len(said) == 1:
                said[0] = draft[0]
