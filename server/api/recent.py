"""What is remembered of a request that is over: numbers and fixed words, no text and no id."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from typing_extensions import TypedDict

from server.api.generation import Generation


class RecentRequest(TypedDict):
    """A request that is over, its choices taken together. Times are seconds; null = it never
    happened, or is unknown. `finished` is the Unix time of its end; `tokens_per_second` counts
    from the first token on, and without it; `drafters` has the draft tokens that were checked, by
    drafter; `error` is the code of what ended it, if it failed."""

    finished: float
    endpoint: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_seconds: float | None
    seconds: float
    tokens_per_second: float | None
    tokens_per_pass: float | None
    drafted: int
    accepted: int
    drafters: dict[str, int]
    speedup: float | None
    finish_reasons: dict[str, int]
    error: str | None


#: What the log says of a request, too.
_FROM_LOG = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "ttft_seconds",
    "tokens_per_pass",
    "drafted",
    "accepted",
    "speedup",
    "finish_reasons",
    "error",
)


def recent_request(generation: Generation, logged: dict[str, Any]) -> dict[str, Any]:
    """A `RecentRequest`.

    Args:
        logged: what the log says of it, see `usage.summary`, with its endpoint and seconds.
    """
    drafters: Counter[str] = Counter()
    for choice in generation.choices:
        if choice.stats is not None:
            drafters.update(dict(choice.stats.drafted_by))
    return {
        "finished": round(time.time(), 3),
        "endpoint": logged["endpoint"],
        "stream": logged["stream"],
        "seconds": logged["seconds"],
        "tokens_per_second": _rate(generation),
        "drafters": dict(drafters),
        **{name: logged[name] for name in _FROM_LOG},
    }


def _rate(generation: Generation) -> float | None:
    """Tokens a second, of all choices, behind the first token of each."""
    ends = [choice.last_token for choice in generation.choices if choice.last_token is not None]
    if generation.first_token is None or max(ends) <= generation.first_token:
        return None
    tokens = sum(choice.text.tokens for choice in generation.choices) - len(ends)
    return round(tokens / (max(ends) - generation.first_token), 2)
