"""Whether deciding on drafts pays for itself.

Deciding takes time that no cost model of passes and drafts holds: more for larger batches, where
there is less to gain. So for every range of batch sizes what it took is compared with what the
decisions were expected to save. Where that was not twice as much, most steps go without: the few
that remain still notice when drafts are worth something again, and one or two good finds end the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: While resting, every fourth step is decided on all the same; with more sequences every eighth,
#: twelfth or sixteenth, since they tell as much in fewer steps, and half as often where next to
#: nothing is saved. Probes are due every fourth step as well, so that other rounds would miss
#: most of them.
_ROUND, _MOST_ROUNDS = 4, 4

_FEWEST = 64  # decisions before anybody rests
_GAIN = 0.02
_GAIN_RESTING = 0.25  # of a decision that would save more than usual

#: What is expected comes true in part only: the best-looking estimates are those that err.
_ASKED = 2.0
_NEXT_TO_NOTHING = 0.1  # of what deciding takes


@dataclass(slots=True)
class _Range:
    """Means over the decisions at one range of batch sizes."""

    spent: float = 0.0
    saved: float = 0.0
    count: int = 0

    @property
    def resting(self) -> bool:
        """Whether deciding does not pay, as far as is known."""
        return self.count >= _FEWEST and self.saved < _ASKED * self.spent

    @property
    def hopeless(self) -> bool:
        """Whether it brings next to nothing."""
        return self.saved < _NEXT_TO_NOTHING * self.spent


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
        if record is None or not record.resting:
            return False
        rounds = min(max(1, batch // _ROUND), _MOST_ROUNDS)
        if record.hopeless:
            rounds *= 2
        return step % (_ROUND * rounds) != 0

    def note(self, batch: int, spent: float, saved: float) -> None:
        """Takes one decision in.

        Args:
            batch: sequences that emit.
            spent: seconds that deciding took.
            saved: seconds that it was expected to save; 0 if nobody was to draft.
        """
        record = self._ranges.setdefault(batch.bit_length(), _Range())
        woken = record.resting and saved > record.saved
        record.count += 1
        gain = max(_GAIN, 1.0 / record.count)
        record.spent += gain * (spent - record.spent)
        record.saved += (_GAIN_RESTING if woken else gain) * (saved - record.saved)
