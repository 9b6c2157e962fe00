"""The pool: which page holds what, who may draw how many, behind one gate.

Two kinds of allocation share the pages. *Admission* is authoritative: `try_admit` promises a request its
lifetime pages, and `draw` cannot fail (B11). *Restores and holds* are opportunistic: they take what is left
above the promises (B3, B5). What keeps both true is one inequality, checked by every verb under the lock::

    entitled <= available = free + cached

where `entitled` is the sum of what admitted requests may still draw. `books.py` keeps the arrays.

All verbs are thread-safe and work on whole runs; none waits for anything but the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.books import ROOT
from kvcontract.pool.events import Content
from kvcontract.pool.guards import as_keys, leading
from kvcontract.pool.handles import Entitlement, Hold, Never, Reservation, Run
from kvcontract.pool.holdings import covered, hold_deepest
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.kernels import STAGED, WRITABLE
from kvcontract.pool.media import NO_MEDIA, Media
from kvcontract.pool.rooted import Rooted


class BlockPool(Rooted):
    """Device pages of the groups that reach back to the first token; arguments and errors as of `Rooted`."""

    @property
    def generation(self) -> npt.NDArray[np.uint32]:
        """uint32 [pages], read-only: raised each time a page gets a new occupant."""
        view = self._books.generation.view()
        view.flags.writeable = False
        return view

    # Prefixes

    def match(self, keys: Keys, *, boundary: Keys | None = None) -> Hold:
        """Pin the longest resident prefix of a chain, as far as promises leave room (B5).

        Args:
            keys: uint64 [n, 2].
            boundary: uint64 [2], name of a partial page after them: held too if all of them are.
        """
        wanted = as_keys(keys)
        with self._gate() as books:
            pages = books.index.match(wanted)
            if boundary is not None and len(pages) == len(wanted):
                last = books.index.match(as_keys(boundary[None]))
                above = wanted[-1] if len(wanted) else ROOT
                if len(last) and np.array_equal(books.parent_keys[last[0]], above):
                    pages = np.concatenate([pages, last])
            count = books.reference(pages, books.available - self._entitled)
            run = Run("hold", pages, count, registered=count, boundary=count > len(wanted))
            return self._hold(run, wanted[: run.full].copy(), boundary)

    def match_whole(self, keys: Keys, *, boundary: Keys | None = None, legal: Media = NO_MEDIA) -> Hold:
        """`match`, cut to where a request can go on: every other pool has what that needs (R2, F5).

        Args:
            keys: uint64 [n, 2].
            boundary: see `match`.
            legal: items of the prompt; it is not cut inside an uncut one.
        """
        hold, size = self.match(keys, boundary=boundary), self.page_tokens
        pages = legal.floor_pages(hold.hit_pages * size, size)
        if self.sides and pages:
            hold.sides = hold_deepest(self.sides, size, keys, pages, legal)
            pages = 0 if hold.sides is None else hold.sides.pages
        hold.trim(pages)
        return hold

    def probe(self, keys: Keys) -> int:
        """How many leading pages of a chain (uint64 [n, 2]) are resident; pins nothing."""
        wanted = as_keys(keys)
        with self._gate() as books:
            return len(books.index.match(wanted))

    def probe_whole(self, keys: Keys) -> int:
        """How many leading pages of a chain a request could go on from here; pins nothing."""
        pages = self.probe(keys)
        if not self.sides or not pages:
            return pages
        present = {side.key: side.index.present(keys[:pages]) for side in self.sides}
        return next(iter(covered(self.sides, self.page_tokens, present, pages)), 0)

    def budget(self, hold: Hold | None = None) -> int:
        """Largest lifetime, in pages, that would be admitted now: available - entitled + credit (B9).

        Raises:
            UsageFault: the hold is spent or of another pool.
        """
        with self._gate():
            return self._room() + (0 if hold is None else self._peek(hold).full)

    def rooms_without(self, holds: Sequence[Hold]) -> list[int]:
        """Room (available - entitled) as it is, without the first hold, without the first two, ... (B8).

        Raises:
            UsageFault: a hold is spent or of another pool.
        """
        with self._gate() as books:
            rooms = [self._room()]
            owners = np.zeros(self.pages, np.int32)
            for hold in holds:
                pages = self._peek(hold).owned
                owners[pages] += 1
                rooms.append(rooms[-1] + int(np.count_nonzero(owners[pages] == books.refs[pages])))
            return rooms

    def take_hold(self, hold: Hold) -> Hold:
        """`Hold.take`."""
        with self._gate():
            taken = self._hold(self._claim(hold), hold.keys, hold.boundary_key)
        taken.sides, hold.sides = hold.sides, None
        return taken

    def trim_hold(self, hold: Hold, pages: int) -> None:
        """`Hold.trim`."""
        if hold.sides is not None and hold.sides.pages != pages:
            hold.let_sides_go()
        with self._gate() as books:
            run = self._peek(hold)
            if not 0 <= pages <= run.full:
                raise UsageFault(f"a hold of {run.full} pages cannot be trimmed to {pages}")
            if pages < run.full:
                surplus = run.pages[pages : run.count]
                run.count = run.registered = pages
                run.boundary, hold.boundary_key = False, None
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
        self,
        reservation: Reservation,
        keys: Keys,
        ok: npt.NDArray[np.bool_] | int,
        *,
        base: Hold,
        boundary: bool = False,
        content: Content | None = None,
    ) -> Hold:
        """Name the leading pages that were restored and hold them with the prefix they continue.

        Where another request has registered a key meanwhile, its page is held instead. Pages from the first
        incomplete one on are free again. Consumes both handles.

        Args:
            reservation: n staged pages, filled.
            keys: uint64 [n, 2], continuing those of `base`.
            ok: which pages are complete, bool [n], or how many leading ones.
            base: the hold before the restored pages; it may be empty.
            boundary: whether the last key names a partial page (B7).
            content: of the full pages; needed where events are on.

        Raises:
            UsageFault: shapes disagree, a handle is spent, or the base ends in a partial page.
        """
        names = as_keys(keys)
        with self._gate() as books:
            good = leading(self._peek(reservation), names, ok)
            partial = boundary and good == len(names) > 0
            told = self._told(content, good - int(partial))
            if self._peek(base).boundary:
                raise UsageFault("nothing can follow a partial page")
            run = self._claim(base)
            staged = self._claim(reservation).owned
            parent = books.index.keys[run.pages[run.count - 1]].copy() if run.count else ROOT
            owned = books.adopt(staged[:good], names[:good], parent, told, partial=partial)
            books.release(staged[good:])
            pages = np.concatenate([run.owned, owned])
            merged = Run("hold", pages, len(pages), registered=len(pages), boundary=partial)
            full = np.concatenate([base.keys, names[: good - int(partial)]])
            return self._hold(merged, full, names[-1] if partial else None)

    def commit_late(
        self,
        reservation: Reservation,
        keys: Keys,
        ok: npt.NDArray[np.bool_] | int,
        *,
        parent: Keys | None,
        boundary: bool = False,
        content: Content | None = None,
    ) -> int:
        """Name restored pages that nobody waits for any more: they become cached at once.

        Args:
            reservation: n staged pages, filled; consumed.
            keys: uint64 [n, 2].
            ok: which pages are complete, bool [n], or how many leading ones.
            parent: key [2] of the page before the first; None: they start the sequence.
            boundary: whether the last key names a partial page.
            content: of the full pages; needed where events are on.

        Returns:
            Pages made findable: 0 if the parent is not resident any more (B14).

        Raises:
            UsageFault: shapes disagree, or the reservation is spent.
        """
        names = as_keys(keys)
        with self._gate() as books:
            good = leading(self._peek(reservation), names, ok)
            if parent is not None and not books.index.lookup(as_keys(parent[None]))[0]:
                good = 0
            partial = boundary and good == len(names) > 0
            told = self._told(content, good - int(partial))
            staged = self._claim(reservation).owned
            above = ROOT if parent is None else parent
            owned = books.adopt(staged[:good], names[:good], above, told, partial=partial)
            books.release(staged[good:])
            books.cache_run(owned)
            return int(np.count_nonzero(books.index.lookup(names[:good])))

    # Admission

    def try_admit(self, lifetime_pages: int, hold: Hold | None = None) -> Entitlement | Never | None:
        """Promise a request its pages; checked and booked under one gate (B2).

        The full pages of `hold` are its first ones and need no promise (B6); a partial page after them is
        credited nothing: it becomes the source of a copy, `Entitlement.copies` (B7). The hold is consumed on
        success only.

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
            credit = self._credit_of(self._peek(hold), lifetime_pages) if hold is not None else 0
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
            if run.count:
                raise UsageFault(f"a hold of {held.full} pages for a request that has {run.count}")
            self._credit_of(held, run.lifetime)
            self._credit(run, self._claim(hold))

    def fork(
        self, entitlement: Entitlement, lifetime_pages: int, *, shared_pages: int, copied_pages: int
    ) -> Entitlement | Never | None:
        """Admit a branch of a request: it shares named pages, and copies those after them (B23).

        Args:
            entitlement: of the request that branches; it goes on.
            lifetime_pages: of the branch, shared and copied pages included.
            shared_pages: its first pages, which both own from now on.
            copied_pages: pages after those of which the branch gets its own, `Entitlement.copies`.

        Returns:
            As `try_admit`. Sources stay pinned until `copied`.

        Raises:
            UsageFault: pages that the request does not have or has not named, more than the lifetime, or
                copies of its own that are still to be made.
        """
        with self._gate() as books:
            parent = self._peek(entitlement)
            last = shared_pages + copied_pages
            has = 0 <= shared_pages <= parent.registered and 0 <= copied_pages <= parent.count - shared_pages
            if not has or last > lifetime_pages or len(parent.sources):
                raise UsageFault(
                    f"a branch of {lifetime_pages} pages cannot share {shared_pages} and copy {copied_pages}"
                    f" of {parent.count} pages, {parent.registered} named, {len(parent.sources)} to be copied"
                )
            if lifetime_pages > self.total:
                return Never(f"{lifetime_pages} pages for its lifetime; the pool has {self.total}")
            if lifetime_pages - shared_pages > self._room():
                return None
            run = Run("entitlement", np.zeros(lifetime_pages, np.int32), shared_pages, lifetime_pages)
            run.pages[:shared_pages] = parent.pages[:shared_pages]
            run.registered = shared_pages
            books.reference(run.owned)
            self._entitled += lifetime_pages - shared_pages
            self._copy_from(run, parent.pages[shared_pages:last].copy())
            return Entitlement(self, self._open(run), run)

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

    def register(self, entitlement: Entitlement, keys: Keys, content: Content | None = None) -> None:
        """Name the next unnamed pages of a request, complete by now; under a taken key a page stays private.

        Args:
            entitlement: whose pages.
            keys: uint64 [n, 2], continuing those registered before.
            content: of the n pages; needed where events are on.

        Raises:
            UsageFault: fewer than n unnamed pages are drawn, one is still to be copied, or the entitlement is
                spent.
        """
        names = as_keys(keys)
        with self._gate() as books:
            run = self._peek(entitlement)
            first, last = run.registered, run.registered + len(names)
            if last > run.count:
                raise UsageFault(f"{len(names)} pages to register; {run.count - first} are drawn and unnamed")
            if len(run.sources) and len(names):
                raise UsageFault(f"{len(run.sources)} pages are still to be copied; say copied() first")
            told = self._told(content, len(names))
            parent = books.index.keys[run.pages[first - 1]].copy() if first else ROOT
            books.register(run.pages[first:last], names, parent, told)
            run.registered = last

    def retract(self, entitlement: Entitlement, pages: Pages) -> None:
        """Return the last pages of a request that goes on, still unnamed: they may be drawn again (B4, B18).

        Args:
            entitlement: whose pages.
            pages: int32 [n], its last n pages in any order.

        Raises:
            UsageFault: a page twice, one that is not among its last n, a named or pinned one, the target of a
                copy, or a spent entitlement (B16). Nothing has changed then.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            first = max(run.count - len(pages), run.registered + len(run.sources))
            tail = run.pages[first : run.count]
            self._check_pages(pages, lambda valid: ~np.isin(valid, tail) | (books.refs[valid] > 1))
            books.release(tail)
            run.count = first
            self._entitled += len(pages)

    def release(self, entitlement: Entitlement) -> None:
        """End a request: its pages and the rest of its promise come back in one step (B4).

        Raises:
            UsageFault: the entitlement is spent, or of another pool (B16).
        """
        self.release_handle(entitlement)

    # Under the gate

    def _hold(self, run: Run, keys: Keys, boundary: Keys | None) -> Hold:
        return Hold(self, self._open(run), run, keys, boundary if run.boundary else None)

    def _credit_of(self, hold: Run, lifetime: int) -> int:
        if hold.count > lifetime:
            raise UsageFault(f"a hold of {hold.count} pages for a lifetime of {lifetime}")
        return hold.full

    def _credit(self, run: Run, hold: Run) -> None:
        run.pages[: hold.full] = hold.pages[: hold.full]
        run.count = run.registered = hold.full
        self._entitled -= hold.full  # B6
        if hold.boundary:
            self._copy_from(run, hold.pages[hold.full : hold.count])
            self._books.release(hold.pages[hold.full : hold.count])  # the pin keeps it

    def _copy_from(self, run: Run, sources: Pages) -> None:
        """Pin the sources and give the run its targets, out of its promise."""
        run.sources = sources
        self._books.pin(sources)
        targets = self._books.issue(len(sources), WRITABLE)
        run.pages[run.count : run.count + len(targets)] = targets
        run.count += len(targets)
        self._entitled -= len(targets)
