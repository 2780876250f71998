"""Looking again at what seemed not worth it, for at most one per cent of the time.

Two things go stale when the planner follows its estimates: the acceptance of sequences that do
not draft, and the cost of plain steps while all do. A *probe* gives one sequence one draft
token more than planned; a *shadow* step drafts nothing. Both are charged, at the loss that is
predicted for them, to an account that fills with one per cent of the time that passes; a probe
that is accepted gets back what its token was worth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from engine.control.allocate import Margins
from engine.control.baseline import ENOUGH
from engine.sequence import Sequence

_SHARE = 0.01

#: The account, in plain steps: what it opens with, and where it is full. A long quiet time
#: must not buy a long time of losses.
_OPENING = 2.0
_FULL = 8.0

#: A probe is charged at least this share of the time it takes.
_LEAST_LOSS = 0.25

#: Steps between probes of one sequence that did not succeed. They double with every probe of
#: anybody that fails; at the longest pause new sequences wait as well.
_PAUSE = 8
_LONGEST_PAUSE = 32
_PAUSE_DRAFTING = 40  # where a shorter draft is being checked anyway

#: Who has not just succeeded is looked at every so many steps.
_ROUND = 4

#: Probability of a shadow step: while the baseline is unknown, thin, or merely old.
_SHADOW_UNKNOWN = 0.05
_SHADOW_THIN = 0.02
_SHADOW_OLD = 0.01
_OLD = 64  # steps since the last plain one


class Account:
    """Seconds that exploring may lose.

    Attributes:
        credit: that it still may.
        most: that can be saved up.
        spent: less what was given back.
    """

    def __init__(self) -> None:
        self.credit = self.spent = self.most = 0.0
        self._open = False

    def pass_time(self, seconds: float, plain_seconds: float) -> None:
        """Earns the share of a step that took `seconds`."""
        if not self._open:
            self._open = True
            self.credit = _OPENING * plain_seconds
        self.most = _FULL * plain_seconds
        self.credit = min(self.credit + _SHARE * seconds, self.most)

    def take(self, loss: float) -> bool:
        """Pays for a predicted loss in seconds, not negative, if there is enough."""
        if loss > self.credit:
            return False
        self.credit -= loss
        self.spent += loss
        return True

    def give_back(self, seconds: float) -> None:
        """What was taken for a loss, and was none."""
        self.credit += seconds
        self.spent -= seconds


class Explorer:
    """Decides on probes and shadow steps.

    Args:
        seed: of the shadow steps' lottery.
    """

    def __init__(self, seed: int = 0) -> None:
        self.account = Account()
        self._lottery = random.Random(seed)
        self._due: dict[Sequence, int] = {}  # the step from which a probe is welcome
        self._pause = _PAUSE
        self._saving_for = 0.0  # the loss that the account could not pay last
        self._eager: set[Sequence] = set()  # whose last probe succeeded
        self._at_stake: dict[Sequence, float] = {}  # paid for probes that may yet be worth it

    def shadow(self, samples: int, age: int, loss: float | None) -> bool:
        """Whether this step should be plain although drafts would pay.

        Args:
            samples: plain steps seen at this batch size.
            age: steps since the last of them.
            loss: predicted; None if the account is not to be asked.
        """
        if samples < ENOUGH:
            odds = _SHADOW_UNKNOWN
        elif samples < 2 * ENOUGH:
            odds = _SHADOW_THIN
        else:
            odds = _SHADOW_OLD if age > _OLD else 0.0
        drawn = odds > 0.0 and self._lottery.random() < odds
        return drawn and (loss is None or self.account.take(max(loss, 0.0)))

    def any_due(self, step: int, sequences: Seq[Sequence]) -> bool:
        """Whether `probes` could choose anyone. Who has just succeeded is asked at once, the
        others every few steps, and nobody before there is credit: pricing takes time."""
        if (step % _ROUND and not self._eager) or self.account.credit < self._saving_for:
            return False
        due = self._due
        if self._pause == _LONGEST_PAUSE:
            for sequence in sequences:
                due.setdefault(sequence, step + _LONGEST_PAUSE)
        return any(due.get(sequence, 0) <= step for sequence in sequences)

    def probes(
        self, step: int, sequences: Seq[Sequence], lengths: Seq[int], margins: Margins
    ) -> list[int]:
        """Which sequences get one draft token more, all from one drafter.

        Who was last right comes first, as soon as there is credit. Others wait until there is
        enough for a group, since a draft model's round costs about the same for one and for
        many: it grows to one in eight of the sequences, and beyond until its members cost as
        much again as the first of them alone.

        Args:
            step: number of this step.
            sequences: that may draft.
            lengths: planned for them.
            margins: of one more token.
        """
        group, losses = self._group(step, sequences, margins)
        self._saving_for = 0.0
        eager = bool(group) and sequences[group[0]] in self._eager
        if not eager and sum(losses) > self.account.credit:
            self._saving_for = sum(losses)
            return []
        chosen: list[int] = []
        for i, loss in zip(group, losses, strict=True):
            if not self.account.take(loss):
                self._saving_for = 0.0 if chosen else loss
                break
            chosen.append(i)
            surplus = margins.token_seconds - margins.brings[i]
            self._at_stake[sequences[i]] = min(loss, max(surplus, 0.0))
        for i in chosen:
            self._wait(sequences[i], step, drafting=lengths[i] > 0)
        if chosen:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return chosen

    def _group(
        self, step: int, sequences: Seq[Sequence], margins: Margins
    ) -> tuple[list[int], list[float]]:
        """Sequences to be probed together, and the loss that is predicted for each."""
        due = [
            i
            for i, promise in enumerate(margins.promise)
            if promise > 0.0 and self._due.get(sequences[i], 0) <= step
        ]
        due.sort(key=lambda i: (sequences[i] not in self._eager, self._due.get(sequences[i], 0)))
        group: list[int] = []
        losses: list[float] = []
        first = others = 0.0  # prices
        for i in due:
            if group and margins.drafters[i] != margins.drafters[group[0]]:
                continue
            price = margins.joint[i] if group else margins.price[i]
            # A prediction of no loss at all may be what is wrong.
            loss = max(price - margins.brings[i], _LEAST_LOSS * price)
            if sum(losses) + loss > self.account.most:
                continue  # a long text to catch up with must not block the rest
            if group and len(group) > len(sequences) // 8 and others + price > first:
                break
            if group:
                others += price
            else:
                first = price
            group.append(i)
            losses.append(loss)
        return group, losses

    def _wait(self, sequence: Sequence, step: int, drafting: bool) -> None:
        """Until a sequence is probed again, should the probe of this step fail."""
        self._eager.discard(sequence)
        self._due[sequence] = step + (_PAUSE_DRAFTING if drafting else self._pause)

    def succeeded(self, sequence: Sequence, step: int) -> None:
        """A probe was accepted: it has brought a token, and the next one need not wait."""
        self.account.give_back(self._at_stake.pop(sequence, 0.0))
        self._due[sequence] = step + 1
        self._pause = _PAUSE
        self._eager.add(sequence)

    @property
    def eager(self) -> bool:
        """Whether somebody's last probe succeeded and the next one is wanted at once."""
        return bool(self._eager)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._due.pop(sequence, None)
        self._at_stake.pop(sequence, None)
        self._eager.discard(sequence)

    @property
    def num_sequences(self) -> int:
        """Sequences it remembers."""
        return len(self._due)
