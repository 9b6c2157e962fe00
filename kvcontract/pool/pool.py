"""The pool: which page holds what, who may draw how many, behind one gate.

Two kinds of allocation share the pages. *Admission* is authoritative: `try_admit` promises a request its
lifetime pages, and `draw` cannot fail (B11). *Restores and holds* are opportunistic: they take what is left
above the promises (B3, B5). What keeps both true is one inequality, checked by every verb under the lock::

    entitled <= available = free + cached

where `entitled` is the sum of what admitted requests may still draw. `books.py` keeps the arrays.

All verbs are thread-safe and work on whole runs; none waits for anything but the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.books import ROOT, Books
from kvcontract.pool.handles import Entitlement, Hold, Never, Reservation, Run
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.kernels import STAGED, WRITABLE
from kvcontract.pool.ledger import Ledger

_NAMED_FAULTS = 8


class BlockPool(Ledger):
    """Device pages of the groups of one reach.

    Args:
        pages: pages of the arenas, page 0 included: it is padding and never given out (B21).
        page_tokens: tokens of a page.
        retention: keep released pages for reuse.

    Raises:
        UsageFault: fewer than 2 pages, or fewer than 1 token a page.
    """

    def __init__(self, pages: int, page_tokens: int, *, retention: bool = True) -> None:
        if pages < 2 or page_tokens < 1:  # noqa: PLR2004 - page 0 and one to use
            raise UsageFault(
                f"pages = {pages}, page_tokens = {page_tokens}; allowed are at least 2 pages"
                " (page 0 is padding) of at least 1 token"
            )
        self.pages = pages
        self.page_tokens = page_tokens
        super().__init__(Books(pages, retention=retention))

    @property
    def generation(self) -> npt.NDArray[np.uint32]:
        """uint32 [pages], read-only: raised each time a page gets a new occupant."""
        view = self._books.generation.view()
        view.flags.writeable = False
        return view

    def check_capacity(self, bound_blocks: Mapping[str, int]) -> None:
        """Refuse a pool larger than any bound arena (B22).

        Args:
            bound_blocks: blocks of each bound arena, by name.

        Raises:
            UsageFault: names every arena that is too small.
        """
        small = [f"{name}: {blocks}" for name, blocks in bound_blocks.items() if blocks < self.pages]
        if small:
            raise UsageFault(
                f"the pool has {self.pages} pages (page 0 included); too small, in blocks: {', '.join(small)}"
            )

    # Prefixes

    def match(self, keys: Keys) -> Hold:
        """Pin the longest resident prefix of a chain, as far as promises leave room (B5).

        Args:
            keys: uint64 [n, 2].
        """
        wanted = _as_keys(keys)
        with self._gate() as books:
            pages = books.index.match(wanted)
            count = books.reference(pages, books.available - self._entitled)
            run = Run("hold", pages, count, registered=count)
            return Hold(self, self._open(run), run, wanted[:count].copy())

    def probe(self, keys: Keys) -> int:
        """How many leading pages of a chain (uint64 [n, 2]) are resident; pins nothing."""
        wanted = _as_keys(keys)
        with self._gate() as books:
            return len(books.index.match(wanted))

    def take_hold(self, hold: Hold) -> Hold:
        """`Hold.take`."""
        with self._gate():
            run = self._claim(hold)
            return Hold(self, self._open(run), run, hold.keys)

    def trim_hold(self, hold: Hold, pages: int) -> None:
        """`Hold.trim`."""
        with self._gate() as books:
            run = self._peek(hold)
            if not 0 <= pages <= run.count:
                raise UsageFault(f"a hold of {run.count} pages cannot be trimmed to {pages}")
            surplus = run.pages[pages : run.count]
            run.count = run.registered = pages
            books.release(surplus)
            hold.keys = hold.keys[:pages]

    # Restores

    def reserve(self, pages: int) -> Reservation | None:
        """Stage pages for a restore, out of what promises leave (B3); None if that is too little.

        Raises:
            UsageFault: `pages` is below 1.
        """
        if pages < 1:
            raise UsageFault(f"a reservation of {pages} pages; allowed is 1 or more")
        with self._gate() as books:
            if books.available < pages + self._entitled:
                return None
            run = Run("reservation", books.issue(pages, STAGED), pages)
            return Reservation(self, self._open(run), run)

    def commit(
        self, reservation: Reservation, keys: Keys, ok: npt.NDArray[np.bool_] | int, *, base: Hold
    ) -> Hold:
        """Name the leading pages that were restored and hold them with the prefix they continue.

        Where another request has registered a key meanwhile, its page is held instead. Pages from the first
        incomplete one on are free again. Consumes both handles.

        Args:
            reservation: n staged pages, filled.
            keys: uint64 [n, 2], continuing those of `base`.
            ok: which pages are complete, bool [n], or how many leading ones.
            base: the hold before the restored pages; it may be empty.

        Raises:
            UsageFault: shapes disagree, or a handle is spent.
        """
        names = _as_keys(keys)
        with self._gate() as books:
            good = _leading(self._peek(reservation), names, ok)
            run = self._claim(base)
            staged = self._claim(reservation).owned
            parent = books.index.keys[run.pages[run.count - 1]] if run.count else ROOT
            owned = books.adopt(staged[:good], names[:good], parent)
            books.release(staged[good:])
            pages = np.concatenate([run.owned, owned])
            merged = Run("hold", pages, len(pages), registered=len(pages))
            return Hold(self, self._open(merged), merged, np.concatenate([base.keys, names[:good]]))

    def commit_late(
        self, reservation: Reservation, keys: Keys, ok: npt.NDArray[np.bool_] | int, *, parent: Keys | None
    ) -> int:
        """Name restored pages that nobody waits for any more: they become cached at once.

        Args:
            reservation: n staged pages, filled; consumed.
            keys: uint64 [n, 2].
            ok: which pages are complete, bool [n], or how many leading ones.
            parent: key [2] of the page before the first; None: they start the sequence.

        Returns:
            Pages made findable: 0 if the parent is not resident any more (B14).

        Raises:
            UsageFault: shapes disagree, or the reservation is spent.
        """
        names = _as_keys(keys)
        with self._gate() as books:
            good = _leading(self._peek(reservation), names, ok)
            staged = self._claim(reservation).owned
            if parent is not None and not books.index.lookup(_as_keys(parent[None]))[0]:
                good = 0
            owned = books.adopt(staged[:good], names[:good], ROOT if parent is None else parent)
            books.release(staged[good:])
            books.cache_run(owned)
            return int(np.count_nonzero(books.index.lookup(names[:good])))

    # Admission

    def try_admit(self, lifetime_pages: int, hold: Hold | None = None) -> Entitlement | Never | None:
        """Promise a request its pages; checked and booked under one gate (B2).

        The pages of `hold` are its first ones and need no promise (B6); the hold is consumed on success only.

        Args:
            lifetime_pages: all pages the request can ever need; 0 never waits (B10).
            hold: the prefix it starts from.

        Returns:
            The promise; None if it does not fit now, with no side effect; `Never` if it never can.

        Raises:
            UsageFault: the lifetime is negative, or the hold is spent, of another pool, or longer than that.
        """
        if lifetime_pages < 0:
            raise UsageFault(f"a lifetime of {lifetime_pages} pages; allowed is 0 or more")
        if lifetime_pages > self.total:
            return Never(f"{lifetime_pages} pages for its lifetime; the pool has {self.total}")
        with self._gate() as books:
            credit = self._peek(hold).count if hold is not None else 0
            if credit > lifetime_pages:
                raise UsageFault(f"a hold of {credit} pages for a lifetime of {lifetime_pages}")
            if lifetime_pages - credit > books.available - self._entitled:
                return None
            run = Run("entitlement", np.zeros(lifetime_pages, np.int32), 0, lifetime_pages)
            self._entitled += lifetime_pages
            if hold is not None:
                self._credit(run, self._claim(hold))
            return Entitlement(self, self._open(run), run)

    def adopt(self, entitlement: Entitlement, hold: Hold) -> None:
        """Start an admitted request from a prefix: its pages replace promised ones, the hold is consumed.

        Raises:
            UsageFault: a handle is spent or of another pool, pages were drawn before, or the hold is longer
                than the lifetime.
        """
        with self._gate():
            run, held = self._peek(entitlement), self._peek(hold)
            if run.count or held.count > run.lifetime:
                raise UsageFault(
                    f"a hold of {held.count} pages for a request of {run.lifetime} that has {run.count}"
                )
            self._credit(run, self._claim(hold))

    def draw(self, entitlement: Entitlement, pages: int) -> Pages:
        """Take promised pages: int32 [pages]. Never fails within the promise (B11).

        Raises:
            UsageFault: more than remain, or the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            if not 0 <= pages <= run.lifetime - run.count:
                raise UsageFault(f"{pages} pages asked; {run.lifetime - run.count} of {run.lifetime} remain")
            drawn = books.issue(pages, WRITABLE)
            run.pages[run.count : run.count + pages] = drawn
            run.count += pages
            self._entitled -= pages
            return drawn

    def register(self, entitlement: Entitlement, keys: Keys) -> None:
        """Name the next unnamed pages of a request, complete by now; under a taken key a page stays private.

        Args:
            entitlement: whose pages.
            keys: uint64 [n, 2], continuing those registered before.

        Raises:
            UsageFault: fewer than n unnamed pages are drawn, or the entitlement is spent.
        """
        names = _as_keys(keys)
        with self._gate() as books:
            run = self._peek(entitlement)
            first, last = run.registered, run.registered + len(names)
            if last > run.count:
                raise UsageFault(f"{len(names)} pages to register; {run.count - first} are drawn and unnamed")
            parent = books.index.keys[run.pages[first - 1]].copy() if first else ROOT
            books.register(run.pages[first:last], names, parent)
            run.registered = last

    def retract(self, entitlement: Entitlement, pages: Pages) -> None:
        """Return the last pages of a request that goes on, still unnamed: they may be drawn again (B4, B18).

        Args:
            entitlement: whose pages.
            pages: int32 [n], its last n pages in any order.

        Raises:
            UsageFault: a page twice, one that is not among its last n, a named or pinned one, or a spent
                entitlement (B16). Nothing has changed then.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            first = max(run.count - len(pages), run.registered)
            tail = run.pages[first : run.count]
            self._check_pages(pages, lambda valid: ~np.isin(valid, tail) | (books.pins[valid] > 0))
            books.release(tail)
            run.count = first
            self._entitled += len(pages)

    def release(self, entitlement: Entitlement) -> None:
        """End a request: its pages and the rest of its promise come back in one step (B4).

        Raises:
            UsageFault: the entitlement is spent, or of another pool (B16).
        """
        self.release_handle(entitlement)

    # Guards and switches

    def pin(self, pages: Pages) -> None:
        """Keep owned pages (int32 [n]) from being reissued until `unpin`, whatever their owner does (C1).

        Raises:
            UsageFault: a page twice, out of range, or not owned by anybody.
        """
        with self._gate() as books:
            self._check_pages(pages, lambda valid: (books.refs[valid] == 0) | (books.state[valid] == STAGED))
            books.pin(pages)

    def unpin(self, pages: Pages) -> None:
        """Undo one `pin` of each page (int32 [n]).

        Raises:
            UsageFault: a page twice, out of range, or not pinned (B16).
        """
        with self._gate() as books:
            self._check_pages(pages, lambda valid: books.pins[valid] == 0)
            books.unpin(pages)

    def set_retention(self, on: bool) -> None:
        """Switch whether released pages are kept for reuse; switching off drains the cache once."""
        with self._gate() as books:
            books.retention = on
            if not on:
                books.evict(books.cached)

    def _credit(self, run: Run, hold: Run) -> None:
        run.pages[: hold.count] = hold.owned
        run.count = run.registered = hold.count
        self._entitled -= hold.count  # B6

    def _check_pages(self, pages: Pages, wrong: Callable[[Pages], npt.NDArray[Any]]) -> None:
        listed = pages.tolist()
        outside = [page for page in listed if not 0 < page < self.pages]
        twice = (
            sorted({page for page in listed if listed.count(page) > 1})
            if len(set(listed)) < len(listed)
            else []
        )
        if outside or twice:
            raise UsageFault(f"pages outside 1 .. {self.pages - 1}: {outside}; listed twice: {twice}")
        bad = pages[wrong(pages)].tolist()
        if bad:
            more = f" and {len(bad) - _NAMED_FAULTS} more" if len(bad) > _NAMED_FAULTS else ""
            raise UsageFault(f"pages that are not yours to name here: {bad[:_NAMED_FAULTS]}{more}")


def _as_keys(keys: Keys) -> Keys:
    """Checked, contiguous and writable, as the kernels are compiled."""
    if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint64:  # noqa: PLR2004 - two halves
        raise UsageFault(f"keys are uint64 [n, 2], not {keys.dtype} {list(keys.shape)}")
    return keys if keys.flags.c_contiguous and keys.flags.writeable else keys.copy()


def _leading(run: Run, keys: Keys, ok: npt.NDArray[np.bool_] | int) -> int:
    """How many leading pages of a reservation are complete."""
    flags = ok if isinstance(ok, np.ndarray) else np.arange(run.count) < ok
    if len(keys) != run.count or len(flags) != run.count:
        raise UsageFault(f"{run.count} staged pages, {len(keys)} keys, {len(flags)} outcomes")
    return run.count if flags.all() else int(flags.argmin())
