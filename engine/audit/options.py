"""What to audit, and the odds of its verdict. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

#: A sound engine fails one distribution test in a million.
ODDS = 1e-6


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What to audit.

    Args:
        max_tokens: of each answer.
        streams: requests at once.
        temperature: 0 = greedy; above, every request has a seed.
        samples: texts of each distribution test; 0 = none.
    """

    max_tokens: int = 128
    streams: int = 16
    temperature: float = 0.0
    samples: int = 2048
