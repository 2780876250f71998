"""What the target computed over its texts: features by row, and its likeliest next tokens.

Features are many (a few kilobytes a token), so they lie in a file that is mapped into memory and
read a batch at a time. They come from the engine's own runner, as they will when the head drafts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.errors import ConfigurationError
from engine.model.loader import LoadedModel
from training.texts import Text

TOP = 16  # tokens noted of the target's probabilities; the rest counts as one
_PAGE = 16
_SPARE_BYTES = 256 << 20  # that stay free on the disk


@dataclass(frozen=True, slots=True)
class Features:
    """Rows of all texts, one after the other: of every token but the last.

    Attributes:
        states: int16 [rows, width], the bits of bfloat16 numbers, on disk.
        ids: int32 [answer tokens, TOP] the target's likeliest tokens where each was said.
        weights: float16 [answer tokens, TOP] their probabilities.
        rows: [texts + 1] where each text's rows begin.
        answers: [texts + 1] where each text's answer tokens begin.
    """

    states: np.memmap[tuple[int, int], np.dtype[np.int16]]
    ids: Tensor
    weights: Tensor
    rows: list[int]
    answers: list[int]

    def of(self, number: int) -> Tensor:
        """The features [rows, width] of a text, float32."""
        part = np.array(self.states[self.rows[number] : self.rows[number + 1]])
        return torch.from_numpy(part).view(torch.bfloat16).float()


def read_features(
    work: Path,
    texts: Sequence[Text],
    target: LoadedModel,
    taps: tuple[int, ...],
    progress: Progress,
) -> Features:
    """The features of the texts; made, unless they lie there already.

    Raises:
        ConfigurationError: there is no room for them on the disk.
    """
    rows = np.cumsum([0] + [len(t.prompt) + len(t.answer) - 1 for t in texts]).tolist()
    answers = np.cumsum([0] + [len(t.answer) for t in texts]).tolist()
    mark = f"{taps} {rows[-1]} {answers[-1]}"
    place, labels = work / "features.bin", work / "labels.npz"
    if labels.exists():
        stored = np.load(labels, allow_pickle=False)
        if str(stored["mark"]) == mark:
            width = place.stat().st_size // 2 // rows[-1]
            return Features(
                np.memmap(place, np.int16, "r", shape=(rows[-1], width)),
                torch.from_numpy(stored["ids"]),
                torch.from_numpy(stored["weights"]),
                rows,
                answers,
            )
    return _compute(work, texts, target, taps, mark, (rows, answers, progress))


def _compute(
    work: Path,
    texts: Sequence[Text],
    target: LoadedModel,
    taps: tuple[int, ...],
    mark: str,
    rest: tuple[list[int], list[int], Progress],
) -> Features:
    rows, answers, progress = rest
    assert target.embed is not None
    width = len(taps) * target.embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
    _check_room(work, 2 * rows[-1] * width)
    states = np.memmap(work / "features.bin", np.int16, "w+", shape=(rows[-1], width))
    top = min(TOP, target.vocab_size)
    ids = torch.empty(answers[-1], top, dtype=torch.int32)
    weights = torch.empty(answers[-1], top, dtype=torch.float16)
    longest = max(len(t.prompt) + len(t.answer) for t in texts)
    pages = -(-longest // _PAGE)
    pool = PagePool(pages, _PAGE)
    runner = target.make_runner(pages, _PAGE)
    for i, text in enumerate(progress.track(texts, description="features")):
        table = pool.new_table("")
        tokens = [*text.prompt, *text.answer][:-1]
        pool.reserve(table, len(tokens))
        span = Span(tokens, 0, table, len(text.answer))
        batch = build_batch([span], _PAGE, pages, runner.device, runner.min_rows)
        passed = runner.forward(batch, taps)
        joined = torch.cat([passed.features[tap] for tap in taps], 1).cpu()
        states[rows[i] : rows[i + 1]] = joined.bfloat16().view(torch.int16).numpy()
        logits = passed.logits[:, : target.vocab_size].float()
        best = logits.topk(top)
        part = slice(answers[i], answers[i + 1])
        ids[part] = best.indices.int().cpu()
        weights[part] = (best.values - logits.logsumexp(1, True)).exp().half().cpu()
        pool.free(table)
    states.flush()
    scratch = work / "labels.part.npz"
    np.savez(scratch, mark=np.array(mark), ids=ids.numpy(), weights=weights.numpy())
    os.replace(scratch, work / "labels.npz")
    return Features(states, ids, weights, rows, answers)


def _check_room(work: Path, needed: int) -> None:
    free = shutil.disk_usage(work).free
    if needed + _SPARE_BYTES > free:
        raise ConfigurationError(
            f"features need {needed / 2**20:.0f} MiB in {work}, where {free / 2**20:.0f} MiB are "
            "free; ask for fewer tokens, or make room. What was made so far is kept."
        )
