"""The auditor: every array of the pool against every other, and all of it against the promises (R8).

It reads whole arrays and is meant for tests, debugging and idle moments, not for the path of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvcontract.contract.errors import InternalFault
from kvcontract.pool.books import Books
from kvcontract.pool.handles import Run
from kvcontract.pool.index import Pages
from kvcontract.pool.kernels import DUPLICATE, FREE, PRIMARY, STAGED, WRITABLE


def audit(books: Books, runs: Iterable[Run], entitled: int, promised: int) -> None:
    """Compare everything with everything.

    Raises:
        InternalFault: the message lists all that disagrees.
    """
    listed = list(runs)
    order = _eviction_order(books)
    faults = [
        *_counters(books, entitled),
        *_references(books, listed),
        *_promises(entitled, promised),
        *_lists(books, order),
        *_names(books),
        *_reachability(books, order),
    ]
    if faults:
        raise InternalFault("the pool's books disagree:\n" + "\n".join(f"  {fault}" for fault in faults))


def _eviction_order(books: Books) -> Pages:
    pages: list[int] = []
    page = int(books.order[0, 0])
    while page and len(pages) <= books.total:
        pages.append(page)
        page = int(books.order[0, page])
    return np.array(pages, np.int32)


def _counters(books: Books, entitled: int) -> Iterator[str]:
    named = {
        "free": (books.free, np.count_nonzero(books.state[1:] == FREE)),
        "cached": (books.cached, np.count_nonzero((books.state == PRIMARY) & (books.refs == 0))),
        "held": (books.held, np.count_nonzero(books.refs > 0)),
        "pinned": (books.pinned, np.count_nonzero(books.pins > 0)),
        "primaries": (len(books.index), np.count_nonzero(books.state == PRIMARY)),
    }
    for name, (counter, counted) in named.items():
        if counter != counted:
            yield f"{name} is {counter}, the arrays say {counted}"
    if books.free + books.cached + books.held != books.total:
        yield f"free {books.free} + cached {books.cached} + held {books.held} is not total {books.total}"
    if not 0 <= entitled <= books.available:
        yield f"entitled {entitled} is not within available {books.available}"


def _references(books: Books, runs: list[Run]) -> Iterator[str]:
    counted = books.pins.copy()
    for run in runs:
        np.add.at(counted, run.owned, 1)
        named = np.isin(books.state[run.owned], (PRIMARY, DUPLICATE))
        if not named[: run.registered].all() or named[run.registered :].any():
            yield f"a {run.kind} of {run.count} pages should have {run.registered} named ones"
    if not np.array_equal(counted, books.refs):
        bad = np.flatnonzero(counted != books.refs)
        refs, owners = books.refs[bad].tolist(), counted[bad].tolist()
        yield f"references of pages {bad.tolist()} are {refs}, their owners count {owners}"
    if (books.pins < 0).any():
        yield f"negative pins on pages {np.flatnonzero(books.pins < 0).tolist()}"
    marked = np.flatnonzero((books.reset > 0) & (books.state == PRIMARY) & (books.refs == 0))
    if marked.size:  # B13
        yield f"pages {marked.tolist()} are cached and marked for reset"
    sources = np.concatenate([run.sources for run in runs]) if runs else np.zeros(0, np.int32)
    if (books.pins[sources] < 1).any():  # E4
        yield f"the sources {sources[books.pins[sources] < 1].tolist()} of copies are not pinned"
    for state, owned in ((FREE, False), (WRITABLE, True), (STAGED, True), (DUPLICATE, True)):
        wrong = np.flatnonzero((books.state == state) & ((books.refs > 0) != owned))
        if wrong.size:
            yield f"pages {wrong.tolist()} in state {state} have {books.refs[wrong].tolist()} references"


def _promises(entitled: int, promised: int) -> Iterator[str]:
    if promised != entitled:
        yield f"entitled is {entitled}, promises sum to {promised}"


def _lists(books: Books, order: Pages) -> Iterator[str]:
    free = np.sort(books.free_pages[: books.free])
    if not np.array_equal(free, np.flatnonzero(books.state[1:] == FREE) + 1):
        yield f"the free stack holds {free.tolist()}"
    cached = np.flatnonzero((books.state == PRIMARY) & (books.refs == 0))
    if not np.array_equal(np.sort(order), cached):
        yield f"the eviction order holds {order.tolist()}, cached are {cached.tolist()}"
    if (books.order[1, books.order[0]] != np.arange(books.total + 1)).any():
        yield "the eviction order's links do not match"
    if books.state[0] != FREE or books.refs[0]:
        yield "page 0 is in use"  # B21


def _names(books: Books) -> Iterator[str]:
    named = np.flatnonzero((books.state == PRIMARY) | (books.state == DUPLICATE))
    primary = books.index.lookup(books.index.keys[named])
    wrong = named[(primary == named) != (books.state[named] == PRIMARY)]
    if wrong.size:  # B15
        yield f"pages {wrong.tolist()} are named wrongly in the index"
    for page, holder in zip(named.tolist(), primary.tolist(), strict=True):
        members, at = {page}, int(books.ring[0, page])
        while at != page and len(members) <= books.total:
            members.add(at)
            at = int(books.ring[0, at])
        if holder not in members:
            yield f"page {page} is not linked to its primary {holder}"
        if len(members) > 1 and books.refs[holder] == 0:
            yield f"page {holder} is cached and has duplicates {sorted(members - {holder})}"


def _reachability(books: Books, order: Pages) -> Iterator[str]:
    """B14: what is cached or owned hangs on something resident that is evicted later."""
    alive = (books.state == PRIMARY) | (books.state == DUPLICATE)
    pages = np.flatnonzero(alive & ((books.refs == 0) | (books.refs > books.pins)))
    keys = books.parent_keys[pages]
    pages, keys = pages[keys.any(axis=1)], keys[keys.any(axis=1)]
    parents = books.index.lookup(keys)
    if not parents.all():
        yield f"pages {pages[parents == 0].tolist()} are resident and unreachable"
    rank = np.full(books.total + 1, books.total + 1)
    rank[order] = np.arange(len(order))
    early = pages[(parents > 0) & (books.refs[parents] == 0) & (rank[pages] >= rank[parents])]
    if early.size:
        yield f"the parents of pages {early.tolist()} would be evicted before them"
