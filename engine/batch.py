"""From integers to tensors: the only place where a plan becomes a model's input.

All sequences of a step are packed one after the other, without padding::

    sequence 0         sequence 1   sequence 2
    [fed tokens | drafts][fed]      [fed | drafts]        T query tokens
              ^  ^ ^ ^      ^           ^ ^               R rows whose logits are needed

A draft may branch. Then its tokens' keys and values lie one after the other all the same, in the
order of the tokens, while their positions go by depth; see `Batch.branches` for who sees whom.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.cache.pages import PageTable
from engine.tree import branches, depths


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a packed batch.

    Attributes:
        tokens: query tokens: committed tokens to feed, then draft tokens.
        start: position of the first of them; everything before is in the cache.
        table: where keys and values are and go.
        num_logits: how many of the last query tokens need logits.
        parents: of a draft that branches, for each of its tokens the index in the draft of the
            one it follows, -1 = the last token that is fed; see `engine.tree`. None = each token
            follows the one before it.
        num_read: of such a draft, how many of its first tokens an earlier pass has read: they lie
            from position `start` on, and are not in `tokens`, but in `parents`.
    """

    tokens: Seq[int]
    start: int
    table: PageTable
    num_logits: int
    parents: Seq[int] | None = None
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed pass. Integer tensors are int64 unless noted.

    Attributes:
        input_ids: [T]
        positions: [T]
        slots: [T] where each token's K/V is written: page * page_size + offset.
        query_starts: [S + 1] int32, first row of each sequence; rows from query_starts[S] on
            are padding.
        context_lengths: [S] int32, cached tokens plus query tokens.
        page_tables: [S, M] int32
        logit_rows: [R] rows that need logits; at least `min_rows` of `build_batch`.
        num_logits: rows of the logits that mean something; the rest is padding.
        num_padding_rows: rows at the end of T that belong to no sequence.
        page_size: tokens per page.
        branches: [B, 6] int32, or None if no draft branches. Each row of the batch that is no
            padding belongs to one of them; it sees what its branch goes through before it, and
            nothing else. A branch is: its sequence; the first and the end of its own query
            tokens, counted along its way from the sequence's first one; the query tokens before
            the draft, which lie one after the other; query tokens that an earlier pass has
            computed and that have no rows, though all other numbers count them; where its way
            through the draft begins in `paths`, or -1 if it goes straight on.
        paths: int32, for each branch of a draft that branches, by depth, the query tokens of the
            sequence that it goes through, its own and those before it. The token at position
            start + i lies in the slot of position start + (its number among the query tokens).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_tables: torch.Tensor
    logit_rows: torch.Tensor
    num_logits: int
    num_padding_rows: int
    page_size: int
    branches: torch.Tensor | None = None
    paths: torch.Tensor | None = None


def build_batch(
    spans: Seq[Span],
    page_size: int,
    num_pages: int,
    device: torch.device | str = "cpu",
    min_rows: int = 2,
) -> Batch:
    """Packs spans into one batch.

    Args:
        spans: the sequences' parts, at least one.
        page_size: tokens per page.
        num_pages: pages of the pool; page `num_pages` of every store is scratch, where
            padding rows write.
        device: where the tensors go.
        min_rows: rows that the model's kernels need at least, to compute every row alike.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    rows: list[int] = []
    for span in spans:
        pages = span.table.pages
        first = span.start + span.num_read
        input_ids.extend(span.tokens)
        positions.extend(_positions(span))
        slots.extend(
            pages[p // page_size] * page_size + p % page_size
            for p in range(first, first + len(span.tokens))
        )
        starts.append(len(input_ids))
        rows.extend(range(len(input_ids) - span.num_logits, len(input_ids)))
    num_logits = len(rows)
    while len(input_ids) < min_rows:
        input_ids.append(0)
        positions.append(0)
        slots.append(num_pages * page_size)
    rows += rows[-1:] * (min_rows - len(rows)) if rows else []
    width = max(len(span.table.pages) for span in spans)
    tables = [span.table.pages + [num_pages] * (width - len(span.table.pages)) for span in spans]
    contexts = [span.start + span.num_read + len(span.tokens) for span in spans]

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(starts, torch.int32),
        context_lengths=tensor(contexts, torch.int32),
        page_tables=tensor(tables, torch.int32),
        logit_rows=tensor(rows),
        num_logits=num_logits,
        num_padding_rows=len(input_ids) - starts[-1],
        page_size=page_size,
        **_branches(spans, device),
    )


def _positions(span: Span) -> list[int]:
    """Of a span's tokens: by depth where its draft branches."""
    parents = span.parents or ()
    draft = span.start + span.num_read + len(span.tokens) - len(parents)
    nodes = depths(parents)[span.num_read :]
    return [*range(span.start, draft), *(draft + depth for depth in nodes)]


def _branches(spans: Seq[Span], device: torch.device | str) -> dict[str, torch.Tensor]:
    """`Batch.branches` and `Batch.paths`; nothing if no draft branches."""
    if all(span.parents is None for span in spans):
        return {}
    found: list[list[int]] = []
    paths: list[int] = []
    for sequence, span in enumerate(spans):
        if span.parents is None:
            found.append([sequence, 0, len(span.tokens), len(span.tokens), 0, -1])
            continue
        read = span.num_read
        fed = read + len(span.tokens) - len(span.parents)
        for i, branch in enumerate(branches(span.parents)):
            old = sum(node < read for node in branch.way)
            begin = fed + max(branch.begin, old) if i or read else 0
            end = fed + len(branch.way)
            if begin < end:
                found.append([sequence, begin, end, fed, read, len(paths)])
                paths += [fed + node for node in branch.way]
    return {
        name: torch.tensor(values, dtype=torch.int32, device=device)
        for name, values in (("branches", found), ("paths", paths))
    }
