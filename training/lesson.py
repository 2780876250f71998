"""The lesson: a head learns to say what its target says, and is tested on texts held out."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from engine.errors import ConfigurationError
from training.features import Features
from training.loss import distance, schedule
from training.options import HeadOptions
from training.student import EagleStudent
from training.texts import Text

BATCH_ROWS = 2048  # of texts side by side, padding included
DECAY = 0.8  # weight of a round against the one before it
_SAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Lines:
    """Texts side by side.

    Attributes:
        features: [B, T, width] of every token but the last.
        tokens: [B, T] the tokens behind them.
        labels: int64 [B, T] the row of `Features.ids` that the token behind that one has, or -1.
    """

    features: Tensor
    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far drafts reach on greedy texts that were held out.

    Attributes:
        by_depth: share of places where a draft would be kept to depth 1, 2, ...
    """

    by_depth: tuple[float, ...]

    def tokens_per_pass(self, length: int) -> float:
        """Tokens that a pass of the target yields with drafts of so many."""
        return 1 + sum(self.by_depth[:length])

    def __str__(self) -> str:
        depths = ", ".join(f"{share:.1%}" for share in self.by_depth)
        length = len(self.by_depth)
        return f"kept to depth 1 to {length}: {depths}; {self.tokens_per_pass(length):.2f} a pass"


@dataclass(slots=True)
class State:
    """What a lesson that was interrupted goes on from, besides weights.

    Attributes:
        epoch: under way, from 0.
        batch: of it, from 0.
        seconds: spent so far.
        best: tokens a pass of the best epoch.
        curve: (steps, mean loss, acceptance by depth) after each epoch.
    """

    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    best: float = -1.0
    curve: list[tuple[int, float, tuple[float, ...]]] = field(default_factory=list)


