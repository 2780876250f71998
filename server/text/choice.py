"""From the tokens of one choice to text: where it ends, and what may be released."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.types import DraftTrace, TokenLogprobs
from server.text.decode import Detokenizer
from server.text.reasoning import ReasoningRules
from server.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of a request become text.

    Args:
        stop: strings at which a choice ends.
        include_stop: whether the stop string or stop token is part of the text.
        skip_special_tokens: whether special tokens have no text.
        min_tokens: tokens before which no stop string counts.
        terminators: tokens that end a choice; their text is left out.
        stop_token_ids: the terminators that the caller named: reported as `stop_reason`.
        reasoning: how a thought before the answer is told from it; None = all is the answer.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    terminators: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    reasoning: ReasoningRules | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, and where it came from.

    Args:
        drafter: who guessed it; None = the model itself said it.
        refused: guessed tokens in whose place it stands.
        drafted: draft tokens that were checked in the step that ended with it.
        partial: the rest of the token's text follows in another piece, and all of the above.
    """

    text: str
    drafter: str | None
    refused: tuple[int, ...] = ()
    drafted: int = 0
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: text, and the tokens it came from.

    Args:
        offsets: per token, where its text begins in the choice's text (characters).
        finish_reason: "stop" or "length" in the choice's last delta, else None.
        stop_reason: the stop string or the caller's stop token that ended it.
        pieces: the text token by token, if the engine told where tokens came from. A token whose
            text is released bit by bit has several.
        reasoning: text of the thought before the answer; `text` is the answer's alone then.
        begin: of all characters the one with which `text` begins.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    offsets: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pieces: tuple[Piece, ...] = ()
    reasoning: str = ""
    begin: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    token_id: int
    logprob: TokenLogprobs | None
    start: int  # characters of text before it
    end: int
    open: bool  # it ended within a character
    origin: Piece | None  # still without its text


class ChoiceText:
    """The text of one choice as its tokens arrive.

    A token is released together with its text. Text is held back while it may be the start of
    a stop string, and bytes while they may be the start of a character; so what was released
    is never taken back. Everything ends at the same token, the one that completes the stop
    string: it and all before it count as generated, later ones never happened, whether they
    came one by one or in one block. Stop strings are looked for in the answer, not in a thought
    before it.
    """

    def __init__(self, rules: TextRules, detokenizer: Detokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stop)
        self._thought = None if rules.reasoning is None else rules.reasoning.reader()
        self._buffer = ""  # text not yet released
        self._length = 0  # characters of all text so far
        self._waiting: deque[_Waiting] = deque()
        self.tokens = 0
        self.finished = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought, without its tags."""
        return 0 if self._thought is None else self._thought.tokens

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        trace: DraftTrace | None = None,
    ) -> Delta | None:
        """Takes newly committed tokens, and what is known of where they came from.

        Returns:
            What may be released now; None if nothing may. If it has a `finish_reason`, a stop
            string was found and the rest of the tokens was dropped.
        """
        for index, token_id in enumerate(token_ids):
            logprob = logprobs[index] if logprobs is not None else None
            origin = _origin(index, len(token_ids), trace) if trace else None
            stop = self._append(token_id, logprob, origin)
            if stop is not None:
                return self._close("stop", stop)
        delta = self._release(everything=False)
        return delta if delta.token_ids or delta.text or delta.reasoning else None

    def finish(self, reason: str, stop_token_id: int | None) -> Delta:
        """Ends the choice for a reason of the engine's and releases what was held back."""
        text = self._detokenizer.finish()
        self._add_text(text)
        if self._thought is not None:
            self._thought.feed(text, token=False)
        named = stop_token_id in self._rules.stop_token_ids
        return self._close(reason, stop_token_id if named else None)

    def _append(
        self, token_id: int, logprob: TokenLogprobs | None, origin: Piece | None
    ) -> str | None:
        """Adds one token; returns the stop string it completes, if it does."""
        rules = self._rules
        start = self._length
        silent = token_id in rules.terminators and not rules.include_stop
        text = "" if silent else self._detokenizer.push(token_id)
        self._add_text(text)
        self.tokens += 1
        self._waiting.append(
            _Waiting(token_id, logprob, start, self._length, self._detokenizer.incomplete, origin)
        )
        if self._thought is not None:
            text, start = self._thought.feed(text)
        if self.tokens <= rules.min_tokens or not (found := self._matcher.feed(text)):
            return None
        string, consumed = found
        end = start + consumed
        cut = end if rules.include_stop else end - len(string)
        self._buffer = self._buffer[: len(self._buffer) - (self._length - cut)]
        self._length = cut
        return string

    def _add_text(self, text: str) -> None:
        self._buffer += text
        self._length += len(text)

    def _close(self, finish_reason: str, stop_reason: str | int | None) -> Delta:
        self.finished = True
        return self._release(everything=True, finish_reason=finish_reason, stop_reason=stop_reason)

    def _release(
        self,
        *,
        everything: bool,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> Delta:
        held = max(self._matcher.held, 0 if self._thought is None else self._thought.held)
        safe = self._length if everything else self._length - held
        incomplete = self._detokenizer.incomplete
        out: list[_Waiting] = []
        while self._waiting:
            first = self._waiting[0]
            held = first.end > safe or (first.open and incomplete and first.end == self._length)
            if held and not everything:
                break
            out.append(self._waiting.popleft())
        count = len(self._buffer) - (self._length - safe)
        first_character = self._length - len(self._buffer)
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        logprobs = tuple(token.logprob for token in out if token.logprob is not None)
        reasoning, answer = "", text
        if self._thought is not None:
            reasoning, answer = self._thought.split(text, final=everything)
        return Delta(
            text=answer,
            reasoning=reasoning,
            begin=first_character + len(text) - len(answer),
            token_ids=tuple(token.token_id for token in out),
            logprobs=logprobs if len(logprobs) == len(out) else None,
            offsets=tuple(min(token.start, self._length) for token in out),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            pieces=tuple(self._pieces(out, first_character, text)),
        )

    def _pieces(self, out: Sequence[_Waiting], start: int, text: str) -> Iterator[Piece]:
        """`text`, which begins at character `start` of the choice, by the tokens it came from:
        those that are released with it, and perhaps the beginning of the next."""
        end = start + len(text)
        tokens = [*out, *(token for token in self._waiting if token.start < end)]
        if not any(token.origin for token in tokens):
            return
        ends = [*(token.start for token in tokens[1:]), end]
        for number, (token, stop) in enumerate(zip(tokens, ends, strict=True)):
            if token.origin is not None:
                own = text[max(token.start - start, 0) : max(stop - start, 0)]
                if number < len(out):
                    yield replace(token.origin, text=own)
                else:
                    yield Piece(own, token.origin.drafter, partial=True)


def _origin(index: int, count: int, trace: DraftTrace) -> Piece:
    """Where token `index` of the `count` of a step came from; its text is not known yet."""
    drafter = trace.drafter if index < trace.accepted else None
    if index < count - 1:
        return Piece("", drafter)
    return Piece("", drafter, trace.refused, trace.drafted)
