"""What drafters would have said that were not asked: full information, without exploring.

The text that is emitted does not depend on who drafts. So the guess of a drafter that costs next
to nothing can be noted beside the step, and judged once the text has got that far. Since it is
made from committed tokens and judged by committed tokens, nothing about a draft token can leak
into the decision whether to check it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.control.outcomes import Outcomes
from engine.control.step import PendingStep
from engine.draft.drafter import Advisor
from engine.sequence import Sequence

#: Judged guesses that are handed over together: learning costs more by the call than by the guess.
_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class _Guess:
    """A draft that was not checked."""

    slot: int
    bucket: int
    expected: float
    allowed: int
    start: int  # where in the text it would begin
    tokens: list[int]

    def fate(self, said: list[int]) -> tuple[int, bool] | None:
        """Tokens that came true and whether the next one did not; None = not known yet."""
        text = said[self.start : self.start + len(self.tokens)]
        accepted = 0
        for guessed, token in zip(self.tokens, text, strict=False):
            if guessed != token:
                return accepted, True
            accepted += 1
        return (accepted, False) if accepted == len(self.tokens) else None


class Scorer:
    """Notes guesses and judges them; one at a time of each sequence and drafter.

    Args:
        advisor: whose previews are the guesses.

    Attributes:
        free: names of drafters that can be scored without asking them.
    """

    def __init__(self, advisor: Advisor) -> None:
        self._advisor = advisor
        self.free: set[str] = set()
        self._guesses: dict[Sequence, dict[str, _Guess]] = {}
        self._judged: dict[int, tuple[_Guess, int, bool]] = {}  # by slot

    @property
    def num_sequences(self) -> int:
        """Sequences it remembers."""
        return len(self._guesses)

    def look(self, step: PendingStep) -> None:
        """Notes what the drafters that are not asked in a step would say."""
        for number, line in enumerate(step.lines):
            own = self._guesses.get(line.sequence)
            if own is not None and line.drafter in own:
                continue
            if step.used[line.row] == number and step.length(line):
                continue  # its real draft will be judged
            tokens = self._advisor.preview(line.drafter, line.sequence, line.limit)
            if tokens is None:
                continue
            self.free.add(line.drafter)
            if own is None:
                own = self._guesses[line.sequence] = {}
            own[line.drafter] = _Guess(
                slot=step.slots[number],
                bucket=line.bucket,
                expected=step.expected[number],
                allowed=line.limit,
                start=len(line.sequence.tokens),
                tokens=tokens[: line.limit],
            )

    def judge(self) -> Iterator[Outcomes]:
        """Judges the guesses that the text has caught up with, and yields what was learnt."""
        for sequence, guesses in self._guesses.items():
            for name, guess in list(guesses.items()):
                fate = guess.fate(sequence.tokens)
                if fate is not None:
                    del guesses[name]
                    if guess.slot in self._judged:
                        yield from self.flush()
                    self._judged[guess.slot] = guess, *fate
        if len(self._judged) >= _TOGETHER:
            yield from self.flush()

    def flush(self) -> Iterator[Outcomes]:
        """What was judged and not yet handed over."""
        judged, self._judged = list(self._judged.values()), {}
        if judged:
            yield Outcomes(
                slots=[guess.slot for guess, _, _ in judged],
                buckets=[guess.bucket for guess, _, _ in judged],
                expected=[guess.expected for guess, _, _ in judged],
                allowed=[guess.allowed for guess, _, _ in judged],
                drafted=[len(guess.tokens) for guess, _, _ in judged],
                accepted=[accepted for _, accepted, _ in judged],
                refused=[refused for _, _, refused in judged],
            )

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence; what was judged must have been handed over."""
        self._guesses.pop(sequence, None)
