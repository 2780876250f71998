"""Texts as batches, and what the target thought of every token of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from training.texts import Text

TOP = 16  # tokens noted of the target's probabilities; the rest counts as one
BATCH_TOKENS = 2048
HEAD_ROWS = 512  # rows of logits in memory at once


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded on the right, where no causal model can see the padding.

    Attributes:
        texts: their numbers.
        input_ids: [texts, longest].
        rows: [R] positions in the flattened batch from which an answer's tokens are predicted.
        tokens: [R] those tokens.
    """

    texts: list[int]
    input_ids: Tensor
    rows: Tensor
    tokens: Tensor


def make_batches(texts: list[Text], numbers: Sequence[int]) -> list[Batch]:
    """Batches of about `BATCH_TOKENS`, each of texts of similar length."""
    lengths = {i: len(texts[i].prompt) + len(texts[i].answer) for i in numbers}
    batches: list[Batch] = []
    group: list[int] = []
    for i in sorted(numbers, key=lambda i: lengths[i]):
        if group and (len(group) + 1) * lengths[i] > BATCH_TOKENS:
            batches.append(_batch(texts, group))
            group = []
        group.append(i)
    return [*batches, _batch(texts, group)] if group else batches


def _batch(texts: list[Text], numbers: list[int]) -> Batch:
    width = max(len(texts[i].prompt) + len(texts[i].answer) for i in numbers)
    ids = torch.zeros(len(numbers), width, dtype=torch.int64)
    rows: list[Tensor] = []
    for line, i in enumerate(numbers):
        tokens = torch.tensor(texts[i].prompt + texts[i].answer)
        ids[line, : len(tokens)] = tokens
        rows.append(line * width + torch.arange(len(texts[i].prompt) - 1, len(tokens) - 1))
    said = torch.tensor([token for i in numbers for token in texts[i].answer])
    return Batch(list(numbers), ids, torch.cat(rows), said)


def last_states(model: Any, batch: Batch) -> Tensor:
    """What the output layer sees, at the rows of the answers: [R, hidden]."""
    states: Tensor = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return states.flatten(0, 1)[batch.rows]


def parts(rows: int) -> Iterator[slice]:
    """Slices of at most `HEAD_ROWS` rows."""
    return (slice(at, at + HEAD_ROWS) for at in range(0, rows, HEAD_ROWS))


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's most likely tokens at every answer token of all texts, end to end.

    Attributes:
        ids: [A, TOP].
        weights: [A, TOP] their probabilities.
        starts: [texts + 1] where each text's rows begin.
    """

    ids: Tensor
    weights: Tensor
    starts: list[int]

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of a batch: ids and weights, [R, TOP] each."""
        rows = torch.cat([torch.arange(*self.starts[i : i + 2]) for i in batch.texts])
        return self.ids[rows].long(), self.weights[rows].float()


@torch.inference_mode()
def make_labels(target: Any, texts: list[Text], progress: Progress) -> Labels:
    """One pass of the target over all texts."""
    starts = np.cumsum([0] + [len(text.answer) for text in texts]).tolist()
    top = min(TOP, target.config.vocab_size)
    ids = torch.empty(starts[-1], top, dtype=torch.int32)
    weights = torch.empty(starts[-1], top, dtype=torch.float16)
    for batch in progress.track(make_batches(texts, range(len(texts))), description="labels"):
        states = last_states(target, batch)
        rows = torch.cat([torch.arange(*starts[i : i + 2]) for i in batch.texts])
        for part in parts(len(rows)):
            logits = target.lm_head(states[part]).float()
            best = logits.topk(top)
            ids[rows[part]] = best.indices.int()
            weights[rows[part]] = (best.values - logits.logsumexp(1, True)).exp().half()
    return Labels(ids, weights, starts)
