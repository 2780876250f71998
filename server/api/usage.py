"""What a request cost: OpenAI's usage object, and what speculation did for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.types import SequenceStats
from server.api.generation import Generation


def usage(generation: Generation) -> dict[str, Any]:
    """The usage object so far.

    `completion_tokens` counts the tokens emitted (of all `best_of` candidates, as OpenAI
    does); rejected prediction tokens are reported beside it, not inside.
    """
    prompt_tokens = sum(len(request.prompt) for request in generation.job.requests)
    completion_tokens = sum(choice.text.tokens for choice in generation.choices)
    stats = _stats(generation)
    # The samples of one prompt share its pages; the first one shows what was there before.
    cached = sum(
        choice.stats.cached_prompt_tokens
        for choice in generation.choices
        if choice.stats is not None and choice.sample == 0
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(s.accepted_prediction_tokens for s in stats),
            "rejected_prediction_tokens": sum(s.rejected_prediction_tokens for s in stats),
            "reasoning_tokens": sum(c.text.reasoning_tokens for c in generation.choices),
        },
    }


def speculation(generation: Generation) -> dict[str, Any]:
    """Draft tokens checked and kept, target passes, and tokens emitted per pass (None = no
    pass), summed over the finished choices; and their speed-up by wall clock (None = unknown).
    """
    stats = _stats(generation)
    passes = sum(entry.target_passes for entry in stats)
    tokens = sum(c.text.tokens for c in generation.choices if c.stats is not None)
    return {
        "drafted": sum(entry.draft_tokens for entry in stats),
        "accepted": sum(entry.accepted_tokens for entry in stats),
        "target_passes": passes,
        "tokens_per_pass": round(tokens / passes, 4) if passes else None,
        "speedup": _speedup(stats),
    }


def summary(generation: Generation) -> dict[str, Any]:
    """What one line of a log says of a request: numbers and fixed words only. Times are
    seconds; None = never happened."""
    spent, stats = usage(generation), _stats(generation)
    arrival = generation.job.requests[0].arrival
    starts = [entry.first_scheduled for entry in stats if entry.first_scheduled is not None]
    ends = Counter(choice.finish_reason or "unfinished" for choice in generation.choices)
    return {
        "prompt_tokens": spent["prompt_tokens"],
        "cached_tokens": spent["prompt_tokens_details"]["cached_tokens"],
        "generated_tokens": spent["completion_tokens"],
        "finish_reasons": dict(ends),
        "queue_seconds": _since(arrival, min(starts, default=None)),
        "ttft_seconds": _since(arrival, generation.first_token),
        **speculation(generation),
        "error": generation.error,
    }


def _speedup(stats: list[SequenceStats]) -> float | None:
    """Of all choices; each weighs as much as its passes, which take about equally long."""
    known = [(entry.speedup, entry.target_passes) for entry in stats if entry.speedup is not None]
    passes = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / passes, 4) if passes else None


def _since(start: float, instant: float | None) -> float | None:
    return None if instant is None else round(instant - start, 6)


def _stats(generation: Generation) -> list[SequenceStats]:
    return [choice.stats for choice in generation.choices if choice.stats is not None]
