"""Thoughts as a grammar: free until they end, by themselves or because they have to, and then an
answer that may have a grammar of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.grammar import Grammar, Matcher
from server.text.codec import TextCodec
from server.text.reasoning import (
    AFTER,
    BEFORE,
    INSIDE,
    START,
    Phase,
    ReasoningFormat,
    State,
    TagScanner,
)


class TagTokens:
    """The tags of a format in a tokenizer's tokens.

    Args:
        codec: the tokenizer.
        form: how thoughts are written.

    Attributes:
        begin: the opening tag as the tokenizer spells it; empty if it cannot.
        ends: what is missing of the closing tag once so many of its bytes are there; where the
            tokenizer cannot spell that, the whole tag.
    """

    def __init__(self, codec: TextCodec, form: ReasoningFormat) -> None:
        self._codec = codec
        self.scanner = TagScanner(form.begin.encode(), form.end.encode())
        self.begin = codec.spell(form.begin.encode())
        end = form.end.encode()
        whole = codec.spell(end)
        self.ends = [codec.spell(end[n:]) or whole for n in range(len(end))]
        self._running: dict[int, frozenset[int]] | None = None

    def text(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._codec.token_bytes(token)

    def running_on(self, vocabulary: int) -> dict[int, frozenset[int]]:
        """Tokens that would close a thought and go on, by how many bytes of its closing tag are
        there. Looks at every token the first time: not for the event loop."""
        if self._running is None:
            end = self.scanner.end
            assert isinstance(end, bytes)
            found: dict[int, set[int]] = {n: set() for n in range(len(end))}
            for token in range(vocabulary):
                text = self.text(token)
                if end[-1] in text[:-1]:
                    for matched, tokens in found.items():
                        place = self._closes((INSIDE, matched), text)
                        if place is not None and place < len(text):
                            tokens.add(token)
            self._running = {matched: frozenset(tokens) for matched, tokens in found.items()}
        return self._running

    def _closes(self, state: State, text: bytes) -> int | None:
        """How many bytes of a text close a thought; None if they do not."""
        for count, byte in enumerate(text, 1):
            state = self.scanner.step(state, byte)
            if state[0] == AFTER:
                return count
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text is.

    Args:
        state: of the tags.
        since: tokens before the thought, its opening tag included.
        early: tokens that the matcher of an answer without a thought has taken.
        alive: whether all tokens may be those of such an answer.
        opening: how many they are if they begin the opening tag as it is spelled, else None.
        late: tokens that the matcher of an answer after a thought has taken.
        forced: tokens that must come next, to close the thought.
    """

    state: State
    since: int = 0
    early: int = 0
    alive: bool = True
    opening: int | None = 0
    late: int = 0
    forced: tuple[int, ...] = ()


