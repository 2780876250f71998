"""How much of prompts a step reads, and of which, beside the answers it goes on with.

Who streams an answer feels every step, so a step that decodes is bounded in time: reading prompts
may stretch it to a multiple of what it takes without them. A token late in a long prompt costs
many times what an early one costs, since it attends to everything before it; therefore the bound
is held against the measured cost of the whole pass and not against a number of tokens.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from engine.cache.pages import TARGET
from engine.pace import Counts, PassCost
from engine.sequence import Sequence

#: While nothing is measured, a pass is taken to double its time at so many tokens more.
_DOUBLING = 32

#: Share of the time that a pass gets for prompts whose log probabilities are wanted: to find those
#: of a row afterwards takes about as long as its pass.
_LOGPROB_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold at most.

    Attributes:
        tokens: query tokens left for prompts.
        logprob_rows: tokens of prompts whose log probabilities are wanted.
        stretch: how many times its plain time a step that decodes may take; 0 = unbounded.
        factor: how many times what its price says reading prompts adds to a pass.
    """

    tokens: int
    logprob_rows: int
    stretch: float
    factor: float = 1.0


class PromptBudget:
    """What a step may still read of prompts.

    Args:
        limits: of the step.
        decodes: sequences that are fed their one token in it.
        cost: of passes; None = unknown.

    Attributes:
        fed: tokens by sequence.
        tokens: that may still be fed.
        decodes: how many there are.
    """

    def __init__(self, limits: Limits, decodes: list[Sequence], cost: PassCost | None) -> None:
        self.fed: dict[Sequence, int] = {}
        self.tokens = limits.tokens
        self._logprob_rows = limits.logprob_rows
        self.decodes = len(decodes)
        self._read = read = sum(s.table.num_cached[TARGET] + 1 for s in decodes)
        self._drafts = drafts = sum(s.last_draft for s in decodes)
        pairs = sum((1 + s.last_draft) * (s.table.num_cached[TARGET] + 1) for s in decodes)
        self._load = self._plain = (len(decodes) + drafts, len(decodes), read, pairs, 0)
        self._cost = cost if decodes and limits.stretch else None
        self._seconds = self._cost.seconds(*self._load) if self._cost else None
        stretch = 1 + max(limits.stretch - 1, 0) / limits.factor
        self._most = math.inf if self._seconds is None else stretch * self._seconds
        if decodes and limits.stretch and self._seconds is None:
            most = int((limits.stretch - 1) * (_DOUBLING + len(decodes)))
            self.tokens = min(self.tokens, max(1, most))

    def feed(self, sequence: Sequence, share: float = 1.0, at_least: int = 0) -> None:
        """Feeds a sequence as much of what it wants as goes into a share of what is left.

        Args:
            share: of tokens, rows and time, above 0.
            at_least: tokens that it gets even if there is no time for them.
        """
        before = self.fed.get(sequence, 0)
        most = min(sequence.num_uncached - before, math.ceil(share * self.tokens))
        if sequence.wants_prompt_logprobs:
            most = min(most, math.ceil(share * self._logprob_rows))
            share *= _LOGPROB_SHARE
        more = max(min(at_least - before, most), self._affordable(sequence, before, most, share))
        if more <= 0:
            return
        self.fed[sequence] = before + more
        self.tokens -= more
        self._logprob_rows -= more if sequence.wants_prompt_logprobs else 0
        if self._seconds is not None:
            self._load = self._with(sequence, before, before + more)
            self._seconds = self._time(self._load)

    def loads(self, drafted: int) -> tuple[Counts, Counts]:
        """The load of the decoding sequences alone, and of the pass as it is planned so far, both
        with so many draft tokens in them."""
        more = drafted - self._drafts
        pairs = more * self._read // max(1, self.decodes)

        def with_drafts(load: Counts) -> Counts:
            rows, sequences, context, attention, silent = load
            return rows + more, sequences, context, attention + pairs, silent

        return with_drafts(self._plain), with_drafts(self._load)

    def _affordable(self, sequence: Sequence, before: int, most: int, share: float) -> int:
        """Of `most` further tokens those that there is time for."""
        if self._seconds is None:
            return most
        limit = self._seconds + share * (self._most - self._seconds)
        return bisect.bisect_right(
            range(1, most + 1),
            limit,
            key=lambda more: self._time(self._with(sequence, before, before + more)),
        )

    def _with(self, sequence: Sequence, before: int, after: int) -> Counts:
        """The load of the pass if a sequence is fed `after` tokens instead of `before`."""
        rows, sequences, context, attention, silent = self._load
        cached, more = sequence.table.num_cached[TARGET], after - before
        pairs = after * (cached + after) - before * (cached + before)
        first = before == 0
        quiet = 0 if sequence.wants_prompt_logprobs else more - (after == sequence.num_uncached)
        read = context + more + first * cached
        return rows + more, sequences + first, read, attention + pairs, silent + quiet

    def _time(self, load: Counts) -> float:
        seconds = self._cost.seconds(*load) if self._cost else None
        return math.inf if seconds is None else seconds


def share_out(reading: list[Sequence], budget: PromptBudget) -> None:
    """Feeds prompts: half of the budget goes to who is first in order, so that nobody starves,
    the rest to whoever has least left to read, so that nobody waits for a longer one.

    The two of them are fed a token at least, whatever it takes.

    Args:
        reading: sequences with something to read, in order.
        budget: of the step.
    """
    if not reading:
        return
    shortest = sorted(reading, key=lambda s: (s.request.priority, s.num_uncached, s.order))
    budget.feed(reading[0], share=0.5 if len(reading) > 1 else 1.0, at_least=1)
    budget.feed(shortest[0], at_least=1)
    for sequence in shortest[1:]:
        budget.feed(sequence)
