"""Which lossless rule judges a sequence's drafts.

====================================  ===========================================
a step in which ...                   is judged by
====================================  ===========================================
the request is greedy, or has a seed  match: the very tokens of plain decoding
the draft has no probabilities        match: no rule keeps more of it
all others                            `UNSEEDED`, or the rule that was configured
====================================  ===========================================

Sampling without a seed promises a distribution and no particular text, so the last line may
spend that freedom on keeping more of each draft.
"""

from __future__ import annotations

from engine.types import SamplingParams

#: What "auto" means for unseeded sampling from a probabilistic draft: docs/sampling.md has the
#: measurement.
UNSEEDED = "block"


def choose_rule(policy: str, params: SamplingParams) -> str:
    """The rule for one request's drafts, should they come with probabilities.

    Args:
        policy: "auto", "match", "rejection" or "block".
        params: of the request.

    Returns:
        "match", "rejection" or "block".
    """
    if params.greedy or params.seed is not None:
        return "match"
    return UNSEEDED if policy == "auto" else policy
