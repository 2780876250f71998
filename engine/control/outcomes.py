"""What became of the drafts of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: A first token that is refused although it was likely, or accepted although it was not.
_LIKELY = 0.6
_UNLIKELY = 0.4


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the drafts of one step; lists with one entry per sequence.

    Attributes:
        slots, buckets: that the estimates came from; no slot twice.
        expected: the acceptance at depth 1 that was estimated.
        allowed: draft tokens asked for; 0 = none, and nothing is learnt.
        drafted: draft tokens judged.
        accepted: of these.
        refused: whether the token after the accepted ones was refused (not cut off).
    """

    slots: list[int]
    buckets: list[int]
    expected: list[float]
    allowed: list[int]
    drafted: list[int]
    accepted: list[int]
    refused: list[bool]

    def rows(self) -> Iterator[tuple[float, ...]]:
        """All that is known of one draft after another; of those that were asked for."""
        fields = (self.slots, self.buckets, self.expected, self.allowed)
        fates = (self.drafted, self.accepted, self.refused)
        return (row for row in zip(*fields, *fates, strict=True) if row[3])

    @property
    def surprises(self) -> int:
        """Sequences whose first token fared unlike its estimate."""
        fates = zip(self.expected, self.accepted, self.refused, strict=True)
        return sum(
            expected < _UNLIKELY if accepted else refused and expected > _LIKELY
            for expected, accepted, refused in fates
        )
