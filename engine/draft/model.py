"""The `model` drafter: a smaller language model guesses, round by round, for all sequences.

It keeps its own K/V on the shared pages. `table.num_cached[store]` says how far it has come
with a sequence; whatever is missing is fed first, in one packed pass, for whatever reason it
is missing: the prompt, a prefix found in the target's cache only, a pause, or the last token
of a fully accepted draft, which the drafter proposed but never read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from engine.batch import Span, build_batch
from engine.draft.drafter import DraftProposal, StepView
from engine.draft.entry import DrafterContext
from engine.model.passes import Runner
from engine.sampling import Purpose, SamplingRow, Selector, probabilities, process_logits
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftModelLimits:
    """What the drafter must respect.

    Args:
        store: index of its K/V store.
        page_size: tokens per page.
        num_pages: pages of the pool.
        vocab_size: ids it may propose: those that target and draft model share.
        max_model_len: its own context; it falls silent for a sequence that gets too long.
        max_batch_tokens: most tokens it is fed in one pass to catch up.
        temperature: factor on every request's own temperature.
    """

    store: int
    page_size: int
    num_pages: int
    vocab_size: int
    max_model_len: int
    max_batch_tokens: int
    temperature: float = 1.0


@dataclass(slots=True)
class _Draft:
    """One sequence's draft in the making."""

    index: int  # of the sequence in the call
    sequence: Sequence
    length: int
    tokens: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)  # [V] each, if q is wanted


