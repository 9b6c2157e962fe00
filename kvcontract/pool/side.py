"""Blocks found each by its own name, beside the chain of full pages: pages behind a window, snapshots.

A chain's pages are found through those before them, and once shared stay so for a request's whole life.
Here neither holds: a request lets go of what lies behind its reach while it runs, and snapshots stand alone.
So what is booked is the most that each owner may ever have at one time, whoever else has the same block::

    booked = what requests, holds and reservations may own at most  +  blocks pinned by copies in flight
    booked <= total

Sharing a block gives no credit: the one who shares it slides on and needs another, while the other may still
need this one.  As nobody owns more than is booked for it, `draw` cannot fail (B11), and dropping a block and
drawing the next needs no look at who else has it (B4).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.books import ROOT, Books
from kvcontract.pool.guards import Guards, as_keys
from kvcontract.pool.handles import Entitlement, Handle, Never, Reservation, Run
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.kernels import STAGED, WRITABLE

Flags = npt.NDArray[np.bool_]


class SideHold(Handle):
    """Pins blocks that stand each for itself.

    Attributes:
        keys: uint64 [n, 2], their names, in the order of `pages`.
    """

    __slots__ = ("keys",)

    def __init__(self, pool: SidePool, token: int, run: Run, keys: Keys) -> None:
        super().__init__(pool, token, run)
        self.keys = keys


class SidePool(Guards):
    """Blocks of one space that is no chain.

    Args:
        key: of the space.
        blocks: of its arenas, block 0 included: it is padding and never given out (B21).
        page_tokens: tokens of a page of the model.
        retention: keep released blocks for reuse.

    Raises:
        UsageFault: fewer than 2 blocks.
    """

    def __init__(self, key: str, blocks: int, page_tokens: int, *, retention: bool = True) -> None:
        super().__init__(blocks, page_tokens, retention=retention, chained=False)
        self.key = key
        self._booked = 0

    @property
    def generation(self) -> npt.NDArray[np.uint32]:
        """uint32 [blocks], read-only: raised each time a block gets a new occupant."""
        view = self._books.generation.view()
        view.flags.writeable = False
        return view

    # What is there

    def present(self, keys: Keys) -> Flags:
        """Which of some names (uint64 [n, 2]) are resident: bool [n]; pins nothing."""
        wanted = as_keys(keys)
        with self._gate() as books:
            found: Flags = books.index.lookup(wanted) != 0
            return found

    def hold(self, keys: Keys) -> SideHold | None:
        """Pin all of some names (uint64 [n, 2], none twice); None if one is absent, or there is no room."""
        wanted = as_keys(keys)
        with self._gate() as books:
            pages = books.index.lookup(wanted)
            if not pages.all() or self._room() < len(pages):
                return None
            books.reference(pages)
            return self._held(pages, wanted)

    # Restores, snapshots

    def reserve(self, blocks: int) -> Reservation | None:
        """Blocks to be filled; None if there is no room (F6: a soft miss).

        Raises:
            UsageFault: `blocks` is below 1.
        """
        if blocks < 1:
            raise UsageFault(f"a reservation of {blocks} blocks; allowed is 1 or more")
        with self._gate() as books:
            if self._room() < blocks:
                return None
            run = Run("reservation", books.issue(blocks, STAGED), blocks, booked=blocks)
            self._booked += blocks
            return Reservation(self, self._open(run), run)

    def commit(self, reservation: Reservation, keys: Keys, ok: Flags | None = None) -> SideHold:
        """Name blocks that have been filled, and hold them; those that have not are free again.

        Where a name is taken by now, its block is held instead.

        Args:
            reservation: n blocks, consumed.
            keys: uint64 [n, 2].
            ok: bool [n], which are complete; None: all.

        Raises:
            UsageFault: shapes disagree, or the reservation is spent.
        """
        names = as_keys(keys)
        with self._gate() as books:
            count = self._peek(reservation).count
            good = np.ones(count, np.bool_) if ok is None else ok
            if len(names) != count or len(good) != count:
                raise UsageFault(f"{count} staged blocks, {len(names)} keys, {len(good)} outcomes")
            staged = self._claim(reservation).owned
            owned = books.adopt(staged[good], names[good], ROOT)
            books.release(staged[~good])
            return self._held(owned, names[good])

    # Admission

    def promise(self, lifetime: int, hold: SideHold | None = None) -> Entitlement | Never | None:
        """Promise a request that it may own so many blocks at one time.

        Args:
            lifetime: how many.
            hold: what it starts from; it stays as it is, and is to be adopted, or to be released.

        Returns:
            The promise; None if there is no room now, with no side effect; `Never` if there never can be.

        Raises:
            UsageFault: the hold is spent, of another pool, or of more blocks.
        """
        if lifetime > self.total:
            return Never(f"{lifetime} blocks of {self.key} at one time; the pool has {self.total}")
        with self._gate():
            credit = 0 if hold is None else self._peek(hold).count
            if credit > lifetime:
                raise UsageFault(f"a hold of {credit} blocks for at most {lifetime} at one time")
            if self._room() < lifetime - credit:
                return None
            pages = np.zeros(lifetime, np.int32)
            run = Run("entitlement", pages, 0, lifetime, booked=lifetime - credit)
            self._booked += run.booked
            return Entitlement(self, self._open(run), run)

    def adopt(self, entitlement: Entitlement, hold: SideHold) -> None:
        """Start from a hold: what it pins is owned by the request from now on; it is consumed.

        Raises:
            UsageFault: a handle is spent or of another pool, or blocks were drawn before.
        """
        with self._gate():
            run = self._peek(entitlement)
            if run.count or self._peek(hold).count > run.lifetime:
                raise UsageFault(f"a hold of {len(hold.pages)} blocks for a request that has {run.count}")
            held = self._claim(hold)
            run.pages[: held.count] = held.owned
            run.count = run.registered = held.count
            self._booked += run.lifetime - run.booked
            run.booked = run.lifetime

    def draw(self, entitlement: Entitlement, blocks: int) -> Pages:
        """Take promised blocks: int32 [blocks]; never fails within the promise (B11).

        Raises:
            UsageFault: more than remain, or the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            if not 0 <= blocks <= run.lifetime - run.count:
                raise UsageFault(
                    f"{blocks} blocks asked; {run.lifetime - run.count} of {run.lifetime} remain"
                )
            drawn = books.issue(blocks, WRITABLE)
            run.pages[run.count : run.count + blocks] = drawn
            run.count += blocks
            return drawn

    def share(self, entitlement: Entitlement, blocks: Pages) -> None:
        """Own named blocks that another request owns too (B23).

        Raises:
            UsageFault: more than remain, unnamed ones, or the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            owned = (books.refs[blocks] > 0) & (books.state[blocks] > STAGED)
            if run.count != run.registered or run.count + len(blocks) > run.lifetime or not owned.all():
                raise UsageFault(f"blocks {blocks.tolist()} cannot be shared by {entitlement!r}")
            books.reference(blocks)
            run.pages[run.count : run.count + len(blocks)] = blocks
            run.count += len(blocks)
            run.registered = run.count

    def register(self, entitlement: Entitlement, keys: Keys) -> None:
        """Name the next unnamed blocks of a request, complete by now; under a taken name one stays private.

        Args:
            entitlement: whose.
            keys: uint64 [n, 2].

        Raises:
            UsageFault: fewer than n unnamed blocks are drawn, or the entitlement is spent.
        """
        names = as_keys(keys)
        with self._gate() as books:
            run = self._peek(entitlement)
            last = run.registered + len(names)
            if last > run.count:
                raise UsageFault(f"{len(names)} blocks to name; {run.count - run.registered} are unnamed")
            books.register(run.pages[run.registered : last], names, ROOT)
            run.registered = last

    def drop(self, entitlement: Entitlement, first: int, keep: Flags) -> None:
        """Let blocks of a request go while it runs; others may be drawn for them.

        Args:
            entitlement: whose.
            first: number of the first among its blocks.
            keep: bool [n], of so many blocks: which are worth keeping; the others go first (B14).

        Raises:
            UsageFault: it has fewer, or the entitlement is spent.
        """
        with self._gate() as books:
            run, last = self._peek(entitlement), first + len(keep)
            if not 0 <= first <= last <= run.count:
                raise UsageFault(f"blocks {first} to {last} to drop, of {run.count}")
            gone = run.pages[first:last].copy()
            run.pages[first : run.count - len(keep)] = run.pages[last : run.count].copy()
            run.count -= len(keep)
            run.registered -= max(0, min(run.registered, last) - first)
            books.release(gone)
            books.demote(gone[~keep])

    def retract(self, entitlement: Entitlement, blocks: int) -> None:
        """Return the last blocks of a request that goes on, still unnamed (B18).

        Raises:
            UsageFault: named ones are among them, or the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            if not 0 <= blocks <= run.count - run.registered:
                raise UsageFault(f"{blocks} blocks to return; {run.count - run.registered} are unnamed")
            gone = run.pages[run.count - blocks : run.count].copy()
            run.count -= blocks
            books.release(gone)

    def forget(self, keys: Keys) -> None:
        """Let nobody find what is named like this, uint64 [n, 2]; what is in use goes at its end (B13)."""
        with self._gate() as books:
            pages = books.index.lookup(as_keys(keys))
            pages = pages[pages > 0]
            books.reset[pages[books.refs[pages] > 0]] = 1
            cached = pages[books.refs[pages] == 0]
            books.demote(cached)
            books.evict(len(cached))

    def demote(self, keys: Keys) -> None:
        """Let what is named like this, uint64 [n, 2], be the next to be evicted, as far as nobody owns it."""
        with self._gate() as books:
            pages = books.index.lookup(as_keys(keys))
            books.demote(pages[pages > 0])

    def release(self, entitlement: Entitlement) -> None:
        """End a request.

        Raises:
            UsageFault: the entitlement is spent, or of another pool (B16).
        """
        self.release_handle(entitlement)

    # Saves

    def there(self, blocks: Pages, generations: npt.NDArray[np.uint32]) -> Flags:
        """Which blocks have the occupants still that are meant, named or about to be: bool [...].

        Args:
            blocks: int32 [...].
            generations: uint32 [...], of the occupants.
        """
        with self._gate() as books:
            return self._there(books, blocks, generations)

    def copy_from(self, entitlement: Entitlement, blocks: Pages) -> bool:
        """Keep another request's blocks (int32 [n], none twice) until `copied`, or the end of this one.

        Returns:
            Whether there was room; nothing has changed if not.

        Raises:
            UsageFault: the entitlement is spent.
        """
        with self._gate() as books:
            run = self._peek(entitlement)
            if self._room() < int(np.count_nonzero(books.pins[blocks] == 0)):
                return False
            books.pin(blocks)
            run.sources = blocks
            return True

    def pin_named(
        self, blocks: Pages, generations: npt.NDArray[np.uint32], ending: Entitlement | None = None
    ) -> Flags:
        """Keep blocks from being issued again until `unpin` (C1), as far as each has its occupant still.

        A pin takes room; where there is too little, the last blocks are left out.  Blocks may be pinned
        before they are named: who reads them waits for whatever fills them.

        Args:
            blocks: int32 [n], none twice.
            generations: uint32 [n], of the occupants that are meant.
            ending: of a request that ends with this; consumed, and what it has given back makes room.

        Returns:
            bool [n], which are pinned.

        Raises:
            UsageFault: the entitlement is spent.
        """
        with self._gate() as books:
            there = self._there(books, blocks, generations)
            fresh, room = np.flatnonzero(there & (books.pins[blocks] == 0)), self._room()
            if ending is not None:
                run = self._peek(ending)
                own = np.isin(blocks[fresh], run.owned)
                fresh, room = fresh[~own], room + run.booked - int(np.count_nonzero(own))
            there[fresh[max(0, room) :]] = False
            pages = blocks[there]
            cached = pages[books.refs[pages] == 0]
            books.reference(cached)
            books.refs[cached] -= 1  # the pin is the only reference
            books.pin(pages)
            if ending is not None:  # after the pins: without retention, what nobody has is forgotten
                self._close(self._claim(ending))
            return there

    # Under the gate

    def _there(self, books: Books, blocks: Pages, generations: npt.NDArray[np.uint32]) -> Flags:
        found: Flags = (books.generation[blocks] == generations) & (books.state[blocks] >= STAGED)
        return found

    def _held(self, pages: Pages, keys: Keys) -> SideHold:
        count = len(pages)
        run = Run("hold", pages, count, registered=count, booked=count)
        self._booked += count
        return SideHold(self, self._open(run), run, keys.copy())

    def _owed(self) -> int:
        return self._booked + self._books.pinned - self._books.held

    def _forget(self, token: int) -> Run | None:
        run = super()._forget(token)
        self._booked -= 0 if run is None else run.booked
        return run

    def _promised(self) -> int:
        return sum(run.booked for run in self._runs.values()) + self._books.pinned - self._books.held
