"""What comes from a model or a server, made harmless for a terminal.

A terminal obeys escape sequences: they move the cursor, write into the clipboard, change the
title, or make later text invisible. A model may say any character, so nothing of it reaches the
terminal that is more than a character to look at.
"""

from __future__ import annotations

_PICTURES = 0x2400  # the first of Unicode's pictures of control characters

_REPLACED: dict[int, str | None] = {code: chr(_PICTURES + code) for code in range(0x20)}
_REPLACED[0x7F] = "\u2421"
#: C1: some terminals take them for escape sequences of one character.
_REPLACED |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
#: They reorder what stands around them, so that text reads otherwise than it is.
_REPLACED |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
#: Line ends by other names, at which programs disagree.
_REPLACED |= {0x2028: "\n", 0x2029: "\n"}
del _REPLACED[ord("\n")], _REPLACED[ord("\t")]


def safe(text: str) -> str:
    """`text` with every character that a terminal would obey replaced by one to look at.

    Line feeds and tabs stay; a carriage return before a line feed goes.
    """
    return text.replace("\r\n", "\n").translate(_REPLACED)
