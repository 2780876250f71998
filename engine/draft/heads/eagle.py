"""The `eagle` drafter: a head on the target's hidden states guesses, round by round.

A round's row for position i is made of the target's features of the token there and the token
behind it, and tells the one behind that. So after every step the rows of committed tokens are
computed from true features, whoever drafted, and their keys and values written into the head's
store; a draft's own rounds go on from the head's states instead, and are written over later.

What a prefix hit spares the target has no features. Such pages are left out: where the head's
store lacks the last pages of a hit, its text is what lies before and behind them, with positions
that do not count them. `num_cached` then stays where the gap begins, so that nobody takes those
pages for filled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch, Span, build_batch
from engine.cache.pages import PageTable
from engine.draft.drafter import DraftProposal, SequenceView, StepView
from engine.draft.entry import DrafterContext
from engine.draft.heads.runner import HeadRunner
from engine.draft.model import DraftModelLimits, ModelDrafter, _Draft
from engine.errors import ModelNotSupported
from engine.sequence import Sequence


@dataclass(slots=True)
class _Progress:
    """How far the head has come with one sequence.

    Attributes:
        life: the table's `num_cached`, which is another list after a preemption.
        gap: pages [first, last) that are left out.
        position: of the first row that was not seen yet.
        state: [hidden] of the row before it.
    """

    life: list[int]
    gap: tuple[int, int]
    position: int
    state: Tensor

    def table(self, own: PageTable) -> PageTable:
        """The pages of the head's text."""
        first, last = self.gap
        if first == last:
            return own
        table = PageTable(own.salt)
        table.pages = own.pages[:first] + own.pages[last:]
        return table