class ThoughtGrammar:
    """A thought of any text, and then an answer. See `engine.grammar.Grammar`.

    Args:
        tags: what encloses the thought.
        phase: where the text begins; not after a thought.
        answer: what the answer must match; None = it may be anything, ends included.
        most: tokens after which a thought is closed; None = it may go on.
        vocabulary: ids from here on have no logit.
    """

    def __init__(
        self,
        tags: TagTokens,
        phase: Phase,
        answer: Grammar | None,
        most: int | None,
        vocabulary: int,
    ) -> None:
        self.tags, self.phase, self.answer, self.most = tags, phase, answer, most
        self.vocabulary = vocabulary
        self._masks: dict[int, bytes] = {}
        self.running_on = {} if answer is None else tags.running_on(vocabulary)

    @property
    def end_tokens(self) -> frozenset[int]:
        """See `Grammar.end_tokens`; none where the answer has no grammar, whose end it would be."""
        return frozenset() if self.answer is None else self.answer.end_tokens

    def start(self) -> Matcher:
        """See `Grammar.start`."""
        return _ThoughtMatcher(self)

    def within(self, matched: int) -> bytes:
        """What a thought may go on with once `matched` bytes of its closing tag are there: all but
        what ends the text, and what would begin the answer with the same token."""
        mask = self._masks.get(matched)
        if mask is None:
            bits = bytearray(b"\xff" * ((self.vocabulary + 7) // 8))
            for token in self.end_tokens | self.running_on[matched]:
                bits[token // 8] &= 255 - (1 << token % 8)
            mask = self._masks[matched] = bytes(bits)
        return mask


class _ThoughtMatcher:
    """See `engine.grammar.Matcher`. One matcher follows the answer from the first token, as long
    as there may be no thought; another from where the thought has ended."""

    def __init__(self, grammar: ThoughtGrammar) -> None:
        self._grammar, self._tags = grammar, grammar.tags
        inside = grammar.phase == "inside"
        first = _Place(START[grammar.phase], alive=not inside, opening=None if inside else 0)
        self._places = [self._limited(first, 0)]
        answer = grammar.answer
        self._early = None if answer is None else answer.start()
        self._late = None if answer is None else answer.start()

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            place = self._after(self._places[-1], token)
            if place is None:
                return count
            self._places.append(place)
        return len(tokens)

    def rewind(self, count: int) -> None:
        here, there = self._places[-1], self._places[-1 - count]
        if self._early is not None and self._late is not None:
            self._early.rewind(here.early - there.early)
            self._late.rewind(here.late - there.late)
        del self._places[len(self._places) - count :]

    def allowed(self) -> bytes | None:
        place = self._places[-1]
        if place.forced:
            return _with(b"", place.forced[0])
        if self._grammar.answer is None:
            return None
        if place.state[0] == INSIDE:
            return self._grammar.within(place.state[1])
        matcher = self._answering(place)
        mask = b"" if matcher is None else matcher.allowed()
        if mask is not None and place.state[0] == BEFORE and place.opening is not None:
            mask = _with(mask, *self._tags.begin[place.opening : place.opening + 1])
        return mask

    def forced(self) -> list[int]:
        place = self._places[-1]
        if place.forced or place.state[0] != AFTER:
            return list(place.forced)
        matcher = self._answering(place)
        return [] if matcher is None else matcher.forced()

    @property
    def may_end(self) -> bool:
        place = self._places[-1]
        if self._grammar.answer is None:
            return not place.forced
        matcher = self._answering(place)
        return matcher is not None and matcher.may_end

    @property
    def failure(self) -> str | None:
        matcher = self._answering(self._places[-1])
        return None if matcher is None else matcher.failure

    def _answering(self, place: _Place) -> Matcher | None:
        """What follows the answer, if the text may be in one."""
        if place.alive:
            return self._early
        return self._late if place.state[0] == AFTER else None

    def _after(self, place: _Place, token: int) -> _Place | None:
        """Where one more token leads; None if it may not come. Moves the matchers."""
        if place.forced:
            if token != place.forced[0]:
                return None
            rest = place.forced[1:]
            return replace(place, forced=rest, state=place.state if rest else (AFTER, 0))
        if place.state[0] == AFTER:
            matcher = self._answering(place)
            if matcher is None:
                return place
            if not matcher.advance([token]):
                return None
            if place.alive:
                return replace(place, early=place.early + 1)
            return replace(place, late=place.late + 1)
        return (self._think if place.state[0] == INSIDE else self._begin)(place, token)

    def _think(self, place: _Place, token: int) -> _Place | None:
        state, text = place.state, self._tags.text(token)
        if token in self._grammar.running_on.get(state[1], ()):
            return None
        for byte in text:
            state = self._tags.scanner.step(state, byte)
        after = place if state == place.state else replace(place, state=state)
        return self._limited(after, len(self._places))

    def _begin(self, place: _Place, token: int) -> _Place | None:
        """A token that may open a thought, or be the first of an answer without one."""
        state, opening, early = place.state, place.opening, place.early
        for byte in self._tags.text(token):
            state = self._tags.scanner.step(state, byte)
        begin = self._tags.begin
        opens = opening is not None and begin[opening : opening + 1] == (token,)
        opening = opening + 1 if opening is not None and opens else None
        alive = place.alive
        if self._early is not None:
            alive = alive and bool(self._early.advance([token]))
            if not alive and not opens:
                return None
            early += alive
        if state[0] == INSIDE:
            alive, opening = False, None
        after = _Place(state, len(self._places), early, alive, opening)
        return self._limited(after, len(self._places))

    def _limited(self, place: _Place, count: int) -> _Place:
        """A place after `count` tokens, where a thought that is long enough has to be closed."""
        most = self._grammar.most
        if place.state[0] != INSIDE or most is None or count - place.since < most:
            return place
        return replace(place, forced=self._tags.ends[place.state[1]])


def _with(mask: bytes, *tokens: int) -> bytes:
    """A mask that allows more tokens."""
    bits = bytearray(mask)
    for token in tokens:
        bits.extend(bytes(max(token // 8 + 1 - len(bits), 0)))
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)
