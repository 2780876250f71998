"""The numerics self-test: is a row of logits the same whoever shares its pass?

A served text depends on speculation, on its neighbours in the batch and on how its prompt was
cut only as far as a row's logits do. So real tokens are fed to the real weights one row at a
time, as plain decoding does, and then in other shapes: whole, in chunks, on other pages,
among other sequences. Every row must come out the same to the last bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch import Span, build_batch
from engine.cache.pages import PRIVATE, PagePool, PageTable
from engine.config import ModelConfig
from engine.model.checked import load_checked
from engine.model.loader import LoadedModel
from engine.model.passes import Runner

#: Rows that share a pass: one, a few (kernels change between them), a verify pass, a chunk.
SHAPES = (1, 2, 3, 5, 8, 16, 33)

_LENGTH = 24  # tokens of a round
_PROMPT = 4  # the rest is the model's own greedy text, whose near-ties are those of real text
_VERIFY = 5  # rows of a sequence with four draft tokens
_PAGE_SIZE = 16
_MOST_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """What the self-test found.

    Attributes:
        rows_compared: rows that were computed a second time in another shape.
        mismatching_rows: those that differ in any bit.
        max_difference: largest difference of any two logits that should be equal.
        turned_rows: rows whose most likely token differs.
    """

    rows_compared: int
    mismatching_rows: int
    max_difference: float
    turned_rows: int

    @property
    def invariant(self) -> bool:
        """Whether every row was the same in every shape."""
        return self.mismatching_rows == 0

    @property
    def turns_per_thousand(self) -> float:
        """How many of 1,000 tokens of greedy text would differ for the shape of a pass alone."""
        return 1000 * self.turned_rows / max(1, self.rows_compared)

    def __str__(self) -> str:
        if self.invariant:
            return f"rows do not depend on the batch ({self.rows_compared} compared, bit for bit)"
        return (
            f"{self.mismatching_rows} of {self.rows_compared} rows depend on the batch, by up to "
            f"{self.max_difference:.2g} in a logit; about {self.turns_per_thousand:.1f} of 1,000 "
            "greedy tokens are near-ties that may turn with it"
        )


def check_invariance(
    runner: Runner,
    pool: PagePool,
    vocab_size: int,
    max_model_len: int,
    seconds: float = 1.0,
) -> InvarianceReport:
    """Compares rows of logits across batch shapes. Leaves pool and prefix index as they were.

    One round of tokens tells whether rows depend on the batch. If they do, further rounds
    refine how often that turns a token.

    Args:
        runner: the model.
        pool: its pages, none of them in use.
        vocab_size: ids from here on are padding.
        max_model_len: most tokens of a sequence.
        seconds: no further round begins after this time.
    """
    began = time.monotonic()
    length = min(_LENGTH, max_model_len, pool.num_available * pool.page_size)
    tally = _Tally()
    for number in range(_MOST_ROUNDS):
        _Round(runner, pool, vocab_size, length).run(tally, number)
        if tally.mismatches == 0 or time.monotonic() - began > seconds:
            break
    return InvarianceReport(tally.rows, tally.mismatches, tally.difference, tally.turned)


class _Tally:
    """Counts of all comparisons."""

    def __init__(self) -> None:
        self.rows = self.mismatches = self.turned = 0
        self.difference = 0.0

    def compare(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Rows [n, V] that should be equal."""
        different = int((expected != found).any(dim=-1).sum())
        self.rows += found.shape[0]
        self.mismatches += different
        if different:
            self.difference = max(self.difference, float((expected - found).abs().max()))
            self.turned += int((expected.argmax(-1) != found.argmax(-1)).sum())


