"""Stop strings: found in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces.

    Knuth, Morris and Pratt's automaton, one per string: constant work per character, and its
    state is the number of characters that must be held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._borders = [borders(string) for string in strings]
        self._states = [0] * len(strings)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[str, int] | None:
        """Reads more text.

        Returns:
            The stop string that is complete first (of several, the longest) and the number of
            characters of `text` up to its end; None if there is none yet.
        """
        if not self._strings:
            return None
        for index, character in enumerate(text):
            found = ""
            for which, string in enumerate(self._strings):
                state, borders = self._states[which], self._borders[which]
                while state and string[state] != character:
                    state = borders[state - 1]
                state += string[state] == character
                if state == len(string):
                    found = max(found, string, key=len)
                    state = borders[-1]
                self._states[which] = state
            if found:
                return found, index + 1
        return None


def borders(string: str | bytes) -> list[int]:
    """[i] = length of the longest proper prefix of string[:i+1] that is also its suffix."""
    result = [0] * len(string)
    for index in range(1, len(string)):
        length = result[index - 1]
        while length and string[index] != string[length]:
            length = result[length - 1]
        result[index] = length + (string[index] == string[length])
    return result
