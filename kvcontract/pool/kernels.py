"""The compiled whole-run operations of `books.py`; see there for what the arrays mean.

`order` and `ring` are int32 [2, pages]: next and previous page. Page 0 is the end mark of `order`:
`order[0, 0]` is evicted first, `order[1, 0]` last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.core.jit import kernel
from kvcontract.pool.index import Keys, Pages

FREE, WRITABLE, STAGED, PRIMARY, DUPLICATE = range(5)
STATE_NAMES = ("free", "writable", "staged", "primary", "duplicate")
States = npt.NDArray[np.uint8]


def _unlink(links: Pages, page: int) -> None:
    after, before = links[0, page], links[1, page]
    links[0, before] = after
    links[1, after] = before
    links[0, page] = page
    links[1, page] = page


def _link_before(links: Pages, page: int, after: int) -> None:
    before = links[1, after]
    links[0, before] = page
    links[1, page] = before
    links[0, page] = after
    links[1, after] = page


def _links() -> Pages:
    return np.tile(np.arange(4, dtype=np.int32), (2, 1))


def _pin_sample() -> tuple[Any, ...]:
    return np.ones(1, np.int32), 0, np.ones(4, np.int32), _links()


@kernel(sample=_pin_sample, helpers=(_unlink,))
def pin_run(pages: Pages, limit: int, refs: Pages, order: Pages) -> tuple[int, int]:
    """Add a reference to each page, stopping before the cached page that would be number `limit` + 1.

    Returns:
        (pages referenced, how many of them were cached).
    """
    taken = 0
    for i in range(pages.shape[0]):
        page = pages[i]
        if refs[page] == 0:
            if taken == limit:
                return i, taken
            _unlink(order, page)
            taken += 1
        refs[page] += 1
    return pages.shape[0], taken


def _release_sample() -> tuple[Any, ...]:
    state = np.full(4, WRITABLE, np.uint8)
    marks, out = np.zeros(4, np.uint8), np.zeros((3, 1), np.int32)
    return np.ones(1, np.int32), 1, np.ones(4, np.int32), state, marks, _links(), _links(), out


@kernel(sample=_release_sample, helpers=(_unlink, _link_before))
def release_run(
    pages: Pages,
    retention: int,
    refs: Pages,
    state: States,
    reset: States,
    order: Pages,
    ring: Pages,
    out: Pages,
) -> tuple[int, int, int, int]:
    """Drop a reference of each page, tail first; what nobody references is freed or cached.

    A page marked in `reset` is freed where another would be cached.  `out`, int32 [3, n], is written: pages
    freed; pages to forget; duplicates that become primaries.

    Returns:
        (freed, to forget, new primaries, cached): counts.
    """
    freed, forgotten, heirs, cached = 0, 0, 0, 0
    for i in range(pages.shape[0] - 1, -1, -1):  # B14
        page = pages[i]
        refs[page] -= 1
        if refs[page] > 0:
            continue
        heir = ring[0, page]
        if state[page] == PRIMARY and heir == page and retention and not reset[page]:
            _link_before(order, page, 0)
            cached += 1
            continue
        if state[page] == PRIMARY:
            out[1, forgotten] = page
            forgotten += 1
            if heir != page:
                state[heir] = PRIMARY
                out[2, heirs] = heir
                heirs += 1
        if heir != page:
            _unlink(ring, page)
        state[page] = FREE
        out[0, freed] = page
        freed += 1
    return freed, forgotten, heirs, cached


def _evict_sample() -> tuple[Any, ...]:
    return np.zeros(0, np.int32), np.zeros(4, np.uint8), _links()


@kernel(sample=_evict_sample, helpers=(_unlink,))
def evict_run(out: Pages, state: States, order: Pages) -> None:
    """Take the `len(out)` pages at the front of the eviction order."""
    for i in range(out.shape[0]):
        page = order[0, 0]
        _unlink(order, page)
        state[page] = FREE
        out[i] = page


def _issue_sample() -> tuple[Any, ...]:
    marks = np.zeros(4, np.uint8)
    return (
        np.ones(1, np.int32),
        1,
        marks,
        np.zeros(4, np.int32),
        marks.copy(),
        marks.copy(),
        np.zeros(4, np.uint32),
    )


@kernel(sample=_issue_sample)
def issue_run(
    pages: Pages,
    condition: int,
    state: States,
    refs: Pages,
    reset: States,
    partial: States,
    generation: npt.NDArray[np.uint32],
) -> None:
    """Give pages a new occupant: a state, one reference, none of the old one's marks."""
    for i in range(pages.shape[0]):
        page = pages[i]
        state[page] = condition
        refs[page] = 1
        reset[page] = 0
        partial[page] = 0
        generation[page] += np.uint32(1)


def _join_sample() -> tuple[Any, ...]:
    ones, keys = np.ones(1, np.int32), np.zeros((1, 2), np.uint64)
    refs, state = np.ones(4, np.int32), np.zeros(4, np.uint8)
    parents = np.zeros((4, 2), np.uint64)
    return (
        ones,
        ones.copy(),
        keys,
        keys[0],
        parents,
        refs,
        state,
        _links(),
        _links(),
        np.zeros((2, 1), np.int32),
    )


@kernel(sample=_join_sample, helpers=(_unlink, _link_before))
def join_run(
    pages: Pages,
    primary: Pages,
    keys: Keys,
    parent: Keys,
    parent_keys: Keys,
    refs: Pages,
    state: States,
    order: Pages,
    ring: Pages,
    out: Pages,
) -> int:
    """Set state and parent of newly named pages, given their keys and the primary of each.

    `parent`, uint64 [2], is the key before the first.  `out`, int32 [2, n], is written: cached primaries that
    give way, and the pages that take over.

    Returns:
        How many gave way.
    """
    replaced = 0
    for i in range(pages.shape[0]):
        page, holder = pages[i], primary[i]
        for half in range(2):
            parent_keys[page, half] = keys[i - 1, half] if i else parent[half]
        if holder == page:
            state[page] = PRIMARY
        elif refs[holder] == 0:
            _unlink(order, holder)
            state[holder] = FREE
            state[page] = PRIMARY
            out[0, replaced] = holder
            out[1, replaced] = page
            replaced += 1
        else:
            state[page] = DUPLICATE
            _link_before(ring, page, ring[0, holder])
    return replaced


def _sweep_sample() -> tuple[Any, ...]:
    ints = np.zeros(4, np.int32)
    return ints, ints.copy(), ints.copy(), np.zeros(4, np.uint8), _links(), np.zeros(0, np.int32)


@kernel(sample=_sweep_sample, helpers=(_unlink,))
def sweep_run(parents: Pages, refs: Pages, pins: Pages, state: States, order: Pages, out: Pages) -> int:
    """Take cached pages that hang on nothing any more out of the order, ancestors before descendants.

    `parents`, int32 [pages]: primary of the page before each one; 0 at the start of a sequence, -1 where
    that is not resident.  `out` is written: the pages taken.

    Returns:
        How many were taken.
    """
    taken = 0
    page = order[1, 0]
    while page != 0:
        before = order[1, page]
        above = parents[page]
        # An ancestor that lives on pins alone says nothing about those above it.
        while above > 0 and state[above] != FREE and refs[above] > 0 and refs[above] == pins[above]:
            above = parents[above]
        if above < 0 or (above > 0 and state[above] == FREE):
            _unlink(order, page)
            state[page] = FREE
            out[taken] = page
            taken += 1
        page = before
    return taken
