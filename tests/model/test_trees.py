"""Drafts that branch: every row, to the last bit, as if its ancestors were the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from engine.batch import Batch, Span, build_batch
from engine.cache.pages import PageTable
from engine.cache.store import CacheShape, KVStore
from engine.model.attention.base import AttentionCall
from engine.model.loader import LoadedModel
from engine.tree import way_to
from tests.model.paging import Pages
from tests.model.test_attention import DTYPES, Shape, attend, backend, make_text
from tests.model.test_runners import RUNNERS, loaded, logits, text
from tests.tiny_models import FAMILIES


def random_tree(seed: int, nodes: int) -> list[int]:
    dice = random.Random(seed)
    return [max(-1, node - dice.choice((1, 1, 1, 2, 3, 7))) for node in range(nodes)]


#: A chain whose last node has a twin, a brush, a comb, and whatever chance brings.
TREES = [
    [-1, 0, 1, 1],
    [-1, -1, -1, -1, -1],
    [-1, -1, 0, 0, 2, 2, 4, 4],
    *(random_tree(seed, 18) for seed in range(3)),
]


def mixed_batch(
    pages: Pages, tables: Seq[PageTable], start: int, tokens: Seq[int], parents: Seq[int]
) -> Batch:
    """A tree between two chains, whose texts begin with the same tokens."""
    fed = len(tokens) - len(parents)
    spans = [
        Span(tokens[: fed + 2], start, tables[0], 0),
        Span(tokens, start, tables[1], len(parents), parents),
        Span(tokens[:fed], start, tables[2], 1),
    ]
    return build_batch(spans, pages.page_size, pages.num_pages)


def check(model: LoadedModel, parents: Seq[int], length: int, fed: int, page_size: int) -> None:
    """All rows of a tree, and what follows once one of its ways is kept."""
    prompt, nodes = text(length, 5), text(len(parents), len(parents))
    ways = [way_to(node, parents) for node in range(len(parents))]
    texts = [[*prompt, *(nodes[n] for n in way)] for way in ways]
    leaves = [n for n in range(len(parents)) if n not in parents]
    whole = logits(model, [texts[leaf] for leaf in leaves], size=64)
    truth = {
        node: rows[length + depth]
        for leaf, rows in zip(leaves, whole, strict=True)
        for depth, node in enumerate(ways[leaf])
    }
    room = length + len(parents) + 3
    pages = Pages(3 * -(-room // page_size), page_size)
    tables = [pages.table(room) for _ in range(3)]
    runner = model.make_runner(pages.num_pages, page_size)
    start = length - fed
    if start:
        runner.forward(pages.batch([(t, 0, prompt[:start]) for t in tables], runner.min_rows))
    batch = mixed_batch(pages, tables, start, [*prompt[start:], *nodes], parents)
    rows = runner.forward(batch).logits[: len(parents)].float().clone()
    for node, row in enumerate(rows):
        assert torch.equal(row, truth[node]), (node, parents, page_size)
    kept = max(ways, key=lambda way: (len(way), way))

    def slots(places: Seq[int]) -> torch.Tensor:
        own = tables[1].pages
        return torch.tensor([own[p // page_size] * page_size + p % page_size for p in places])

    runner.move(slots([length + n for n in kept]), slots(range(length, length + len(kept))))
    after = length + len(kept)
    more = runner.forward(pages.batch([(tables[1], after, [7, 8])], runner.min_rows)).logits
    (expected,) = logits(model, [[*prompt, *(nodes[n] for n in kept), 7, 8]], size=64)
    assert torch.equal(more.float(), expected[-2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_tree_are_those_of_its_ways(family: str, runner: str, dtype: torch.dtype) -> None:
    model = loaded(family, dtype, runner)
    for parents, length, fed, page_size in zip(
        TREES, (15, 1, 30, 33, 20, 40), (1, 1, 1, 2, 20, 1), (16, 3, 16, 8, 1, 16), strict=True
    ):
        check(model, parents, length, fed, page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(3, 1, 20), Shape(16, 1, 64), Shape(4, 4, 80, window=9), Shape(6, 2, 64)],
    ids=str,
)
def test_attention_of_a_tree(shape: Shape, name: str, dtype: torch.dtype) -> None:
    """Keys that are not of the row's own way are not read at all: they are not numbers."""
    shape, prefix = replace(shape, dtype=dtype), 27
    for seed, page_size in enumerate((16, 8, 3, 1)):
        parents = random_tree(seed, 20)
        whole = make_text(shape, prefix + len(parents), seed)
        table_of = Pages(prefix + 20, page_size)
        table = table_of.table(prefix + 20)
        for threads in (1, 3) if name == "cpu" else (1,):
            store = KVStore(
                CacheShape(1, shape.groups, shape.size, dtype), table_of.num_pages, page_size, "cpu"
            )
            store.keys.fill_(float("nan"))
            store.values.fill_(float("nan"))
            torch.set_num_threads(threads)
            try:
                batch = build_batch(
                    [Span([0] * (prefix + 20), 0, table, 0, parents)], page_size, prefix + 20
                )
                call = AttentionCall(
                    0, whole.queries, whole.keys, whole.values, shape.size**-0.5, shape.window
                )
                out = backend(name).prepare(batch, store)(call)
            finally:
                torch.set_num_threads(1)
            for leaf in set(range(len(parents))) - set(parents):
                rows = [*range(prefix), *(prefix + n for n in way_to(leaf, parents))]
                own = type(whole)(whole.queries[rows], whole.keys[rows], whole.values[rows])
                (truth,) = attend(name, shape, [own], size=64, page_size=page_size)
                assert torch.equal(out[rows], truth), (leaf, page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_tree_that_is_read_in_pieces(runner: str, dtype: torch.dtype) -> None:
    """As a draft model does: what it has read of the draft lies behind the text already."""
    model = loaded("mistral", dtype, runner)
    for parents, length, page_size in zip(
        TREES, (15, 1, 30, 33, 20, 40), (16, 3, 8, 8, 1, 16), strict=True
    ):
        prompt, nodes = text(length, 5), text(len(parents), len(parents))
        pages = Pages(80, page_size)
        tables = [pages.table(length + len(parents)) for _ in range(2)]
        kept = model.make_runner(pages.num_pages, page_size)
        kept.forward(pages.batch([(t, 0, prompt) for t in tables], kept.min_rows))
        batch = build_batch([Span(nodes, length, tables[0], len(nodes), parents)], page_size, 80)
        truth = kept.forward(batch).logits.clone()
        for size in (1, 2, 5):
            found = []
            for first in range(0, len(nodes), size):
                end = min(first + size, len(nodes))
                span = Span(nodes[first:end], length, tables[1], end - first, parents[:end], first)
                chain = Span(prompt[:1], 0, pages.table(1), 1) if first == 0 else None
                both = [span, chain] if chain else [span]
                out = kept.forward(build_batch(both, page_size, 80)).logits
                found.append(out[: end - first].clone())
            assert torch.equal(torch.cat(found), truth), (parents, size)


def test_a_row_does_not_see_its_siblings() -> None:
    """The test above would notice: with a sibling's token changed, only its own rows change."""
    model = loaded("llama", torch.float32, "native")
    parents, found = [-1, -1, 0, 1], []
    for sibling in (3, 4):
        pages = Pages(8, 4)
        runner, table = model.make_runner(8, 4), pages.table(16)
        span = Span([1, 2, 5, sibling, 6, 6], 0, table, 4, parents)
        found.append(runner.forward(build_batch([span], 4, 8)).logits.clone())
    same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    assert same == [True, False, True, False]
