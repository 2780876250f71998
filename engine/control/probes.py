"""Looking again at what seemed not worth it, for at most one per cent of the time.

Two things go stale when the planner follows its estimates: the acceptance of sequences that do
not draft, and the cost of plain steps while all do. A *probe* gives a sequence one draft token
that should not pay; a *shadow step* drafts nothing. Both are charged, at the loss that is
predicted for them, to an account that fills with one per cent of the time that passes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.load import cell_of
from engine.sequence import Sequence

_SHARE = 0.01

#: The account, in plain steps: what it opens with, and where it is full. A long quiet time
#: must not buy a long time of losses.
_OPENING = 2.0
_FULL = 8.0

#: A probe is charged at least this share of the time it takes: a prediction of no loss at all
#: may be what is wrong.
_LEAST_LOSS = 0.25

#: Steps between probes of one sequence; they double while its probes fail, unless a probe may
#: lose no more than this share of the account.
_PAUSE, _LONGEST_PAUSE, _CHEAP = 4, 32, 0.01

#: Of a probe that succeeded: steps until the next one, and the part of its price, as far as its
#: token was worth it, that comes back.
_AGAIN = 3
_BACK = 0.6

#: Probability of a shadow step while a batch size has seen few plain steps, or none lately.
_ENOUGH = 8
_SHADOW_FEW = 0.05
_SHADOW_OLD = 0.01
_OLD = 64


@dataclass(slots=True)
class _Wait:
    """When a sequence may be probed again, how long it waits if that fails, and its part of what
    was paid."""

    due: int = 0
    pause: int = _PAUSE
    paid: float = 0.0


class Prober:
    """Decides on probes and shadow steps.

    Args:
        seed: of the shadow steps' lottery.

    Attributes:
        credit: seconds that exploring may still lose.
        spent: seconds that it was expected to lose so far.
    """

    def __init__(self, seed: int = 0) -> None:
        self.credit = self.spent = 0.0
        self._open = False
        self._lottery = random.Random(seed)
        self._waits: dict[Sequence, _Wait] = {}
        self._plain: dict[int, tuple[int, int]] = {}  # by cell: plain steps, and the last of them

    @property
    def num_sequences(self) -> int:
        """Sequences it remembers."""
        return len(self._waits)

    def due(self, sequence: Sequence, step: int) -> bool:
        """Whether a sequence may be probed in a step."""
        wait = self._waits.get(sequence)
        return wait is None or wait.due <= step

    def probe(self, sequences: Seq[Sequence], step: int, price: float, brings: float) -> bool:
        """Pays for a probe that some sequences share, if there is enough; they then wait for their
        next one.

        Args:
            price: seconds that it takes.
            brings: seconds that what it yields is expected to be worth.
        """
        loss = max(price - brings, _LEAST_LOSS * price)
        cheap = loss <= _CHEAP * self.credit
        if not self._pay(loss):
            return False
        for sequence in sequences:
            wait = self._waits.setdefault(sequence, _Wait())
            wait.due, wait.paid = step + wait.pause, loss / len(sequences)
            wait.pause = _PAUSE if cheap else min(2 * wait.pause, _LONGEST_PAUSE)
        return True

    def _pay(self, loss: float) -> bool:
        if loss > self.credit:
            return False
        self.credit -= loss
        self.spent += loss
        return True

    def succeeded(self, sequence: Sequence, step: int, worth: float) -> None:
        """A probe was accepted: it has brought a token, which is worth so many seconds, and the
        next one, for which most of the price comes back, need not wait."""
        wait = self._waits[sequence]
        back = _BACK * min(wait.paid, worth)
        self.credit += back
        self.spent -= back
        wait.due, wait.pause, wait.paid = step + _AGAIN, _PAUSE, 0.0

    def shadow(self, batch: int, step: int, loss: float | None) -> bool:
        """Whether a step should be plain although drafts would pay.

        Args:
            batch: sequences that emit.
            step: its number.
            loss: seconds that are expected to be lost; None if the account is not to be asked.
        """
        seen, last = self._plain.get(cell_of(batch), (0, 0))
        odds = _SHADOW_FEW if seen < _ENOUGH else _SHADOW_OLD if step - last > _OLD else 0.0
        drawn = odds > 0.0 and self._lottery.random() < odds
        return drawn and (loss is None or self._pay(loss))

    def plain(self, batch: int, step: int) -> None:
        """Notes a plain step without prefill."""
        cell = cell_of(batch)
        self._plain[cell] = (self._plain.get(cell, (0, 0))[0] + 1, step)

    def pass_time(self, seconds: float, plain_seconds: float) -> None:
        """Earns the share of a step that took `seconds`."""
        if not self._open:
            self._open, self.credit = True, _OPENING * plain_seconds
        self.credit = min(self.credit + _SHARE * seconds, _FULL * plain_seconds)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._waits.pop(sequence, None)
