"""Where every scheduled sequence lies in a step: which rows it feeds, drafts and is judged by.

A step packs the query tokens of all sequences, one after the other, into the T rows of one pass
(see `engine.batch`); R of them are given logits. Both are counted off here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.batch import Span
from engine.cache.pages import TARGET
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one scheduled sequence: committed tokens to feed, then its draft.

    Attributes:
        scheduled: the sequence, and what the scheduler decided for it.
        draft: draft tokens, in the order of their rows.
        position: of the token in its first row; all before it are in the target's cache.
        first_row: of its query tokens, in [0, T).
        first_logit: of its rows of logits, in [0, R).
        num_logits: how many it has; they belong to its last query tokens.
        num_prompt_logprobs: how many of them, from the first, predict prompt tokens whose log
            probabilities are wanted.
        drafter: who was asked for the draft.
        parents: of a draft that branches: see `engine.tree`. None = a chain.
    """

    scheduled: ScheduledSequence
    draft: Seq[int]
    position: int
    first_row: int
    first_logit: int
    num_logits: int
    num_prompt_logprobs: int
    drafter: str
    parents: Seq[int] | None = None

    @property
    def sequence(self) -> Sequence:
        """Whose rows these are."""
        return self.scheduled.sequence

    @property
    def num_fed(self) -> int:
        """Rows of committed tokens."""
        return self.scheduled.num_feed

    @property
    def num_drafts(self) -> int:
        """Rows of draft tokens, behind those that were fed."""
        return len(self.draft)

    @property
    def rows(self) -> range:
        """Its query tokens, in [0, T)."""
        return range(self.first_row, self.first_row + self.num_fed + self.num_drafts)

    @property
    def logit_rows(self) -> range:
        """Its rows of logits, in [0, R). If it samples, the last `num_drafts` + 1 of them follow
        its committed tokens and each draft token in turn."""
        return range(self.first_logit, self.first_logit + self.num_logits)

    def judging_rows(self, way: Seq[int] | None, count: int) -> list[int]:
        """The rows of logits that the first `count` emitted tokens were drawn from.

        Args:
            way: of a draft that branches, the nodes that were accepted.
            count: at least 1.
        """
        first = self.logit_rows.stop - 1 - self.num_drafts
        if way is None:
            return list(range(first, first + count))
        return [first, *(first + 1 + node for node in way)][:count]

    def span(self) -> Span:
        """Its part of the packed batch."""
        sequence, start = self.sequence, self.position
        fed = sequence.tokens[start : start + self.num_fed]
        return Span([*fed, *self.draft], start, sequence.table, self.num_logits, self.parents)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step.

    Attributes:
        sequences: one entry for each scheduled sequence, in the plan's order.
        num_rows: T, of all query tokens.
        num_logits: R, of the rows that are given logits.
    """

    sequences: tuple[SequenceRows, ...]
    num_rows: int
    num_logits: int

    def spans(self) -> list[Span]:
        """The sequences' parts of the packed batch. Call it before anything is committed."""
        return [rows.span() for rows in self.sequences]


def lay_out(
    plan: StepPlan,
    drafts: Seq[Seq[int]],
    drafters: Seq[str],
    trees: Seq[Seq[int] | None] | None = None,
) -> StepLayout:
    """Counts off the rows of a step.

    Args:
        plan: the scheduler's.
        drafts: one for each scheduled sequence; empty = a plain decode, or a prefill.
        drafters: who was asked for each of them.
        trees: for each of them its parents, or None if it is a chain; None = all are.
    """
    row = logit = 0
    laid: list[SequenceRows] = []
    parents = trees or [None] * len(drafts)
    parts = zip(plan.scheduled, drafts, drafters, parents, strict=True)
    for scheduled, draft, name, tree in parts:
        start = scheduled.sequence.table.num_cached[TARGET]
        logits, prompt = num_logit_rows(scheduled, draft), predicted_prompt_tokens(scheduled)
        laid.append(SequenceRows(scheduled, draft, start, row, logit, logits, prompt, name, tree))
        row += scheduled.num_feed + len(draft)
        logit += logits
    return StepLayout(tuple(laid), row, logit)


def predicted_prompt_tokens(scheduled: ScheduledSequence) -> int:
    """How many rows of the step predict prompt tokens whose log probabilities are wanted."""
    sequence = scheduled.sequence
    if not sequence.wants_prompt_logprobs:
        return 0
    start = sequence.table.num_cached[TARGET]
    return max(0, min(start + scheduled.num_feed, sequence.prompt_length - 1) - start)


def num_logit_rows(scheduled: ScheduledSequence, draft: Seq[int]) -> int:
    """Rows at the end of the sequence's query tokens that need logits."""
    if predicted_prompt_tokens(scheduled):
        return scheduled.num_feed + len(draft)
    return 1 + len(draft) if scheduled.samples else 0
