"""Sequences in scattered pages, to be fed in any chunks and any company."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from engine.batch import Batch, Span, build_batch
from engine.cache.pages import PageTable


class Pages:
    """Page tables with page ids in random order."""

    def __init__(self, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def table(self, length: int) -> PageTable:
        """A table with room for `length` tokens."""
        table = PageTable("")
        for _ in range(-(-length // self.page_size)):
            table.pages.append(self._free.pop())
        return table

    def batch(self, parts: Seq[tuple[PageTable, int, Seq[int]]], min_rows: int = 1) -> Batch:
        """(table, start, tokens) of each sequence; every row's logits are wanted."""
        spans = [Span(tokens, start, table, len(tokens)) for table, start, tokens in parts]
        return build_batch(spans, self.page_size, self.num_pages, min_rows=min_rows)


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of pieces of `size`; the last may be shorter."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]
