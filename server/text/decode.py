"""Incremental decoding: the text of a growing sequence, character by whole character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: A window that has not settled after so many tokens never will: the bytes are not UTF-8.
_LONGEST_WINDOW = 64


class Detokenizer(Protocol):
    """Turns tokens into text; joined, its answers are the text of the whole sequence."""

    @property
    def incomplete(self) -> bool:
        """Whether bytes of an unfinished character wait for the next token."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""

    def finish(self) -> str:
        """The text of what is left at the end: unfinished characters become U+FFFD."""


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a string of bytes, and text is UTF-8.

    Args:
        bytes_of: the bytes of one token.
        silent: tokens without text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], silent: Collection[int]) -> None:
        self._bytes_of = bytes_of
        self._silent = silent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def incomplete(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window twice and takes the difference.

    The window starts with settled tokens that give context (a decoder may drop the space
    before the first word it sees) and ends with the tokens whose text is not yet certain.

    Args:
        decode: text of a list of tokens.
        context: tokens before the sequence; their text is not repeated.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        window = list(context)
        while window and decode(window).endswith(REPLACEMENT):
            window.pop()  # half a character gives no context
        self._window = window
        self._settled = len(window)  # tokens of the window whose text is out
        self._taken = 0  # characters of the unsettled part that are out already
        self.incomplete = False

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        new = self._new_text()
        # The trailing U+FFFD may be a character whose last bytes are still to come.
        certain = new.rstrip(REPLACEMENT)
        self.incomplete = len(certain) < len(new)
        if self.incomplete and len(self._window) - self._settled < _LONGEST_WINDOW:
            text, self._taken = certain[self._taken :], max(self._taken, len(certain))
            return text
        self.incomplete = False
        text = new[self._taken :]
        self._settle()
        return text

    def finish(self) -> str:
        self.incomplete = False
        text = self._new_text()[self._taken :]
        self._settle()
        return text

    def _new_text(self) -> str:
        context = self._decode(self._window[: self._settled])
        return self._decode(self._window)[len(context) :]

    def _settle(self) -> None:
        fresh = self._window[self._settled :]
        # Tokens without text give no context: keep what came before them as well.
        if self._decode(fresh):
            self._window = fresh
        self._settled = len(self._window)
        self._taken = 0
