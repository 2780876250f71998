"""Whether deciding on drafts pays for itself.

Deciding takes time that no cost model of passes and drafts holds: more for larger batches, where
there is less to gain. So for every range of batch sizes what it took is compared with what the
decisions were expected to save. Where it took more, most steps go without: a quarter of the
effort still notices when drafts are worth something again, and a single good find outweighs
hundreds of microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: While resting, every so many steps are decided on all the same.
_ROUND = 4

_FEWEST = 64  # decisions before anybody rests
_GAIN = 0.02


@dataclass(slots=True)
class _Range:
    """Means over the decisions at one range of batch sizes."""

    spent: float = 0.0
    saved: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Effort:
    """Compares what decisions take with what they bring, by octaves of batch size."""

    _ranges: dict[int, _Range] = field(default_factory=dict)

    def rests(self, batch: int, step: int) -> bool:
        """Whether a step should go without a decision.

        Args:
            batch: sequences that emit in it.
            step: its number.
        """
        record = self._ranges.get(batch.bit_length())
        if record is None or record.count < _FEWEST or step % _ROUND == 0:
            return False
        return record.saved < record.spent

    def note(self, batch: int, spent: float, saved: float) -> None:
        """Takes one decision in.

        Args:
            batch: sequences that emit.
            spent: seconds that deciding took.
            saved: seconds that it was expected to save; 0 if nobody was to draft.
        """
        record = self._ranges.setdefault(batch.bit_length(), _Range())
        record.count += 1
        gain = max(_GAIN, 1.0 / record.count)
        record.spent += gain * (spent - record.spent)
        record.saved += gain * (saved - record.saved)