class Lesson:
    """Trains a student until its epochs or its time are over.

    Args:
        student: changed in place.
        texts: of the target.
        features: of the texts.
        options: the rest.
    """

    def __init__(
        self, student: EagleStudent, texts: Sequence[Text], features: Features, options: HeadOptions
    ) -> None:
        self.student, self.texts, self.features, self.options = student, texts, features, options
        self.state = State()
        self.best = student.state()
        self._place = options.work / "lesson.pt"
        self._weights = list(student.weights.values())
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._drafts = torch.full((student.config.vocab,), -1, dtype=torch.int64)
        ids: Tensor = student.ids  # type: ignore[assignment]
        self._drafts[ids] = torch.arange(len(ids))
        self._losses: list[float] = []

    def train(
        self, numbers: Sequence[int], held_out: Sequence[int], seconds: float, progress: Progress
    ) -> Acceptance:
        """Epochs over the texts of those numbers; the best of them, by what is held out, is kept.

        Args:
            seconds: that the lesson may take, with what earlier runs took.

        Returns:
            How the best does on what is held out.
        """
        self._resume()
        state, batches = self.state, self._batches(numbers)
        steps = len(batches) * self.options.epochs
        task = progress.add_task("training", total=steps)
        began, saved = time.monotonic() - state.seconds, time.monotonic()
        over = False
        while state.epoch < self.options.epochs and not over:
            order = random.Random(f"{self.options.seed} {state.epoch}")
            for batch in order.sample(batches, len(batches))[state.batch :]:
                state.seconds = time.monotonic() - began
                done = state.epoch * len(batches) + state.batch
                share = max(done / steps, state.seconds / seconds)
                if over := share >= 1:
                    break
                self._losses.append(self._step(batch, share))
                state.batch += 1
                progress.update(
                    task, completed=done + 1, description=f"training: loss {self._losses[-1]:.3f}"
                )
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
            self._end_epoch(held_out, len(batches), progress)
        return Acceptance(max((entry[2] for entry in state.curve), key=sum))

    def measure(self, numbers: Sequence[int]) -> Acceptance:
        """How far drafts would reach on the greedy ones of those texts."""
        depth = self.options.depth
        kept, places = [0] * depth, [0] * depth
        for batch in self._batches([i for i in numbers if self.texts[i].greedy]):
            lines = self._lines(batch)
            with torch.inference_mode():
                alive = lines.labels >= 0
                said, labels = lines.tokens, lines.labels
                for d, normed in enumerate(
                    self.student.rounds(lines.features, lines.tokens, depth)
                ):
                    said = F.pad(said[:, 1:], (0, 1))
                    guess = self.student.ids[self.student.logits(normed).argmax(-1)]  # type: ignore[index]
                    places[d] += int(((labels >= 0) & (lines.labels >= 0)).sum())
                    alive = alive & (labels >= 0) & (guess == said)
                    kept[d] += int(alive.sum())
                    labels = F.pad(labels[:, 1:], (0, 1), value=-1)
        return Acceptance(tuple(k / max(1, n) for k, n in zip(kept, places, strict=True)))

    # -- inside --------------------------------------------------------------------------

    def _batches(self, numbers: Sequence[int]) -> list[list[int]]:
        """Texts of similar length together."""
        found: list[list[int]] = []
        group: list[int] = []
        for i in sorted(numbers, key=self._rows):
            if group and (len(group) + 1) * self._rows(i) > BATCH_ROWS:
                found.append(group)
                group = []
            group.append(i)
        return [*found, group] if group else found

    def _rows(self, number: int) -> int:
        return len(self.texts[number].prompt) + len(self.texts[number].answer) - 1

    def _lines(self, numbers: Sequence[int]) -> Lines:
        width, longest = self.features.states.shape[1], max(map(self._rows, numbers))
        features = torch.zeros(len(numbers), longest, width)
        tokens = torch.zeros(len(numbers), longest, dtype=torch.int64)
        labels = torch.full((len(numbers), longest), -1, dtype=torch.int64)
        for line, i in enumerate(numbers):
            text, rows = self.texts[i], self._rows(i)
            features[line, :rows] = self.features.of(i)
            tokens[line, :rows] = torch.tensor([*text.prompt, *text.answer][1:])
            # Row t tells the token at t + 2; the first token of the answer stands at len(prompt).
            first = self.features.answers[i] + max(0, 2 - len(text.prompt))
            start = max(0, len(text.prompt) - 2)
            labels[line, start : rows - 1] = torch.arange(first, first + rows - 1 - start)
        return Lines(features, tokens, labels)

    def _step(self, batch: Sequence[int], share: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate * schedule(share)
        lines, depth = self._lines(batch), self.options.depth
        labels, total, loss = lines.labels, 0.0, torch.zeros(())
        for d, normed in enumerate(self.student.rounds(lines.features, lines.tokens, depth)):
            rows = (labels >= 0) & (lines.labels >= 0)  # a draft may begin there
            if rows.any():
                ids = self._drafts[self.features.ids[labels[rows]].long()]
                weights = self.features.weights[labels[rows]].float()
                loss = loss + DECAY**d * distance(self.student.logits(normed[rows]), ids, weights)
            total += DECAY**d
            labels = F.pad(labels[:, 1:], (0, 1), value=-1)
        loss = loss / total
        self._optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._weights, 1.0)
            self._optimizer.step()
        return loss.item()

    def _end_epoch(self, held_out: Sequence[int], batches: int, progress: Progress) -> None:
        state = self.state
        found = self.measure(held_out)
        mean = sum(self._losses) / max(1, len(self._losses))
        state.curve.append((state.epoch * batches + state.batch, mean, found.by_depth))
        progress.console.print(f"epoch {state.epoch + 1}: loss {mean:.4f}, held out {found}")
        if sum(found.by_depth) > state.best:
            state.best = sum(found.by_depth)
            self.best = {name: w.clone() for name, w in self.student.state().items()}
        state.epoch, state.batch = state.epoch + 1, 0
        self._losses = []
        self._save()

    def _save(self) -> None:
        """Keeps all that is needed to go on; there is a whole file or none."""
        part = self._place.with_suffix(".part")
        torch.save(
            {
                "student": self.student.weights.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "best": self.best,
                "losses": self._losses,
                "state": asdict(self.state),
            },
            part,
        )
        os.replace(part, self._place)

    def _resume(self) -> None:
        if not self._place.exists():
            return
        try:
            stored: dict[str, Any] = torch.load(self._place, weights_only=True)
            self.student.weights.load_state_dict(stored["student"])
            self._optimizer.load_state_dict(stored["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"{self._place} is of a lesson of another kind ({type(error).__name__}); give the "
                "same options as before, or remove it."
            ) from error
        self.best, self._losses = stored["best"], stored["losses"]
        self.state = State(**stored["state"])
