"""Grammars over the tiny models' tokens, as automata: exact, seeded, and no texts needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.grammar import Matcher
from tests.tiny_models import EOS, VOCAB

#: state -> token -> the state after it.
Table = list[dict[int, int]]


@dataclass(frozen=True, eq=False)
class Automaton:
    """A grammar by its table; state 0 is the first.

    Attributes:
        accepting: states in which the text may end.
        breaks_after: a matcher that was asked in so deep a place fails; None = never.
    """

    table: Table
    accepting: frozenset[int]
    end_tokens: frozenset[int] = frozenset({EOS})
    breaks_after: int | None = None

    def start(self) -> Matcher:
        """See `Grammar.start`."""
        return AutomatonMatcher(self)

    def state(self, tokens: Sequence[int]) -> int | None:
        """Where these tokens lead; None = out of the grammar."""
        state: int | None = 0
        for token in tokens:
            state = self.table[state].get(token) if state is not None else None
        return state

    def next_tokens(self, tokens: Sequence[int]) -> set[int]:
        """What may follow, the end included."""
        state = self.state(tokens)
        assert state is not None, f"{tokens} left the grammar"
        return set(self.table[state]) | (self.end_tokens if state in self.accepting else set())

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether tokens, with an end token or cut short, are of this grammar."""
        inner = tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens
        state = self.state(inner)
        return state is not None and (len(inner) == len(tokens) or state in self.accepting)


class AutomatonMatcher:
    """A way through an automaton."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._states = [0]
        self.failure: str | None = None

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            after = self._automaton.table[self._states[-1]].get(token)
            if after is None:
                return count
            self._states.append(after)
        return len(tokens)

    def rewind(self, count: int) -> None:
        assert 0 <= count < len(self._states), "rewinds beyond the beginning"
        del self._states[len(self._states) - count :]

    def allowed(self) -> bytes:
        most = self._automaton.breaks_after
        if most is not None and len(self._states) > most:
            self.failure = "The grammar is too hard here."
        tokens = set(self._automaton.table[self._states[-1]])
        tokens |= self._automaton.end_tokens if self.may_end else set()
        bits = sum(1 << token for token in tokens)
        return bits.to_bytes((VOCAB + 7) // 8, "little")

    def forced(self) -> list[int]:
        forced, state = [], self._states[-1]
        while len(self._automaton.table[state]) == 1 and state not in self._automaton.accepting:
            [(token, state)] = self._automaton.table[state].items()
            forced.append(token)
            if len(forced) > 20:
                break
        return forced

    @property
    def may_end(self) -> bool:
        return self._states[-1] in self._automaton.accepting


def random_automaton(seed: int, states: int = 12) -> Automaton:
    """Few tokens from every state, a single one from about half of them; from each the text can
    go on or end, as the ids of end tokens lead nowhere else."""
    dice = random.Random(seed)
    tokens = [token for token in range(VOCAB) if token != EOS]
    table: Table = []
    for _ in range(states):
        fan = dice.choice((1, 1, 1, 2, 5, 30))
        table.append({token: dice.randrange(states) for token in dice.sample(tokens, fan)})
    accepting = {state for state in range(states) if dice.random() < 0.2}
    return Automaton(table, frozenset(accepting))
