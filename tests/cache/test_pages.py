"""Pages: every one has exactly one state, and only what may be shared is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.cache.pages import PRIVATE, TARGET, PagePool, PageTable, hash_page

SIZE = 4


def tokens(count: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


def fill(pool: PagePool, text: list[int], salt: str = "", stores: tuple[int, ...] = (0,)):
    """A table whose stores hold all of `text`, as after a prefill."""
    table = pool.new_table(salt)
    pool.match_prefix(table, text)
    assert pool.reserve(table, len(text))
    for store in stores:
        table.num_cached[store] = len(text)
    pool.commit(table, text)
    return table


# -- allocation ------------------------------------------------------------------------------


def test_reserve_is_all_or_nothing() -> None:
    pool = PagePool(num_pages=5, page_size=SIZE)
    first, second = pool.new_table(""), pool.new_table("")
    assert pool.reserve(first, 9)
    assert len(first.pages) == 3
    assert not pool.reserve(second, 12)
    assert second.pages == []
    assert pool.num_available == 2
    assert pool.reserve(second, 8)
    assert pool.num_available == 0
    assert not pool.reserve(first, 13)
    assert pool.reserve(first, 12)  # has room for them already
    assert not set(first.pages) & set(second.pages)
    pool.check([first, second])


def test_reserve_grows_only_when_a_page_is_full() -> None:
    pool = PagePool(num_pages=4, page_size=3)
    table = pool.new_table("")
    counts = []
    for length in range(10):
        assert pool.reserve(table, length)
        counts.append(len(table.pages))
    assert counts == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    pool.reserve(table, 1)  # never shrinks
    assert len(table.pages) == 3


def test_truncate_frees_pages_beyond_a_rejected_draft() -> None:
    pool = PagePool(num_pages=8, page_size=SIZE)
    text = tokens(7)
    table = fill(pool, text)
    assert pool.reserve(table, len(text) + 9)  # a draft that reaches two pages further
    assert pool.num_used == 4
    pool.truncate(table, len(text) + 1)
    assert pool.num_used == 2
    pool.check([table])


@pytest.mark.parametrize(("kept", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_truncate_at_a_page_border(kept: int, pages: int) -> None:
    pool = PagePool(num_pages=8, page_size=SIZE)
    table = pool.new_table("")
    pool.reserve(table, 20)
    pool.truncate(table, kept)
    assert len(table.pages) == pages
    pool.check([table])


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_room_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        PagePool(pages, size)


# -- prefixes --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 18))
def test_only_full_pages_match_and_a_token_is_left(length: int) -> None:
    pool = PagePool(num_pages=16, page_size=SIZE)
    text = tokens(17)
    owner = fill(pool, text)
    reader = pool.new_table("")
    hit = pool.match_prefix(reader, text[:length])
    assert hit == (length - 1) // SIZE * SIZE
    assert reader.pages == owner.pages[: hit // SIZE]
    assert reader.num_cached[TARGET] == hit
    pool.check([owner, reader])


def test_what_differs_anywhere_before_does_not_match() -> None:
    """A page is its tokens and everything in front of them."""
    pool = PagePool(num_pages=16, page_size=SIZE)
    text = tokens(13)
    owner = fill(pool, text)
    for changed in range(12):
        other = [*text]
        other[changed] += 1
        reader = pool.new_table("")
        assert pool.match_prefix(reader, other) == changed // SIZE * SIZE
        pool.free(reader)
    pool.check([owner])


def test_the_same_tokens_at_another_place_do_not_match() -> None:
    pool = PagePool(num_pages=16, page_size=SIZE)
    page = tokens(SIZE)
    fill(pool, [*page, 1])
    reader = pool.new_table("")
    assert pool.match_prefix(reader, [*page, *page, 1]) == SIZE
    pool.free(reader)
    assert pool.match_prefix(pool.new_table(""), [9] * SIZE + [*page, 1]) == 0


def test_salts_do_not_share() -> None:
    pool = PagePool(num_pages=16, page_size=SIZE)
    text = tokens(9)
    owner = fill(pool, text, salt="a")
    for salt in ("", "b", "A", "\ud800"):
        assert pool.match_prefix(pool.new_table(salt), text) == 0
    assert pool.match_prefix(pool.new_table("a"), text) == 8
    assert owner.pages


def test_uncommitted_tokens_never_enter_the_index() -> None:
    """Drafts lie in pages, too; `commit` counts what is committed and cached, no more."""
    pool = PagePool(num_pages=16, page_size=SIZE)
    text, draft = tokens(6), tokens(5, seed=1)
    table = fill(pool, text)
    pool.reserve(table, len(text) + len(draft))
    table.num_cached[TARGET] = len(text) + len(draft)  # as if the draft counted as cached
    pool.commit(table, text)
    assert hits(pool, text + draft) == SIZE
    assert len(pool._index) == 1
    pool.check([table])


def test_pages_not_yet_computed_never_enter_the_index() -> None:
    """A chunk of the prompt is cached, the rest is committed but not."""
    pool = PagePool(num_pages=16, page_size=SIZE)
    text = tokens(12)
    table = pool.new_table("")
    pool.reserve(table, len(text))
    for cached, hit in ((3, 0), (4, 4), (7, 4), (9, 8)):
        table.num_cached[TARGET] = cached
        pool.commit(table, text)
        reader = pool.new_table("")
        assert pool.match_prefix(reader, text) == hit
        pool.free(reader)


def test_equal_pages_computed_twice_are_indexed_once() -> None:
    pool = PagePool(num_pages=16, page_size=SIZE)
    text = tokens(9)
    tables = []
    for _ in range(2):  # both prefill before either is committed
        table = pool.new_table("")
        pool.match_prefix(table, text)
        pool.reserve(table, len(text))
        tables.append(table)
    for table in tables:
        table.num_cached[TARGET] = len(text)
        pool.commit(table, text)
        pool.check(tables)
    reader = pool.new_table("")
    pool.match_prefix(reader, text)
    assert reader.pages == tables[0].pages[:2]
    for table in (*tables, reader):
        pool.free(table)
    pool.check([])
    assert pool.num_available == 16
    assert len(pool._cached) == 2


def test_without_reuse_nothing_is_kept() -> None:
    pool = PagePool(num_pages=8, page_size=SIZE, prefix_reuse=False)
    text = tokens(9)
    table = fill(pool, text)
    assert pool.match_prefix(pool.new_table(""), text) == 0
    pool.free(table)
    assert pool.match_prefix(pool.new_table(""), text) == 0
    assert len(pool._free) == 8
    pool.check([])


def test_a_private_sequence_shares_nothing_even_with_its_like() -> None:
    pool = PagePool(num_pages=8, page_size=SIZE)
    text = tokens(9)
    first, second = fill(pool, text, salt=PRIVATE), fill(pool, text, salt=PRIVATE)
    assert not set(first.pages) & set(second.pages)
    pool.check([first, second])
    pool.free(first)
    assert len(pool._free) == 5
    assert not pool._index


def test_match_needs_an_empty_table() -> None:
    pool = PagePool(num_pages=8, page_size=SIZE)
    table = pool.new_table("")
    pool.reserve(table, 1)
    with pytest.raises(ValueError, match="empty"):
        pool.match_prefix(table, tokens(9))


# -- reference counts, eviction --------------------------------------------------------------


def test_a_shared_page_lives_as_long_as_its_last_reader() -> None:
    pool = PagePool(num_pages=4, page_size=SIZE)
    text = tokens(9)
    owner = fill(pool, text)
    readers = [pool.new_table("") for _ in range(3)]
    for reader in readers:
        assert pool.match_prefix(reader, text) == 8
    pool.check([owner, *readers])
    assert pool.num_used == 3
    pool.free(owner)
    pool.check(readers)
    assert pool.num_used == 2
    for i, reader in enumerate(readers):
        assert not pool.reserve(pool.new_table(""), 3 * SIZE)  # never taken from a reader
        pool.free(reader)
        pool.check(readers[i + 1 :])
    assert pool.num_used == 0
    assert pool.match_prefix(pool.new_table(""), text) == 8


def test_the_least_recently_used_page_goes_first() -> None:
    pool = PagePool(num_pages=6, page_size=SIZE)
    texts = [tokens(SIZE + 1, seed=i) for i in range(3)]
    for text in texts:
        pool.free(fill(pool, text))
    reader = pool.new_table("")
    pool.match_prefix(reader, texts[0])  # the oldest becomes the youngest
    pool.free(reader)
    hog = pool.new_table("")
    pool.reserve(hog, 4 * SIZE)  # three free pages and one that is cached
    assert [hits(pool, text) for text in texts] == [SIZE, 0, SIZE]
    pool.reserve(hog, 5 * SIZE)
    assert sum(hits(pool, text) for text in texts) == SIZE
    pool.reserve(hog, 6 * SIZE)
    assert sum(hits(pool, text) for text in texts) == 0
    pool.check([hog])


def hits(pool: PagePool, text: list[int]) -> int:
    """How many tokens would match; leaves the order of use as it is."""
    parent_table = pool.new_table("")
    cached = dict(pool._cached)
    hit = pool.match_prefix(parent_table, text)
    pool.free(parent_table)
    pool._cached.clear()
    pool._cached.update(cached)
    return hit


def test_what_follows_a_prefix_goes_before_the_prefix() -> None:
    """Eviction eats a chain from its end, so what is left stays reachable."""
    pool = PagePool(num_pages=4, page_size=SIZE)
    text = tokens(4 * SIZE)
    pool.free(fill(pool, text))
    hog = pool.new_table("")
    for taken in range(1, 5):
        assert pool.reserve(hog, taken * SIZE)
        assert hits(pool, [*text, 1]) == (4 - taken) * SIZE
        pool.check([hog])


def test_an_evicted_page_forgets_what_it_held() -> None:
    """For every store: a new owner must not inherit the mark that a page is filled."""
    pool = PagePool(num_pages=1, page_size=SIZE, num_stores=2)
    text, other = tokens(SIZE), tokens(SIZE, seed=1)
    pool.free(fill(pool, text, stores=(0, 1)))
    pool.free(fill(pool, other, stores=(0,)))
    reader = pool.new_table("")
    assert pool.match_prefix(reader, [*other, 1]) == SIZE
    assert reader.num_cached == [SIZE, 0]


def test_drop_cache() -> None:
    pool = PagePool(num_pages=8, page_size=SIZE)
    text = tokens(9)
    owner = fill(pool, text)
    pool.free(fill(pool, tokens(9, seed=1)))
    pool.drop_cache()
    pool.check([owner])
    assert hits(pool, text) == 8  # in use, so kept
    assert hits(pool, tokens(9, seed=1)) == 0


def test_freeing_twice_is_noticed() -> None:
    pool = PagePool(num_pages=4, page_size=SIZE)
    table = fill(pool, tokens(5))
    stale = pool.new_table("")
    stale.pages = [*table.pages]
    pool.free(table)
    pool.free(table)  # an empty table: nothing to give back
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(stale)


def test_check_notices_what_is_wrong() -> None:
    def fresh() -> tuple[PagePool, PageTable]:
        pool = PagePool(num_pages=4, page_size=SIZE)
        return pool, fill(pool, tokens(9))

    pool, table = fresh()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    pool._free.append(table.pages[0])
    with pytest.raises(AssertionError, match="states"):
        pool.check([table])
    pool, table = fresh()
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.check([table])
    pool, table = fresh()
    pool._references[table.pages[2]] += 1
    thief = pool.new_table("")
    thief.pages = [table.pages[2]]
    with pytest.raises(AssertionError, match="not full"):
        pool.check([table, thief])
    pool, table = fresh()
    pool._index.popitem()
    with pytest.raises((AssertionError, KeyError)):
        pool.check([table])
    pool, table = fresh()
    pool._index[b"orphan"] = 0
    with pytest.raises(AssertionError, match="orphans"):
        pool.check([table])


# -- several stores --------------------------------------------------------------------------


def test_each_store_remembers_how_far_it_came() -> None:
    """The draft model read less than the target: a hit tells each what it has yet to be fed."""
    pool = PagePool(num_pages=16, page_size=SIZE, num_stores=2)
    text = tokens(17)
    owner = pool.new_table("")
    pool.reserve(owner, len(text))
    owner.num_cached = [17, 9]
    pool.commit(owner, text)
    reader = pool.new_table("")
    assert pool.match_prefix(reader, text) == 16
    assert reader.num_cached == [16, 8]
    pool.reserve(reader, len(text))
    reader.num_cached = [17, 17]  # it catches up in the shared pages
    pool.commit(reader, text)
    third = pool.new_table("")
    pool.match_prefix(third, text)
    assert third.num_cached == [16, 16]
    pool.check([owner, reader, third])


def test_a_store_that_is_ahead_publishes_nothing() -> None:
    """Only the target's progress puts a page into the index."""
    pool = PagePool(num_pages=16, page_size=SIZE, num_stores=2)
    text = tokens(9)
    table = pool.new_table("")
    pool.reserve(table, len(text))
    table.num_cached = [0, 9]
    pool.commit(table, text)
    assert hits(pool, text) == 0
    table.num_cached = [9, 9]
    pool.commit(table, text)
    reader = pool.new_table("")
    pool.match_prefix(reader, text)
    assert reader.num_cached == [8, 8]


