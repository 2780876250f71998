"""How good a draft model is: where it would have said the target's token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from training.labels import last_states, make_batches, parts
from training.texts import Text


@dataclass(frozen=True, slots=True)
class Agreement:
    """Where the student would have said the target's token: one list for every greedy text."""

    texts: list[list[bool]]

    @classmethod
    @torch.inference_mode()
    def measure(cls, student: Any, texts: list[Text], numbers: Sequence[int]) -> Agreement:
        """Compares on the greedy ones of those texts."""
        found: list[list[bool]] = []
        head = student.lm_head.weight.to(torch.bfloat16)
        for batch in make_batches(texts, [i for i in numbers if texts[i].greedy]):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                states = last_states(student, batch).to(head.dtype)
            said = torch.cat(
                [F.linear(states[part], head).argmax(1) for part in parts(len(states))]
            )
            same = iter((said == batch.tokens).tolist())
            found.extend(list(islice(same, len(texts[i].answer))) for i in batch.texts)
        return cls(found)

    @property
    def share(self) -> float:
        """Share of tokens on which both agree."""
        return sum(map(sum, self.texts)) / max(1, sum(map(len, self.texts)))

    def tokens_per_pass(self, length: int) -> float:
        """Mean tokens a pass of the target yields with drafts of that length.

        Exact for greedy text: after an accepted draft the student has read the target's words.
        """
        passes = 0
        for row in self.texts:
            at = 0
            while at < len(row):
                draft = row[at : at + length]
                at += (draft.index(False) if False in draft else len(draft)) + 1
                passes += 1
        return sum(map(len, self.texts)) / max(1, passes)

    def at_depth(self, depth: int) -> float:
        """Share of the places where a draft of `depth` tokens would be accepted to its end."""
        windows = [row[i : i + depth] for row in self.texts for i in range(len(row) - depth + 1)]
        return sum(map(all, windows)) / max(1, len(windows))

    def __str__(self) -> str:
        return f"agrees on {self.share:.1%}, {self.tokens_per_pass(4):.2f} tokens per pass"