class EagleDrafter(ModelDrafter):
    """Batched draft rounds of an EAGLE-3 head; draws as the draft model does.

    Args:
        runner: the head.
        limits: see there.
        eos_token_ids: tokens that end a sequence, for rows that may not draw them yet.
        layers: of the target, in the order in which the head takes their features.
    """

    name = "eagle"
    runner: HeadRunner

    def __init__(
        self,
        runner: HeadRunner,
        limits: DraftModelLimits,
        eos_token_ids: frozenset[int],
        layers: tuple[int, ...],
    ) -> None:
        super().__init__(runner, limits, eos_token_ids)
        self._layers = layers
        self._known: dict[Sequence, _Progress] = {}
        self._states = torch.empty(0)  # [rows, hidden] of the last round
        self._places: dict[Sequence, int] = {}  # whose row is which

    def outlook(self, sequence: Sequence) -> int | None:
        """None until it has seen the row before the last token."""
        return super().outlook(sequence) if self._ready(sequence) else None

    def backlog(self, sequence: Sequence) -> int:
        """It has read what it can."""
        return 0

    def observe(self, view: StepView) -> None:
        """Takes the features of all committed rows into its store."""
        spans: list[Span] = []
        rows: list[int] = []
        seen: list[tuple[SequenceView, _Progress]] = []
        for part in view.sequences:
            progress = self._follow(part)
            begin = progress.position
            # The token behind a row is part of it; where a text ends with a draft there is none.
            end = min(part.position + part.num_kept, len(part.sequence.tokens) - 1)
            if begin < end:
                spans.append(self._span(part.sequence, progress, begin, end - begin))
                row = part.first_row - part.position
                rows.extend(range(row + begin, row + end))
                progress.position = end
                seen.append((part, progress))
        if not spans:
            return
        batch = self._batch(spans)
        features = [view.features[layer] for layer in self._layers]
        if len(rows) < len(features[0]):
            index = torch.tensor(rows, device=features[0].device)
            features = [states[index] for states in features]
        states = self.runner.remember(batch, torch.cat(features, dim=-1))
        last = -1
        for span, (part, progress) in zip(spans, seen, strict=True):
            last += len(span.tokens)
            progress.state = states[last]
            if progress.gap[0] == progress.gap[1]:
                part.sequence.table.num_cached[self.limits.store] = progress.position

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`; the pages are the pool's business."""
        self._known.pop(sequence, None)

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        proposal = super().propose(sequences, lengths)
        self._read.clear()  # nothing of a draft's own rounds is kept
        return proposal

    # -- rounds --------------------------------------------------------------------------

    def _catch_up(self, drafts: list[_Draft]) -> tuple[list[_Draft], Tensor]:
        """The first round: the row before each sequence's last token, from true features."""
        ready = [draft for draft in drafts if self._ready(draft.sequence)]
        if not ready:
            return [], torch.empty(0)
        states = torch.stack([self._known[draft.sequence].state for draft in ready])
        return ready, self._round(ready, states)

    def _read_newest(self, drafts: list[_Draft]) -> Tensor:
        """A round over every draft's newest token, from the states of the round before."""
        return self._round(drafts, self._states[[self._places[d.sequence] for d in drafts]])

    def _round(self, drafts: list[_Draft], states: Tensor) -> Tensor:
        spans = []
        for draft in drafts:
            sequence, progress = draft.sequence, self._known[draft.sequence]
            token = draft.tokens[-1] if draft.tokens else sequence.tokens[-1]
            start = progress.position - 1 + len(draft.tokens)
            spans.append(self._shifted(sequence, progress, start, [token]))
        logits, self._states = self.runner.run(self._batch(spans), states)
        self._places = {draft.sequence: i for i, draft in enumerate(drafts)}
        self._forwards += 1
        return logits[:, : self.limits.vocab_size]

    # -- books ---------------------------------------------------------------------------

    def _ready(self, sequence: Sequence) -> bool:
        """Whether the row before the last token is known."""
        progress = self._known.get(sequence)
        return (
            progress is not None
            and progress.life is sequence.table.num_cached
            and progress.position == len(sequence.tokens) - 1
        )

    def _follow(self, part: SequenceView) -> _Progress:
        """The progress that a sequence's rows continue; a new one at its first step, after a
        preemption, and where rows are missing."""
        sequence = part.sequence
        life = sequence.table.num_cached
        progress = self._known.get(sequence)
        if progress is None or progress.life is not life or progress.position < part.position:
            size = self.limits.page_size
            position, gap = part.position, (0, 0)
            if life[self.limits.store] < position:
                gap = (life[self.limits.store] // size, -(-position // size))
                position = gap[1] * size
            progress = _Progress(life, gap, position, torch.empty(0))
            self._known[sequence] = progress
        return progress

    def _span(self, sequence: Sequence, progress: _Progress, position: int, count: int) -> Span:
        """Rows of committed tokens, which hold the tokens behind them."""
        return self._shifted(
            sequence, progress, position, sequence.tokens[position + 1 : position + 1 + count]
        )

    def _shifted(
        self, sequence: Sequence, progress: _Progress, position: int, tokens: list[int]
    ) -> Span:
        first, last = progress.gap
        start = position - (last - first) * self.limits.page_size
        return Span(tokens, start, progress.table(sequence.table), len(tokens))

    def _batch(self, spans: list[Span]) -> Batch:
        limits, runner = self.limits, self.runner
        return build_batch(spans, limits.page_size, limits.num_pages, runner.device, 1)


def make_drafter(context: DrafterContext) -> EagleDrafter:
    """The drafter around the head that was loaded for it.

    Raises:
        ModelNotSupported: the head does not fit the target.
    """
    config, target, own, pool = context.config, context.target.model, context.own, context.pool
    assert own is not None
    runner = own.runner
    assert isinstance(runner, HeadRunner)
    head = runner.model
    if target.vocab_size != own.model.vocab_size:
        raise ModelNotSupported(
            f"the head knows a vocabulary of {own.model.vocab_size} tokens, the target has "
            f"{target.vocab_size}; take the head of this very model."
        )
    head.attach(target.embed, target.max_model_len)
    if target.embed is not None:
        width = target.embed(head.ids[:1]).shape[-1]
        if width * len(context.features) != head.width:
            raise ModelNotSupported(
                f"the head reads {head.width} numbers a token, but {len(context.features)} layers "
                f"of this target are {width} wide each; take the head of this very model."
            )
    limits = DraftModelLimits(
        store=own.store,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        temperature=config.speculation.draft_temperature,
    )
    return EagleDrafter(runner, limits, target.eos_token_ids, context.features)
