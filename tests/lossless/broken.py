"""Judges with a fault, for tests that must notice it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from engine.judge import Judge
from engine.sampling import Draw, Drawn, RowSampler, SamplingRow
from engine.sequence import Sequence


class Leaky(Judge):
    """Penalties also see the draft tokens that the last step rejected."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rejected: dict[Sequence, list[int]] = {}

    def judge(self, layout: Any, proposal: Any, logits: Tensor) -> Any:
        judgements = super().judge(layout, proposal, logits)
        for rows, judgement in zip(layout.sequences, judgements, strict=True):
            self.rejected[rows.sequence] = rows.draft[judgement.verdict.accepted :]
        return judgements

    def _row(self, sequence: Any, draft: Any, depth: int, step: int = 0) -> SamplingRow:
        row = super()._row(sequence, draft, depth, step)
        leaked = self.rejected.get(sequence, [])
        return dataclasses.replace(row, generated=[*row.generated, *leaked])


class Generous(Judge):
    """Keeps the first draft token whatever the target says, and goes on as if it had said so."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        verification: str = "auto",
        sampler: Any = None,
    ) -> None:
        del sampler
        super().__init__(vocab_size, eos_token_ids, verification, GenerousSampler(vocab_size))


class GenerousSampler(RowSampler):
    """See `Generous`."""

    def draw(self, logits: Tensor, draws: Seq[Draw]) -> list[Drawn]:
        drawn = super().draw(logits, draws)
        for said, draw in zip(drawn, draws, strict=True):
            if draw.draft and len(said.tokens) == 1:
                said.tokens[0] = draw.draft[0]
        return drawn
