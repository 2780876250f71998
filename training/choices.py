"""What is learnt from, what is held out, and which words a head may say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.errors import ConfigurationError
from training.texts import Text

HELD_OUT = 0.05  # of the greedy texts


def split(texts: Sequence[Text], seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts that are held out, a twentieth of the greedy ones, and of the others.

    Raises:
        ConfigurationError: there are too few.
    """
    numbers = random.Random(seed).sample(range(len(texts)), len(texts))
    usable = [i for i in numbers if len(texts[i].answer) > 1]
    greedy = [i for i in usable if texts[i].greedy]
    if len(greedy) < 2:
        raise ConfigurationError(
            f"{len(greedy)} greedy answers are too few to learn from and be tested on; allow more "
            "tokens or minutes."
        )
    held_out = greedy[: max(1, int(len(greedy) * HELD_OUT))]
    return held_out, sorted(set(usable) - set(held_out))


def frequent(texts: Sequence[Text], vocab: int, count: int) -> tuple[Tensor, float]:
    """The tokens that answers are made of most.

    Returns:
        Their ids, ascending, and the share of all answer tokens that they are.
    """
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in _pieces(texts):
        counts += torch.bincount(text, minlength=vocab)
    ids = counts.argsort(descending=True, stable=True)[:count].sort().values
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))


def _pieces(texts: Sequence[Text]) -> Iterator[Tensor]:
    for at in range(0, len(texts), 256):
        yield torch.tensor([token for text in texts[at : at + 256] for token in text.answer])
