"""What a pass of the target processes, in numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.cache.pages import TARGET
from engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass of the target processes.

    Attributes:
        batch: sequences that emit.
        sequences: sequences in the pass.
        rows: query tokens.
        context: cached tokens read, summed over sequences.
        attention: pairs of a query token and a cached token.
        silent: query tokens that are given no logits: of a prompt all but its last.
    """

    batch: int
    sequences: int
    rows: int
    context: int
    attention: int
    silent: int = 0

    def with_drafts(self, plan: StepPlan, drafted: Sequence[int]) -> Load:
        """The same pass with so many draft tokens for each scheduled sequence."""
        pairs = sum(
            count * len(scheduled.sequence.tokens)
            for count, scheduled in zip(drafted, plan.scheduled, strict=True)
            if count
        )
        return replace(self, rows=self.rows + sum(drafted), attention=self.attention + pairs)


def loads_of(plan: StepPlan) -> tuple[Load, Load]:
    """The load of a plan's emitting sequences alone, one query token each, and of its whole pass
    with prefill; both without drafts."""
    batch = fed = read = pairs = decode_read = silent = 0
    for scheduled in plan.scheduled:
        feed = scheduled.num_feed
        context = scheduled.sequence.table.num_cached[TARGET] + feed
        fed += feed
        read += context
        pairs += context * feed
        if feed > scheduled.samples and not scheduled.sequence.wants_prompt_logprobs:
            silent += feed - scheduled.samples
        if scheduled.samples:
            batch += 1
            decode_read += context
    decode = Load(batch, batch, batch, decode_read, decode_read)
    return decode, Load(batch, len(plan.scheduled), fed, read, pairs, silent)


def cell_of(count: int) -> int:
    """Neighbouring counts of sequences that are looked at together: each by itself up to 16,
    eight cells to an octave beyond."""
    if count <= 16:
        return max(count, 1) - 1
    octave = (count - 1).bit_length() - 5
    return 16 + 8 * octave + ((count - 1 - (16 << octave)) >> (octave + 1))
