"""What a grammar is to the engine: which tokens may come next, as a function of those before.

Whoever knows texts compiles it; here it is three questions about token ids. A grammar is one
more processor that depends on the prefix, so its state is never kept: `GrammarCursor` is asked
about a row's whole output, committed tokens and the draft tokens before the row, and moves there
from wherever it stands. What is rejected cannot stay in it, and neither can what a preemption
undoes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Protocol


class Matcher(Protocol):
    """A place in a grammar; one thread at a time. It never sees an end token."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Takes tokens as long as they fit, and says how many did; the rest left no trace."""

    def rewind(self, count: int) -> None:
        """Takes back the last `count` tokens."""

    def allowed(self) -> bytes | None:
        """One bit for each token id that may come next, the lowest id in the lowest bit of the
        first byte. Ids beyond are not allowed; end tokens are where the text may end. None = any
        may."""

    def forced(self) -> list[int]:
        """What must come next, spelled as the tokenizer spells it; none where there is a choice.
        May be shorter than what is forced, as its end may merge with what follows."""

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""

    @property
    def failure(self) -> str | None:
        """Why it knows no further; None while it does."""


class Grammar(Protocol):
    """A compiled grammar; immutable, and shared by requests and threads."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text; none if it binds but a part of it, and not its end."""

    def start(self) -> Matcher:
        """A matcher before the first token."""


class _Lost(Exception):
    """A matcher that knows no further; the message says why."""


class GrammarCursor:
    """Answers questions about one sequence's output, wherever in it they are asked.

    Paths are output tokens after the prompt. On a path that leaves the grammar, or goes on after
    its end, nothing is known and nothing forbidden: only draft tokens that will be refused lead
    there.

    Args:
        grammar: of the sequence's request.

    Attributes:
        failure: why a row could not be judged; None while all could.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._path: list[int] = []
        self._mask: bytes | None = None  # at `_path`, once it was asked for
        self._forced: list[int] | None = None  # the same
        self.failure: str | None = None

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """The tokens that may follow `path`, as in `Matcher.allowed`; None = any may, or nothing is
        known."""
        try:
            if (matcher := self._at(path)) is None:
                return None
            if self._mask is None:
                self._mask = matcher.allowed()
                self._check(matcher)
            return self._mask
        except _Lost as lost:
            self.failure = str(lost)
            return None

    def forced(self, path: Sequence[int]) -> list[int]:
        """What must follow `path`, in the tokenizer's own spelling."""
        try:
            if (matcher := self._at(path)) is None:
                return []
            if self._forced is None:
                self._forced = matcher.forced()
                self._check(matcher)
            return self._forced
        except _Lost:
            return []

    def fitting(self, path: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a draft, from the first, may follow `path` one after the other; an
        end token is the last that may."""
        try:
            if (matcher := self._at(path)) is None:
                return len(draft)
            ends = self._grammar.end_tokens
            inner = list(takewhile(lambda token: token not in ends, draft))
            fits = matcher.advance(inner)
            ended = fits == len(inner) < len(draft) and matcher.may_end
            matcher.rewind(fits)
            self._check(matcher)
            return fits + ended
        except _Lost:
            return 0

    def _at(self, path: Sequence[int]) -> Matcher | None:
        """The matcher, moved to `path`; None where there is none.

        Raises:
            _Lost: it knows no further.
        """
        if self._matcher is None:
            self._matcher = self._grammar.start()
        matcher, here = self._matcher, self._path
        common = len(here)
        if path[:common] != here:
            common = sum(takewhile(bool, map(eq, here, path)))
            matcher.rewind(len(here) - common)
            del here[common:]
            self._mask = self._forced = None
        ends = self._grammar.end_tokens
        inner = list(takewhile(lambda token: token not in ends, path[common:]))
        if inner and (taken := matcher.advance(inner)):
            here.extend(inner[:taken])
            self._mask = self._forced = None
        self._check(matcher)
        return matcher if len(here) == len(path) else None

    def _check(self, matcher: Matcher) -> None:
        """Begins anew with a fresh matcher after one that failed."""
        if matcher.failure is not None:
            self._matcher, self._path, self._mask, self._forced = None, [], None, None
            raise _Lost(matcher.failure)
