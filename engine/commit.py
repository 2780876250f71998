"""What a verdict does to its sequence: tokens appended, caches moved on, surplus pages freed."""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.pages import TARGET, PagePool
from engine.judge import Judgement
from engine.laps import Laps
from engine.layout import SequenceRows
from engine.sequence import Sequence
from engine.types import DraftTrace, Event, PromptLogprobs, Tokens


def commit(
    rows: SequenceRows,
    judgement: Judgement,
    pool: PagePool,
    laps: Laps,
    speedup_of: Callable[[Sequence], float | None],
) -> list[Event]:
    """Commits one sequence's verdict.

    Args:
        rows: the sequence's, in the step that was judged.
        judgement: sound.
        pool: holds its pages.
        laps: of the step; tell when the sequence was scheduled and judged.
        speedup_of: asked for what a sequence has gained so far if it is traced, and else not.

    Returns:
        What its caller is to hear.
    """
    sequence, verdict, table = rows.sequence, judgement.verdict, rows.sequence.table
    events: list[Event] = []
    if sequence.first_scheduled is None:
        sequence.first_scheduled = laps.end("schedule")
    if sequence.wants_prompt_logprobs:
        events += _collect_prompt_logprobs(sequence, rows.position + 1, judgement)
    table.num_cached[TARGET] += rows.num_fed
    if rows.scheduled.samples:
        sequence.append(verdict.emitted)
        # Accepted drafts were computed in place; the last emitted token is fed next.
        table.num_cached[TARGET] = len(sequence.tokens) - 1
        sequence.target_passes += 1
        sequence.last_draft = verdict.drafted
        if verdict.drafted:
            by = sequence.drafted_by
            by[rows.drafter] = by.get(rows.drafter, 0) + verdict.drafted
        sequence.draft_tokens += verdict.drafted
        sequence.accepted_tokens += verdict.accepted
        if sequence.first_token is None:
            sequence.first_token = laps.end("judge")
        tokens, name = tuple(verdict.emitted), sequence.request.request_id
        traced = sequence.request.speculation.trace
        trace = _trace(rows, judgement, speedup_of(sequence)) if traced else None
        events.append(Tokens(name, sequence.choice, tokens, judgement.logprobs, trace))
    pool.commit(table, sequence.tokens)
    pool.truncate(table, len(sequence.tokens))
    return events


def _trace(rows: SequenceRows, judgement: Judgement, speedup: float | None) -> DraftTrace:
    verdict = judgement.verdict
    kept = range(verdict.accepted) if judgement.way is None else judgement.way
    # Where the last token is a draft's, too, the answer has ended: what follows was not refused.
    judged = len(verdict.emitted) > verdict.accepted
    refused = tuple(token for i, token in enumerate(rows.draft) if judged and i not in kept)
    return DraftTrace(rows.drafter, verdict.drafted, verdict.accepted, refused, speedup)


def _collect_prompt_logprobs(sequence: Sequence, start: int, judgement: Judgement) -> list[Event]:
    """Notes entries of the prompt from `start` on; once there are all, they are an event."""
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    # Where they belong, not at the end: after a preemption the prompt is read once more.
    sequence.prompt_logprobs[start:] = judgement.prompt_logprobs
    if sequence.wants_prompt_logprobs:
        return []
    entries = tuple(sequence.prompt_logprobs)
    return [PromptLogprobs(sequence.request.request_id, entries)]
