"""Which sequence owns which page of the KV cache: integers only.

A *page* holds `page_size` consecutive tokens of one sequence. Page ids are shared by every
model in the stack (target, draft model): one table per sequence, one store of tensors per
model indexed by the same ids. So allocation, sharing and reuse are decided once.

Every page is in exactly one of three states::

    free      in `_free`: content is garbage
    in use    references > 0: in the table of one or more sequences
    cached    references == 0, but full and in the prefix index: reusable until evicted

Only full pages of *committed* tokens are ever shared, and a full page is never written again,
so sharing needs no copy and rolling back a rejected draft is freeing the surplus pages.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Index of the target model's store; those of models that drafters run come behind it.
TARGET = 0

#: Salt of sequences that share no page with anybody, and leave none behind for reuse.
PRIVATE = "\0private"


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in order, and how far each store has filled them.

    Attributes:
        salt: sequences share pages only if their salts are equal.
        pages: page ids; token i lives in `pages[i // page_size]`.
        num_cached: per store, how many leading tokens have their K/V in the pages. The
            remaining committed tokens are what that model must be fed next.
        complete: per store, how many leading pages are known to be full of committed tokens.
        hashes: hash chain over the committed tokens of the leading full pages.
    """

    salt: str
    num_stores: int = 1
    pages: list[int] = field(init=False)
    num_cached: list[int] = field(init=False)
    complete: list[int] = field(init=False)
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all pages; references must have been given back before."""
        self.pages = []
        self.hashes = []
        self.num_cached = [0] * self.num_stores
        self.complete = [0] * self.num_stores


def hash_page(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a full page: its tokens and, through `parent`, everything before them.

    128 bits of BLAKE2b: equal hashes are taken as equal content, so accidental collisions
    must be out of reach.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class PagePool:
    """Allocation, reference counts and the prefix index of all pages.

    Args:
        num_pages: pages in every store.
        page_size: tokens per page.
        num_stores: models that keep K/V in these pages.
        prefix_reuse: whether full pages outlive their sequence, to be shared by equal prefixes.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_stores: int = 1, prefix_reuse: bool = True
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens cannot hold a sequence")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_stores = num_stores
        self.prefix_reuse = prefix_reuse
        self._references = [0] * num_pages
        self._filled = [0] * num_pages  # bit s: store s holds the K/V of the whole page
        self._hash: list[bytes | None] = [None] * num_pages  # set while in the index
        self._index: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(num_pages))
        self._cached: dict[int, None] = {}  # insertion order = least recently used first

    # -- capacity ------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages referenced by sequences."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    # -- a sequence's life ---------------------------------------------------------------

    def new_table(self, salt: str) -> PageTable:
        """An empty table for a sequence whose prefix may be shared within `salt`."""
        return PageTable(salt, self.num_stores)

    def match_prefix(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Takes every leading page of `tokens` that the index holds into the empty `table`.

        At least one token is always left to feed, since its logits are what is wanted.

        Returns:
            Number of tokens whose target K/V need not be computed.
        """
        if table.pages:
            raise ValueError("match_prefix needs an empty table")
        if not self._shares(table):
            return 0
        parent = _root(table.salt)
        for start in range(0, (len(tokens) - 1) // self.page_size * self.page_size, self.page_size):
            parent = hash_page(parent, tokens[start : start + self.page_size])
            page = self._index.get(parent)
            if page is None:
                break
            self._cached.pop(page, None)
            self._references[page] += 1
            table.pages.append(page)
            table.hashes.append(parent)
        for store in range(self.num_stores):
            run = 0
            while run < len(table.pages) and self._filled[table.pages[run]] >> store & 1:
                run += 1
            table.complete[store] = run
            table.num_cached[store] = run * self.page_size
        return table.num_cached[TARGET]

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Grows `table` until it has room for `num_tokens` tokens; all or nothing."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            page = self._take()
            self._references[page] = 1
            table.pages.append(page)
        return True

    def commit(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Puts pages that have become full of committed tokens into the prefix index.

        Args:
            table: its `num_cached` already says how far each store has come.
            tokens: the sequence's committed tokens.
        """
        for store in range(self.num_stores):
            full = min(table.num_cached[store], len(tokens)) // self.page_size
            for i in range(table.complete[store], full):
                self._filled[table.pages[i]] |= 1 << store
                if store == TARGET and self._shares(table):
                    self._publish(table, i, tokens)
            table.complete[store] = full

    def truncate(self, table: PageTable, num_tokens: int) -> None:
        """Gives back the pages beyond `num_tokens` tokens (rejected drafts, unused room)."""
        keep = self.pages_for(num_tokens)
        while len(table.pages) > keep:
            self._release(table.pages.pop())

    def free(self, table: PageTable) -> None:
        """Gives back all pages. Last first, so that a prefix outlives what follows it."""
        while table.pages:
            self._release(table.pages.pop())
        table.clear()

    def drop_cache(self) -> None:
        """Forgets every page kept only for reuse."""
        while self._cached:
            self._free.append(self._evict())

    def check(self, tables: Iterable[PageTable]) -> None:
        """Asserts that counts, states and index agree with the `tables` of all live sequences.

        Raises:
            AssertionError: a page leaked, is freed twice, or is shared without being full.
        """
        references = [0] * self.num_pages
        for table in tables:
            for page in table.pages:
                references[page] += 1
        assert references == self._references, "reference counts differ from the tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is twice in the free list"
        for page in range(self.num_pages):
            states = (page in free) + (page in cached) + (references[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
            hashed = self._hash[page]
            assert hashed is None or self._index[hashed] == page, f"page {page}: stale hash"
            assert page not in cached or hashed is not None, f"page {page}: cached, not indexed"
            assert page not in free or hashed is None, f"page {page}: free, but indexed"
            assert references[page] < 2 or hashed is not None, f"page {page}: shared, not full"
        assert len(self._index) == sum(h is not None for h in self._hash), "index has orphans"

    # -- inside --------------------------------------------------------------------------

    def _shares(self, table: PageTable) -> bool:
        return self.prefix_reuse and table.salt != PRIVATE

    def _publish(self, table: PageTable, i: int, tokens: Sequence[int]) -> None:
        """Enters page `i` of `table` into the index unless an equal page is there already."""
        if i < len(table.hashes):
            return  # came out of the index
        parent = table.hashes[i - 1] if i else _root(table.salt)
        key = hash_page(parent, tokens[i * self.page_size : (i + 1) * self.page_size])
        table.hashes.append(key)
        if key not in self._index:
            self._index[key] = table.pages[i]
            self._hash[table.pages[i]] = key

    def _take(self) -> int:
        page = self._free.popleft() if self._free else self._evict()
        self._filled[page] = 0
        return page

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        key = self._hash[page]
        assert key is not None
        del self._index[key]
        self._hash[page] = None
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        assert self._references[page] >= 0, f"page {page} freed twice"
        if self._references[page]:
            return
        if self._hash[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