def test_hashes_chain() -> None:
    root = b"\0" * 16
    first, second = tokens(SIZE), tokens(SIZE, seed=1)
    assert hash_page(root, first) == hash_page(root, tuple(first))
    assert hash_page(root, first) != hash_page(root, second)
    assert hash_page(hash_page(root, first), second) != hash_page(root, second)
    assert hash_page(root, [1, 2]) != hash_page(root, [2, 1])
    assert hash_page(root, [1]) != hash_page(root, [1, 0])
    assert hash_page(root, [2**40]) != hash_page(root, [0])


# -- against a model that simply remembers everything ----------------------------------------


class PagesMachine(RuleBasedStateMachine):
    """Random sequences over a tiny alphabet. The model remembers for every page what each
    store wrote into it; a hit is right if that is what the sequence would have written."""

    @initialize(pages=st.integers(3, 12), size=st.integers(1, 3), reuse=st.booleans())
    def begin(self, pages: int, size: int, reuse: bool) -> None:
        self.pool = PagePool(pages, size, num_stores=2, prefix_reuse=reuse)
        #: Per page and store: the salted text up to and including the page's last written token.
        self.content: list[list[dict[int, object]]] = [[{}, {}] for _ in range(pages)]
        self.alive: list[tuple[PageTable, list[int]]] = []

    def write(self, table: PageTable, text: list[int], store: int, start: int, end: int) -> None:
        for i in range(start, end):
            page, offset = table.pages[i // self.pool.page_size], i % self.pool.page_size
            self.content[page][store][offset] = (table.salt, *text[: i + 1])

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def start(self, text: list[int], salt: str) -> None:
        table = self.pool.new_table(salt)
        self.pool.match_prefix(table, text)
        assert max(table.num_cached) < len(text)
        for store in range(2):
            for i in range(table.num_cached[store]):
                page, offset = table.pages[i // self.pool.page_size], i % self.pool.page_size
                assert self.content[page][store][offset] == (salt, *text[: i + 1]), "a wrong hit"
        if self.pool.reserve(table, len(text)):
            self.alive.append((table, list(text)))
        else:
            self.pool.free(table)

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        store=st.integers(0, 1),
        count=st.integers(1, 6),
        draft=st.lists(st.integers(0, 1), max_size=4),
        accepted=st.integers(0, 4),
        bonus=st.integers(0, 1),
    )
    def feed(
        self,
        data: st.DataObject,
        store: int,
        count: int,
        draft: list[int],
        accepted: int,
        bonus: int,
    ) -> None:
        """A store reads on; the target, once at the end, also judges a draft."""
        table, text = data.draw(st.sampled_from(self.alive))
        if not self.pool.reserve(table, len(text)):
            return
        start = table.num_cached[store]
        end = min(start + count, len(text))
        if store == TARGET and end == len(text):
            while draft and not self.pool.reserve(table, len(text) + len(draft)):
                draft.pop()
            self.write(table, text + draft, store, start, len(text) + len(draft))
            text += [*draft[:accepted], bonus]
            table.num_cached[TARGET] = len(text) - 1
        else:
            self.write(table, text, store, start, end)
            table.num_cached[store] = end
        self.pool.commit(table, text)
        self.pool.truncate(table, len(text))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.alive) - 1))
        table, _ = self.alive.pop(i)
        self.pool.free(table)
        assert table.pages == []
        assert table.num_cached == [0, 0]

    @rule()
    def drop(self) -> None:
        self.pool.drop_cache()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(table for table, _ in self.alive)
        used = {page for table, _ in self.alive for page in table.pages}
        assert self.pool.num_used == len(used)
        for table, text in self.alive:
            assert len(table.pages) >= self.pool.pages_for(max(table.num_cached))
            for store in range(2):
                for i in range(table.num_cached[store]):
                    page, offset = table.pages[i // self.pool.page_size], i % self.pool.page_size
                    wanted = (table.salt, *text[: i + 1])
                    assert self.content[page][store][offset] == wanted, "overwritten"


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
