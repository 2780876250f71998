"""The passes in which a model is compared with transformers' own: integers only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

_CHUNK = 256  # most tokens of the long text in a pass
_SLOW = 16  # tokens at its end that come in small pieces


@dataclass(frozen=True, slots=True)
class Part:
    """One text's share of a pass: committed tokens, then some that will be refused."""

    text: int
    start: int
    count: int
    refused: int
    wanted: int  # rows at the end of the committed ones whose logits are compared


def schedule(lengths: Seq[int], borders: Seq[int]) -> list[list[Part]]:
    """The passes of our runner over two short texts and a long one.

    The long text is read in chunks, one of which crosses each border; before a border a pass
    also feeds tokens that are refused, across it. Its last tokens come one, two or three at a
    time, with refused ones behind every second time. Meanwhile the short ones are read a few
    tokens at a time, and begun anew whenever they end.

    Args:
        lengths: tokens of the three texts.
        borders: that the long one crosses.
    """
    passes: list[list[Part]] = []
    tails = [0, 0]  # tokens read of the short texts
    for start, end, refused in _pieces(lengths[2], borders):
        number = len(passes)
        parts = [Part(2, start, end - start, refused, min(end - start, 3))]
        for i, step in ((0, 1 + number % 3), (1, 4)):
            if tails[i] == lengths[i]:  # begun anew, whole
                tails[i], step = 0, lengths[i]
            count = min(step, lengths[i] - tails[i])
            room = lengths[i] - tails[i] - count
            parts.insert(number % 2, Part(i, tails[i], count, min(2 * (number % 2), room), count))
            tails[i] += count
        passes.append(parts)
    # Whole short texts beside the end of the long one: factors chosen by the longest row show.
    last = lengths[2] - 1
    passes.append([Part(i, 0, lengths[i], 0, lengths[i]) for i in (0, 1)])
    passes[-1].insert(1, Part(2, last, 1, 0, 1))
    return passes


def _pieces(length: int, borders: Seq[int]) -> list[tuple[int, int, int]]:
    """(start, end, refused tokens behind) of what is read of the long text in each pass."""
    slow = max(1, length - _SLOW)
    cuts, at = [], 0
    stops = sorted({slow, *(b - 2 for b in borders if 2 < b < slow)})
    for stop in stops:
        while at < stop:
            end = min(at + min(_CHUNK, max(7, length // 4)), stop)
            crossing = 5 if end == stop else 0
            cuts.append((at, end, min(crossing, length - end)))
            at = end
    while at < length:
        end = min(at + 1 + len(cuts) % 3, length)
        cuts.append((at, end, min(3 * (len(cuts) % 2), length - end)))
        at = end
    return cuts


def rows_of(parts: Seq[Part], text: int) -> list[int]:
    """Positions of one text whose logits a pass is compared in."""
    return [
        row
        for part in parts
        if part.text == text
        for row in range(part.start + part.count - part.wanted, part.start + part.count)
    ]
