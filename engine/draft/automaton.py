"""A suffix automaton over a growing token sequence: what followed the longest repeated suffix?

It is the n-gram table of prompt lookup decoding, without a fixed n. The automaton of Blumer et
al. (1985) recognises every substring of the text read so far with at most two states per token,
and is extended online. Two facts make it a drafter:

* the suffix link of the newest state is the longest suffix that occurred before, so the
  longest match costs nothing to find;
* the transitions of that state are exactly the tokens that ever followed it.

Per state it keeps how often its substrings occurred and where they last ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_ROOT = 0

#: Counts are updated along at most this many suffix links per token. Text rarely nests
#: repeats deeper; without a bound, a run of one token would cost quadratic time.
_MAX_LINKS = 32

#: Of a tree: suffixes that a node's continuations are looked for after, and of each the most
#: continuations that are taken.
_MOST_SUFFIXES = 4
_MOST_BRANCHES = 4


class SuffixAutomaton:
    """Longest-suffix continuation, amortised O(1) per token read."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]
        self._end: list[int] = [0]  # where the state's substrings ended most recently
        self._last = _ROOT
        self.num_tokens = 0

    @property
    def match_length(self) -> int:
        """Length of the longest suffix of the text that also occurred earlier."""
        return self._length[self._link[self._last]] if self._last else 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Reads more tokens."""
        for token in tokens:
            self._append(token)

    def draft(self, max_tokens: int, min_match: int) -> list[int]:
        """Continues the text as it continued after earlier occurrences of its suffix.

        At every depth the most frequent continuation is taken, on a tie the most recent.

        Args:
            max_tokens: most tokens to return.
            min_match: shortest suffix worth drafting from, in tokens.
        """
        if self.match_length < max(1, min_match):
            return []
        draft: list[int] = []
        state = self._link[self._last]
        while len(draft) < max_tokens and self._next[state]:
            token, state = max(
                self._next[state].items(),
                key=lambda item: (self._count[item[1]], self._end[item[1]]),
            )
            draft.append(token)
        return draft

    def tree(self, nodes: int, depth: int, min_match: int) -> tuple[list[int], list[int]]:
        """Continues the text in several ways where it went on in several ways before.

        A continuation is as likely as its counts after the longest suffix say; what they leave
        (the less, the longer the suffix and the more often it was met) goes to what followed
        shorter ones, as in prediction by partial matching. The likeliest nodes are taken.

        Args:
            nodes: most tokens to return.
            depth: most tokens in a row.
            min_match: shortest suffix worth drafting from, in tokens.

        Returns:
            Tokens and their parents: see `engine.tree`.
        """
        tokens: list[int] = []
        parents: list[int] = []
        if self.match_length < max(1, min_match):
            return tokens, parents
        level = {-1: 0}
        queue: list[tuple[float, int, int, int, int]] = []  # -odds, order, parent, token, state
        node, odds, state = -1, 1.0, self._link[self._last]
        while True:
            if level[node] < depth:
                for token, share, target in self._continuations(state, min_match):
                    heapq.heappush(queue, (-odds * share, len(queue), node, token, target))
            if not queue or len(tokens) == nodes:
                return tokens, parents
            lost, _, parent, token, state = heapq.heappop(queue)
            node, odds = len(tokens), -lost
            level[node] = level[parent] + 1
            tokens.append(token)
            parents.append(parent)

    def _continuations(self, state: int, min_match: int) -> list[tuple[int, float, int]]:
        """(token, probability, next state) of what followed a state's longest substring, the
        likeliest first, and of what followed shorter ones."""
        found: dict[int, tuple[int, float, int]] = {}
        left = 1.0
        for _ in range(_MOST_SUFFIXES):
            following = self._next[state].items()
            seen = sum(self._count[target] for _, target in following)
            if seen:
                weight = self._length[state] * left / (self._length[state] * seen + 1)
                recent = heapq.nlargest(
                    _MOST_BRANCHES,
                    following,
                    key=lambda item: (self._count[item[1]], self._end[item[1]]),
                )
                for token, target in recent:
                    found.setdefault(token, (token, weight * self._count[target], target))
                left -= weight * seen
            state = self._link[state]
            if state <= _ROOT or self._length[state] < min_match:
                break
        return sorted(found.values(), key=lambda one: -one[1])

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        current = self._new_state(self.num_tokens, {})
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state == -1:
            self._link[current] = _ROOT
        else:
            self._link[current] = self._longest_at(state, token)
        self._last = current
        self._count_suffixes(current)

    def _longest_at(self, state: int, token: int) -> int:
        """The state whose longest substring is that of `state` followed by `token`; splits
        the target of the transition if that one stands for longer substrings too."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        clone = self._new_state(self._length[state] + 1, dict(self._next[target]))
        self._link[clone] = self._link[target]
        self._count[clone] = self._count[target]
        self._end[clone] = self._end[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _count_suffixes(self, state: int) -> None:
        """Every suffix of the text has just occurred once more, ending here."""
        for _ in range(_MAX_LINKS):
            if state <= _ROOT:
                break
            self._count[state] += 1
            self._end[state] = self.num_tokens
            state = self._link[state]

    def _new_state(self, length: int, transitions: dict[int, int]) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(0)
        self._end.append(0)
        return len(self._length) - 1
