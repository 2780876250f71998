"""A student with a few of the target's layers, and the lesson that makes it a draft model."""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tools.distillation.agreement import Agreement
from tools.distillation.options import Options
from training.labels import Batch, Labels, last_states, make_batches, parts
from training.texts import Text

OTHERS = 4096  # tokens that stand for all those nobody thinks of, anew in every step


@dataclass(frozen=True, slots=True)
class Choice:
    """An output layer of those tokens that matter in a step, and some that stand for the others.

    Attributes:
        head: [C, hidden] their rows.
        ids: [R, N] the target's most likely tokens, as numbers of those rows.
        weight: [C] logarithm of how many tokens each stands for.
    """

    head: Tensor
    ids: Tensor
    weight: Tensor


def choose(head: Tensor, ids: Tensor, others: int) -> Choice:
    """Keeps the rows of `ids` and of random `others`: most of the work is in the output layer, and
    most of it for tokens that nobody would say."""
    wanted, numbers = torch.unique(ids, return_inverse=True)
    rest = torch.ones(len(head), dtype=torch.bool)
    rest[wanted] = False
    rest_ids = rest.nonzero().squeeze(1)
    drawn = rest_ids[torch.randperm(len(rest_ids))[:others]]
    share = math.log(max(1, len(rest_ids)) / max(1, len(drawn)))
    weight = torch.cat([torch.zeros(len(wanted)), torch.full((len(drawn),), share)])
    return Choice(head[torch.cat([wanted, drawn])], numbers, weight)


class _Distance(torch.autograd.Function):
    """See `distance`. The gradient is made together with the loss, a few rows at a time, so that no
    tensor of rows x vocabulary outlives its part."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, choice: Choice, weights: Tensor) -> Tensor:
        head, total = choice.head, torch.zeros(())
        gradient = torch.empty_like(states)
        for part in parts(len(states)):
            logits = F.linear(states[part].to(head.dtype), head).float()
            q = logits.add_(choice.weight).softmax(1)
            loss, slope = _distance(q, choice.ids[part], weights[part])
            total += loss
            gradient[part] = (slope.to(head.dtype) @ head).to(states.dtype)
        ctx.save_for_backward(gradient / len(states))
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


def distance(states: Tensor, choice: Choice, weights: Tensor) -> Tensor:
    """How far the draft model's probabilities q are from the target's p, averaged over rows.

    KL(p, q) where they are far apart, total variation the more the better they agree:
    `w KL + (1 - w) TV` with w = exp(-3 sum min(p, q)), after "LK losses" (arXiv 2602.23881).
    Tokens that are not among the target's most likely count as one.

    Args:
        states: [R, hidden] what the draft model's output layer sees; they alone get a gradient.
        choice: that layer, for some tokens, among them the target's most likely.
        weights: [R, N] the probabilities of the target's most likely tokens.
    """
    mean: Tensor = _Distance.apply(states, choice, weights)  # type: ignore[no-untyped-call]
    return mean


def _distance(q: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Summed distance of the rows q [R, V], and its gradient by their logits (in place of q)."""
    rest = (1 - weights.sum(1, keepdim=True)).clamp(min=0)
    mine = q.gather(1, ids)
    others = (1 - mine.sum(1, keepdim=True)).clamp(min=1e-6)
    p, listed = torch.cat([weights, rest], 1), torch.cat([mine, others], 1).clamp(min=1e-20)
    w = torch.exp(-3 * torch.minimum(p, listed).sum(1, keepdim=True))
    divergence = (torch.xlogy(p, p) - p * listed.log()).sum(1, keepdim=True)
    loss = w * divergence + (1 - w) * 0.5 * (p - listed).abs().sum(1, keepdim=True)
    sign = 0.5 * torch.sign(listed - p)
    pull = sign - (listed * sign).sum(1, keepdim=True)
    factor = w * (1 - p / listed) + (1 - w) * pull  # the gradient is q times this
    slope = q.mul_(factor[:, -1:]).scatter_(1, ids, mine * factor[:, :-1])
    return loss.sum(), slope


def make_student(target: Any, layers: int) -> Any:
    """A model of the target's first `layers` layers, which learn more easily to do without the
    others than the last ones do, or first and last.

    Embeddings, output layer and final norm are the target's and do not learn.
    """
    config = copy.deepcopy(target.config)
    count = config.num_hidden_layers
    if not 1 <= layers <= count:
        sys.exit(f"--layers is {layers}; the target has {count}, so take 1 to {count}.")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    student = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    student = student.float().requires_grad_(False)
    for ours, theirs in (
        (student.model.embed_tokens, target.model.embed_tokens),
        (student.lm_head, target.lm_head),
        (student.model.norm, target.model.norm),
        *zip(student.model.layers, target.model.layers[:layers], strict=True),
    ):
        ours.load_state_dict(theirs.state_dict())
    student.model.layers.requires_grad_(True)
    return student


class Lesson:
    """Trains a student until its epochs or its time are over.

    Args:
        student: changed in place.
        texts: of the target.
        labels: of the texts.
        options: epochs, learning rate and seed.
        deadline: `time.monotonic()` by which it ends.
    """

    def __init__(
        self, student: Any, texts: list[Text], labels: Labels, options: Options, deadline: float
    ) -> None:
        self.student = student
        self.texts = texts
        self.labels = labels
        self.options = options
        self.deadline = deadline
        self._head = student.lm_head.weight.detach().to(torch.bfloat16)
        weights = [p for p in student.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            weights, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._weights = weights

    def train(self, numbers: Sequence[int], held_out: Sequence[int], progress: Progress) -> None:
        """Epochs over the texts of those numbers; says after each how it does on others.

        The student is left as it was after the best of them: little text is learned by heart.
        """
        batches = make_batches(self.texts, numbers)
        steps = len(batches) * self.options.epochs
        task = progress.add_task("training", total=steps)
        order = random.Random(self.options.seed)
        begin, step, best = time.monotonic(), 0, -1.0
        kept = copy.deepcopy(self.student.model.layers.state_dict())
        for epoch in range(1, self.options.epochs + 1):
            losses = []
            for batch in order.sample(batches, len(batches)):
                spent = (time.monotonic() - begin) / max(1e-9, self.deadline - begin)
                done = max(step / steps, spent)
                if done >= 1:
                    break
                losses.append(self._step(batch, done))
                step += 1
                progress.update(task, advance=1, description=f"training: loss {losses[-1]:.3f}")
            if losses:
                agreement = Agreement.measure(self.student, self.texts, held_out)
                mean = sum(losses) / len(losses)
                progress.console.print(f"epoch {epoch}: loss {mean:.4f}, held out: {agreement}")
                if agreement.share > best:
                    best = agreement.share
                    kept = copy.deepcopy(self.student.model.layers.state_dict())
        self.student.model.layers.load_state_dict(kept)

    def _step(self, batch: Batch, done: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate * schedule(done)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = last_states(self.student, batch)
        ids, weights = self.labels.of(batch)
        loss = distance(states, choose(self._head, ids, OTHERS), weights)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        return loss.item()


def schedule(done: float) -> float:
    """Factor on the learning rate, by the share of the lesson that is over: warm-up, cosine."""
    warm = 0.04
    if done < warm:
        return done / warm
    return 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))