class _Round:
    """One sequence of tokens, computed row by row and then in other shapes."""

    def __init__(self, runner: Runner, pool: PagePool, vocab_size: int, length: int) -> None:
        self._runner = runner
        self._pool = pool
        self._vocab_size = vocab_size
        self._length = length
        self._tokens: list[int] = []

    def run(self, tally: _Tally, number: int) -> None:
        """Adds the comparisons of round `number` to `tally`."""
        alone = self._decode_alone(number)
        tally.compare(alone, self._prefill([self._length]))
        tally.compare(alone, self._prefill(_chunks(self._length)))
        with _pages(self._pool, self._length) as table:
            self._forward([Span(self._tokens, 0, table, 1)])  # K/V for what follows
            for rows in SHAPES:
                for own in sorted({1, min(_VERIFY, rows), rows}):
                    if own <= self._length and rows - own <= self._pool.num_available:
                        found = self._in_company(table, own, rows - own)
                        tally.compare(alone[-own:], found)

    def _decode_alone(self, number: int) -> torch.Tensor:
        """Row by row; after the prompt each token is the model's own choice."""
        self._tokens = [(7919 * (number + i) + 1) % self._vocab_size for i in range(_PROMPT)]
        rows: list[torch.Tensor] = []
        with _pages(self._pool, self._length) as table:
            for i in range(self._length):
                if i >= len(self._tokens):
                    self._tokens.append(int(rows[-1].argmax()))
                rows.append(self._forward([Span([self._tokens[i]], i, table, 1)]))
        del self._tokens[self._length :]
        return torch.cat(rows)

    def _prefill(self, chunks: Seq[int]) -> torch.Tensor:
        """All rows, from chunks of the given sizes, on pages of their own."""
        rows, start = [], 0
        with _pages(self._pool, self._length) as table:
            for size in chunks:
                tokens = self._tokens[start : start + size]
                rows.append(self._forward([Span(tokens, start, table, size)]))
                start += size
        return torch.cat(rows)

    def _in_company(self, table: PageTable, own: int, others: int) -> torch.Tensor:
        """The last `own` rows, from a pass in which others have just begun."""
        start, place = self._length - own, others // 2
        with contextlib.ExitStack() as stack:
            spans = [
                Span([token], 0, stack.enter_context(_pages(self._pool, 1)), 1)
                for token in (self._tokens * others)[:others]
            ]
            spans.insert(place, Span(self._tokens[start:], start, table, own))
            return self._forward(spans)[place : place + own]

    def _forward(self, spans: list[Span]) -> torch.Tensor:
        """A copy of the pass's logits, since the runner may write over them."""
        pool, runner = self._pool, self._runner
        batch = build_batch(spans, pool.page_size, pool.num_pages, runner.device, runner.min_rows)
        return runner.forward(batch).logits[:, : self._vocab_size].float().clone()


def _chunks(length: int) -> list[int]:
    """1, 2, 3, 5, ... tokens and whatever is left of `length`."""
    sizes: list[int] = []
    for size in (*SHAPES, length):
        sizes.append(min(size, length - sum(sizes)))
    return [size for size in sizes if size]


@contextlib.contextmanager
def _pages(pool: PagePool, length: int) -> Iterator[PageTable]:
    """A table with room for `length` tokens; nothing of it enters the prefix index."""
    table = pool.new_table(PRIVATE)
    if not pool.reserve(table, length):
        raise ValueError(f"{pool.num_available} free pages cannot hold {length} tokens")
    try:
        yield table
    finally:
        pool.free(table)


def check_model(directory: Path, config: ModelConfig) -> tuple[LoadedModel, InvarianceReport]:
    """Loads a model just for the self-test.

    Returns:
        The model, with what comparing it with transformers' own forward has found, and the
        self-test.

    Raises:
        ConfigurationError: it cannot be loaded like this.
    """
    loaded = load_checked(directory, config)
    pool = PagePool(2 * max(SHAPES), _PAGE_SIZE)
    runner = loaded.make_runner(pool.num_pages, pool.page_size)
    return loaded, check_invariance(runner, pool, loaded.vocab_size, loaded.max_model_len)