class ModelDrafter:
    """Batched draft rounds of a causal language model.

    Under *match* verification it races its own distribution with the noise the target will
    use, so that both tend to draw the same token. Under rejection rules it draws with noise of
    its own and returns the distributions it drew from.

    Args:
        runner: the draft model.
        limits: see there.
        eos_token_ids: tokens that end a sequence, for rows that may not draw them yet.
    """

    name = "model"

    def __init__(
        self, runner: Runner, limits: DraftModelLimits, eos_token_ids: frozenset[int]
    ) -> None:
        self.runner = runner
        self.limits = limits
        self._eos_token_ids = eos_token_ids
        self._read: dict[Sequence, int] = {}  # draft tokens read in the step under way
        self._forwards = 0  # passes in that step

    def outlook(self, sequence: Sequence) -> int | None:
        """What it knows before it drafts: only that it is silent near its own context limit."""
        return 0 if len(sequence.tokens) < self.limits.max_model_len else None

    def backlog(self, sequence: Sequence) -> int:
        """Committed tokens it would have to read before it drafts."""
        return len(sequence.tokens) - sequence.table.num_cached[self.limits.store]

    def propose(self, sequences: Seq[Sequence], lengths: Seq[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        self._read.clear()
        self._forwards = 0
        room = self.limits.max_model_len
        wanted = [
            _Draft(i, sequence, min(length, room - len(sequence.tokens)))
            for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        alive, logits = self._catch_up([d for d in wanted if d.length > 0])
        depth = 1
        while alive:
            self._draw(alive, logits)
            alive = [d for d in alive if d.length > depth]
            if alive:
                logits = self._read_newest(alive)
                for draft in alive:
                    self._read[draft.sequence] = depth
            depth += 1
        return DraftProposal(
            [draft.tokens for draft in wanted],
            [torch.stack(draft.weights) if draft.weights else None for draft in wanted],
            forwards=self._forwards,
        )

    def observe(self, view: StepView) -> None:
        """Keeps the K/V of accepted draft tokens it has read; the rest will be overwritten."""
        for part in view.sequences:
            read = self._read.pop(part.sequence, 0)
            kept = min(read, part.verdict.accepted)
            part.sequence.table.num_cached[self.limits.store] += kept

    def release(self, sequence: Sequence) -> None:
        """See `Drafter.release`; the pages are the pool's business."""
        self._read.pop(sequence, None)

    # -- rounds --------------------------------------------------------------------------

    def _catch_up(self, drafts: list[_Draft]) -> tuple[list[_Draft], torch.Tensor]:
        """Feeds all committed tokens the draft model has not read, within the token budget.

        Returns:
            The drafts whose sequence is read to its end, and one row of logits for each.
            Others go on in the next step; they are silent until then.
        """
        store, budget = self.limits.store, self.limits.max_batch_tokens
        spans, ready = [], []
        for draft in drafts:
            table, tokens = draft.sequence.table, draft.sequence.tokens
            start = table.num_cached[store]
            fed = tokens[start : start + budget]
            if not fed:
                continue
            budget -= len(fed)
            table.num_cached[store] = start + len(fed)
            complete = table.num_cached[store] == len(tokens)
            spans.append(Span(fed, start, table, int(complete)))
            if complete:
                ready.append(draft)
        return ready, self._forward(spans)

    def _read_newest(self, drafts: list[_Draft]) -> torch.Tensor:
        """Feeds every draft's newest token; returns a row of logits for each."""
        return self._forward(
            [
                Span(d.tokens[-1:], len(d.sequence.tokens) + len(d.tokens) - 1, d.sequence.table, 1)
                for d in drafts
            ]
        )

    def _forward(self, spans: list[Span]) -> torch.Tensor:
        if not spans:
            return torch.empty(0)
        self._forwards += 1
        limits, runner = self.limits, self.runner
        batch = build_batch(
            spans, limits.page_size, limits.num_pages, runner.device, runner.min_rows
        )
        return runner.forward(batch).logits[:, : limits.vocab_size]

    def _draw(self, drafts: list[_Draft], logits: torch.Tensor) -> None:
        """One more token for every draft, from its row of logits [len(drafts), V]."""
        selector = Selector(logits)
        for purpose in (Purpose.TOKEN, Purpose.DRAFT):
            rows = [
                i
                for i, d in enumerate(drafts)
                if (d.sequence.verification == "match") == (purpose is Purpose.TOKEN)
            ]
            if not rows:
                continue
            contexts = [self._row(drafts[i].sequence, drafts[i].tokens) for i in rows]
            chosen = selector.select(rows, contexts, purpose)
            for i, token in zip(rows, chosen, strict=True):
                drafts[i].tokens.append(token)
            if purpose is Purpose.DRAFT:
                weights = probabilities(process_logits(logits[rows], contexts))
                for i, row in zip(rows, weights, strict=True):
                    drafts[i].weights.append(row)

    def _row(self, sequence: Sequence, drafted: list[int]) -> SamplingRow:
        """What the row after some draft tokens is about."""
        params = sequence.request.sampling
        if self.limits.temperature != 1.0 and not params.greedy:
            scaled = min(2.0, params.temperature * self.limits.temperature)
            params = replace(params, temperature=scaled)
        return SamplingRow(
            params=params,
            prompt=sequence.request.prompt,
            generated=sequence.tokens[sequence.prompt_length :] + drafted,
            position=len(sequence.tokens) + len(drafted),
            seed=sequence.seed,
            choice=sequence.choice,
            eos_token_ids=self._eos_token_ids,
            # Block verification looks at drafts that a later step draws anew, so their noise
            # must not be what they were drawn with before.
            step=0 if sequence.verification == "match" else sequence.target_passes,
        )


def make_drafter(context: DrafterContext) -> ModelDrafter:
    """The drafter around the draft model that was loaded for it."""
    return ModelDrafter(*parts_of(context))


def parts_of(context: DrafterContext) -> tuple[Runner, DraftModelLimits, frozenset[int]]:
    """What a `ModelDrafter` is made of."""
    config, target, own, pool = context.config, context.target.model, context.own, context.pool
    assert own is not None
    limits = DraftModelLimits(
        store=own.store,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        vocab_size=min(target.vocab_size, own.model.vocab_size),
        max_model_len=own.model.max_model_len,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        temperature=config.speculation.draft_temperature,
    )
    return own.runner, limits, target.eos_token_ids
