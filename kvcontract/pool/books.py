"""The pool's arrays and the whole-run operations on them: states, references, eviction order.

A page's life::

    free -> writable -> primary | duplicate -> (primary, no references) cached -> free
    free -> staged (reserved for a restore) -> primary -> ...

Eviction order is one doubly linked list in two arrays, page 0 as its end mark. What keeps it right (B14):

- whoever owns a page owns, for each key before it in the chain, the primary or a duplicate of it;
- a cached primary has no duplicate: when the last reference to a primary goes while a duplicate lives, or a
  page is registered under the key of a cached primary, the living page becomes the primary. So a cached
  page has no owned descendant, and every cached page can be evicted;
- runs enter the list tail first. Descendants stand before their ancestors; popping from the front never
  leaves a page resident and unreachable.

Pins of saves and copies in flight are references without ownership: a page may outlive its owner on them
alone. When such a page loses its last pin it enters the list just before its nearest cached ancestor, or is
freed when its parent is gone.

A page marked for reset is freed where another would be cached, and takes with it what hangs on it.

Nothing here locks or knows promises: `pool.py` does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import InternalFault
from kvcontract.pool.events import EVICTED, RELEASED, UNREACHABLE, Content, EventLog
from kvcontract.pool.index import Keys, PageIndex, Pages
from kvcontract.pool.kernels import (
    DUPLICATE,
    FREE,
    PRIMARY,
    States,
    evict_run,
    issue_run,
    join_run,
    pin_run,
    release_run,
    sweep_run,
)

ROOT: Keys = np.zeros(2, np.uint64)
"""Stands for "no parent": the parent key of a first page."""
_NO_LIMIT = 2**62
_GONE = -1


class Books:
    """State of every page of a pool of `pages` pages, page 0 included and never used (B21).

    Attributes:
        state: uint8 [pages].
        refs: int32 [pages], owners plus pins.
        pins: int32 [pages], saves and copies in flight.
        reset: uint8 [pages], 1 where a page is not to be cached; never outlives the occupant (B13).
        partial: uint8 [pages], 1 where the name is that of a partial page, which no event tells (I7).
        generation: uint32 [pages], raised whenever a page is issued.
        parent_keys: uint64 [pages, 2], of registered pages: key of the page before in the chain, or `ROOT`.
        free, cached, held: how many pages are in each condition; together `total`.
        pinned: pages with at least one pin (B9).
        chained: whether a page is found through those before it; else each stands for itself.
    """

    def __init__(
        self, pages: int, *, retention: bool, events: EventLog | None = None, chained: bool = True
    ) -> None:
        self.total = pages - 1
        self.chained = chained
        self.retention = retention
        self.events = events
        self.state: States = np.zeros(pages, np.uint8)
        self.refs: Pages = np.zeros(pages, np.int32)
        self.pins: Pages = np.zeros(pages, np.int32)
        self.reset: States = np.zeros(pages, np.uint8)
        self.partial: States = np.zeros(pages, np.uint8)
        self.generation: npt.NDArray[np.uint32] = np.zeros(pages, np.uint32)
        self.parent_keys: Keys = np.zeros((pages, 2), np.uint64)
        self.index = PageIndex(pages)
        self.order: Pages = np.tile(np.arange(pages, dtype=np.int32), (2, 1))
        self.ring: Pages = np.tile(np.arange(pages, dtype=np.int32), (2, 1))
        self.free_pages: Pages = np.arange(pages - 1, 0, -1, dtype=np.int32)  # a stack: [:free] is free
        self.free = self.total
        self.cached = 0
        self.held = 0
        self.pinned = 0

    @property
    def available(self) -> int:
        """Pages that a draw can have: the free ones, and the cached ones by eviction."""
        return self.free + self.cached

    def issue(self, count: int, state: int) -> Pages:
        """Take pages, evicting as needed: int32 [count], in `state`, one reference each."""
        if count > self.available:
            raise InternalFault(f"{count} pages promised, {self.available} available")
        if count > self.free:
            self.evict(count - self.free)
        pages = self.free_pages[self.free - count : self.free][::-1].copy()
        self.free -= count
        self.held += count
        issue_run(pages, state, self.state, self.refs, self.reset, self.partial, self.generation)  # B13
        return pages

    def evict(self, count: int, reason: str | None = EVICTED) -> None:
        """Free the `count` pages that come first in eviction order; without a reason no event tells."""
        pages = np.empty(count, np.int32)
        evict_run(pages, self.state, self.order)
        self.index.remove(pages)
        self.cached -= count
        self._push(pages)
        if reason is not None:
            self._tell_removed(pages, reason)

    def reference(self, pages: Pages, limit: int = _NO_LIMIT) -> int:
        """Own resident pages, at most `limit` cached ones among them; returns how many lead the run."""
        count, taken = pin_run(pages, limit, self.refs, self.order)
        self.cached -= taken
        self.held += taken
        return count

    def release(self, pages: Pages) -> None:
        """Drop one reference of each page of a run in chain order; unreferenced ones are freed or cached."""
        if not self.chained:  # nothing hangs on others, so that the latest may be evicted last
            pages = np.ascontiguousarray(pages[::-1])
        out = np.empty((3, len(pages)), np.int32)
        freed, forgotten, heirs, cached = release_run(
            pages, int(self.retention), self.refs, self.state, self.reset, self.order, self.ring, out
        )
        self.held -= freed + cached
        self.cached += cached
        self._replace(out[1, :forgotten], out[2, :heirs])
        self._push(out[0, :freed])
        if self.retention and forgotten > heirs:  # marked pages: something may have hung on them (B14)
            self._sweep()

    def register(self, pages: Pages, keys: Keys, parent: Keys, content: Content | None = None) -> None:
        """Name owned pages; under a key that is taken a page becomes a duplicate (B15).

        Args:
            pages: int32 [n], in chain order.
            keys: uint64 [n, 2].
            parent: key of the page before the first, or `ROOT`.
            content: what they hold, for events.
        """
        primary = self.index.insert(keys, pages)
        if self.events is not None:
            self._tell_stored(keys, np.concatenate([parent[None], keys[:-1]]), content, primary == pages)
        out = np.empty((2, len(pages)), np.int32)
        replaced = join_run(
            pages,
            primary,
            keys,
            parent,
            self.parent_keys,
            self.refs,
            self.state,
            self.order,
            self.ring,
            out,
        )
        if not self.chained:
            self.parent_keys[pages] = ROOT
        if replaced:
            self._replace(out[0, :replaced], out[1, :replaced])
            self.cached -= replaced
            self._push(out[0, :replaced])

    def adopt(
        self, pages: Pages, keys: Keys, parent: Keys, content: Content | None = None, *, partial: bool = False
    ) -> Pages:
        """Name staged pages that a restore has filled; where a key is taken, own its primary instead.

        With `partial` the last key is the name of a partial page.

        Returns:
            int32 [n], the page owned for each key. Staged pages that were not needed are free.
        """
        present = self.index.lookup(keys)
        known = present != 0
        self.reference(present[known])
        spare = pages[known]
        owned = np.where(known, present, pages).astype(np.int32)
        fresh = pages[~known]
        self.index.insert(keys[~known], fresh)
        self.state[fresh] = PRIMARY
        parents = np.concatenate([parent[None], keys[:-1]])
        self.parent_keys[fresh] = parents[~known] if self.chained else ROOT
        if partial:
            self.partial[owned[-1:]] = 1
        full = len(keys) - int(partial)
        self._tell_stored(keys[:full], parents[:full], content, ~known[:full])
        self.release(spare)
        return owned

    def pin(self, pages: Pages) -> None:
        """Keep pages from being issued again, whatever their owner does (C1)."""
        self.refs[pages] += 1
        self.pins[pages] += 1
        self.pinned += int(np.count_nonzero(self.pins[pages] == 1))

    def unpin(self, pages: Pages) -> None:
        """Undo one `pin` of each page."""
        copies = self.state[pages] == DUPLICATE  # first: then no page of the rest is an heir of another
        self._unpin(pages[copies])
        pages = pages[~copies]
        last = (self.refs[pages] == 1) & (self.state[pages] == PRIMARY) & self.retention
        last &= self.reset[pages] == 0
        self._unpin(pages[~last])
        for page in pages[last].tolist():
            if self.ring[0, page] != page:
                self._unpin(np.array([page], np.int32))  # a duplicate takes over
                continue
            self.pins[page] = 0
            self.pinned -= 1
            self.refs[page] = 0
            self.held -= 1
            self._settle(page)

    def cache_run(self, pages: Pages) -> None:
        """Give up owned pages, in chain order, whose ancestors the caller does not own."""
        for page in pages.tolist():
            run = np.array([page], np.int32)
            if not self.retention or self.refs[page] > 1 or self.ring[0, page] != page:
                self.release(run)
                continue
            self.refs[page] = 0
            self.held -= 1
            self._settle(page)

    def demote(self, pages: Pages) -> None:
        """Let cached pages among these be the next to be evicted, in this order."""
        first = int(self.order[0, 0])
        for page in pages.tolist():
            if self.state[page] != PRIMARY or self.refs[page]:
                continue
            if page == first:
                first = int(self.order[0, page])
                continue
            after, before = self.order[0, page], self.order[1, page]
            self.order[0, before], self.order[1, after] = after, before
            before = self.order[1, first]
            self.order[0, before] = self.order[1, first] = page
            self.order[0, page], self.order[1, page] = first, before

    def parent_of(self, page: int) -> int:
        """Primary of the page before `page` in its chain: 0 at the start, -1 if it is not resident."""
        key = self.parent_keys[page]
        if not key.any():
            return 0
        return int(self.index.lookup(key[None])[0]) or _GONE

    def _unpin(self, pages: Pages) -> None:
        self.pinned -= int(np.count_nonzero(self.pins[pages] == 1))
        self.pins[pages] -= 1
        self.release(pages)

    def _settle(self, page: int) -> None:
        """Cache an unreferenced primary just before its nearest cached ancestor, or free it without one."""
        ancestor = self.parent_of(page)
        # An ancestor that lives on pins alone says nothing about those above it; an owned one vouches.
        while ancestor > 0 and 0 < self.refs[ancestor] == self.pins[ancestor]:
            ancestor = self.parent_of(ancestor)
        if ancestor == _GONE:  # B14: unreachable
            pages = np.array([page], np.int32)
            self.index.remove(pages)
            self.state[page] = FREE
            self._push(pages)
            self._tell_removed(pages, UNREACHABLE)
            return
        after = ancestor if ancestor > 0 and self.refs[ancestor] == 0 else 0
        before = self.order[1, after]
        self.order[0, before] = self.order[1, after] = page
        self.order[0, page], self.order[1, page] = after, before
        self.cached += 1

    def _sweep(self) -> None:
        """Free the cached pages whose ancestors went with a marked page (B14)."""
        parents = self.index.lookup(self.parent_keys)
        parents[(parents == 0) & self.parent_keys.any(axis=1)] = _GONE
        out = np.empty(self.cached, np.int32)
        taken = sweep_run(parents, self.refs, self.pins, self.state, self.order, out)
        pages = out[:taken]
        self.index.remove(pages)
        self.cached -= taken
        self._push(pages[::-1])
        self._tell_removed(pages, UNREACHABLE)

    def _replace(self, gone: Pages, heirs: Pages) -> None:
        """Forget primaries, then name those that take over."""
        if len(gone):
            self.index.remove(gone.copy())
        if len(heirs):
            self.index.insert(self.index.keys[heirs], heirs.copy())
        self._tell_removed(gone, RELEASED)

    def _push(self, pages: Pages) -> None:
        """Free pages; a run that was released tail first is issued again in its old order (B18)."""
        self.free_pages[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def _tell_stored(
        self, keys: Keys, parents: Keys, content: Content | None, new: npt.NDArray[np.bool_]
    ) -> None:
        if self.events is not None and content is not None and new.any():
            self.events.stored(keys, parents, content, new)

    def _tell_removed(self, pages: Pages, reason: str) -> None:
        """Once the index has changed: tell the keys that no page stands for any more."""
        if self.events is None or not len(pages):
            return
        keys = self.index.keys[pages[self.partial[pages] == 0]]
        keys = keys[self.index.lookup(keys) == 0]
        if len(keys):
            self.events.removed(keys, reason)
