"""A model's thought before its answer: which tags enclose it, and where in a text it lies."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

from server.text.stop import borders

#: Where a text begins: before a thought, if one comes; within one; or after it, in the answer.
Phase = Literal["before", "inside", "after"]

#: A place in a `TagScanner`: one of these, and how much of the tag that may follow is there.
State = tuple[int, int]
BEFORE, INSIDE, AFTER = range(3)
START: dict[Phase, State] = {"before": (BEFORE, 0), "inside": (INSIDE, 0), "after": (AFTER, 0)}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One family's way to write a thought.

    Args:
        begin: what stands before it; some templates write this themselves.
        end: what stands behind it.
    """

    begin: str
    end: str


FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


def format_of(template: str) -> str | None:
    """The name of the format that a chat template shows; None if it shows none."""
    return next(
        (name for name, form in FORMATS.items() if form.end in template or form.begin in template),
        None,
    )


def phase_of(prompt: str, form: ReasoningFormat) -> Phase:
    """Where the text begins that follows a prompt, by what its template wrote last."""
    end = prompt[-256:].rstrip()
    if end.endswith(form.begin):
        return "inside"
    return "after" if end.endswith(form.end) else "before"


def phase_within(text: str, form: ReasoningFormat) -> Phase:
    """Where a text is that was begun for the model and is to be continued."""
    opened, closed = text.rfind(form.begin), text.rfind(form.end)
    if opened > closed:
        return "inside"
    return "after" if text.strip() else "before"


class TagScanner:
    """Follows a text through a thought, symbol by symbol. A thought comes first or not at all:
    only blanks may precede it; it ends with the first closing tag.

    Args:
        begin, end: the tags, as characters or as bytes.
    """

    def __init__(self, begin: str | bytes, end: str | bytes) -> None:
        self.begin, self.end = begin, end
        self._borders = borders(end)
        self._blank: Any = " \t\r\n" if isinstance(begin, str) else b" \t\r\n"

    def step(self, state: State, symbol: Any) -> State:
        """The place after one more character or byte."""
        where, matched = state
        if where == BEFORE:
            if symbol == self.begin[matched]:
                return (BEFORE, matched + 1) if matched + 1 < len(self.begin) else (INSIDE, 0)
            return state if not matched and symbol in self._blank else (AFTER, 0)
        if where == INSIDE:
            while matched and self.end[matched] != symbol:
                matched = self._borders[matched - 1]
            matched += self.end[matched] == symbol
            return (INSIDE, matched) if matched < len(self.end) else (AFTER, 0)
        return state


class ThoughtReader:
    """Tells the thought from the answer in one text that grows. Of the thought, and of an answer
    after one, blanks at the edges are left out.

    Args:
        form: how thoughts are written.
        phase: where the text begins.
        exact: leave no blanks of the answer out.
    """

    def __init__(self, form: ReasoningFormat, phase: Phase, *, exact: bool = False) -> None:
        self._scanner = TagScanner(form.begin, form.end)
        self._state = START[phase]
        self._length = 0  # characters so far
        self._undecided = ""  # what was read before it was known whether a thought begins
        self._tail = ""  # the end of the thought: blanks, and what may be its closing tag
        self._opened: int | None = 0 if phase == "inside" else None  # where the thought begins,
        self._solid = 0  # where it ends, without blanks that may be its last
        self._closing = 0  # where its closing tag begins, once there is one
        self._answer: int | None = 0 if phase == "after" else None  # where the answer begins
        self._trims = not exact
        self._starts = array("q")  # of the thought's tokens
        self._split = 0  # characters that `split` has seen
        self._said = [False, False]  # whether anything but blanks came of thought and answer

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be of a tag, or blanks before one."""
        if self._state[0] == BEFORE:
            return len(self._undecided)
        return len(self._tail) if self._state[0] == INSIDE else 0

    @property
    def tokens(self) -> int:
        """Tokens of the thought so far; those of its tags are not counted."""
        if self._state[0] == INSIDE:
            matched = self._state[1]
            return (
                bisect_left(self._starts, self._length - matched) if matched else len(self._starts)
            )
        return bisect_left(self._starts, self._closing)

    def feed(self, text: str, *, token: bool = True) -> tuple[str, int]:
        """Reads the text of one more token.

        Args:
            token: False = it is the rest of the last one's.

        Returns:
            The part of the text that is now known to be of the answer, and at which character of
            the whole it begins.
        """
        start, self._length = self._length, self._length + len(text)
        if self._state[0] == AFTER:
            return text, start
        if self._state[0] == INSIDE and token:
            self._starts.append(start)
        for i, symbol in enumerate(text):
            where, self._state = self._state[0], self._scanner.step(self._state, symbol)
            if self._state[0] == where:
                continue
            if where == BEFORE and self._state[0] == AFTER:
                self._answer, whole = 0, self._undecided + text
                return whole, 0
            if where == BEFORE:
                self._opened = self._solid = start + i + 1
                continue
            self._follow(text, start, i + 1, len(self._scanner.end))
            self._closing = start + i + 1 - len(self._scanner.end)
            self._answer = start + i + 1
            return text[i + 1 :], self._answer
        if self._state[0] == BEFORE:
            self._undecided += text
        else:
            self._follow(text, start, len(text), self._state[1])
        return "", self._length

    def _follow(self, text: str, start: int, end: int, matched: int) -> None:
        """Finds the end of the thought in its tail and in text[:end], of which the last `matched`
        characters may be a tag."""
        assert self._opened is not None
        self._tail += text[max(self._opened - start, 0) : end]
        body = self._tail[: len(self._tail) - matched]
        solid = len(body.rstrip())
        if solid:
            self._solid = start + end - len(self._tail) + solid
        self._tail = self._tail[solid:]

    def split(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Parts text that is released, all that came after the last, into thought and answer.

        Args:
            final: it is the last; what is still open is what it seems to be.
        """
        start, self._split = self._split, self._split + len(text)
        thought = answer = ""
        if self._opened is not None:
            end = self._solid if self._answer is not None else self._length
            thought = text[max(self._opened - start, 0) : max(end - start, 0)]
            if not self._said[0]:
                thought = thought.lstrip()
            if final and self._answer is None:
                thought, self._state = thought.rstrip(), (INSIDE, 0)
            self._said[0] |= bool(thought)
        begin = 0 if self._opened is None and final else self._answer
        if begin is not None:
            answer = text[max(begin - start, 0) :]
            if self._trims and self._opened is not None and not self._said[1]:
                answer = answer.lstrip()
            self._said[1] |= bool(answer)
        return thought, answer


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """How the thoughts of a request's answers are told from the answers.

    Args:
        form: how they are written.
        phase: where each text begins.
        exact: whether answers keep the blanks that they begin with.
    """

    form: ReasoningFormat
    phase: Phase
    exact: bool = False

    def reader(self) -> ThoughtReader:
        """A reader for one choice."""
        return ThoughtReader(self.form, self.phase, exact=self.exact)
