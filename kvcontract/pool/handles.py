"""What the pool hands out: receipts for pages, each with one owner, none of which can leak.

A handle is a number under which the pool keeps the pages, so that what a handle may give back is what the
pool booked, never what a caller says. Handles are passed by value: the call that consumes one leaves it
spent, and using it again is an error. One that is dropped unconsumed is given back with a `ResourceWarning`.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvcontract.pool.index import Keys, Pages

if TYPE_CHECKING:
    from kvcontract.pool.holdings import SideHolds
    from kvcontract.pool.ledger import Ledger
    from kvcontract.pool.pool import BlockPool


NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Never:
    """An answer to admission: this can never fit (B10)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """An answer to admission: it does not fit now; nothing was booked, ask again when pages come back.

    Attributes:
        missing_pages: how many pages were short.
    """

    missing_pages: int


@dataclass(slots=True)
class Run:
    """What the pool books under a handle's number.

    Attributes:
        kind: "hold", "reservation" or "entitlement".
        pages: int32, at least `count` long, in chain order.
        count: pages owned now.
        lifetime: pages promised in all; 0 unless an entitlement.
        registered: how many of the leading pages have a name.
        boundary: whether the last page of a hold is a partial one: a copy source, never resident (B7).
        sources: pinned pages that are to be copied to the first unnamed ones, in order.
        reset_from: at its end, pages from this one on are freed rather than cached; None: no page is (B13).
        booked: in a `SidePool`, the most blocks that this may own at one time.
    """

    kind: str
    pages: Pages
    count: int
    lifetime: int = 0
    registered: int = 0
    boundary: bool = False
    sources: Pages = field(default_factory=lambda: NO_PAGES)
    reset_from: int | None = None
    booked: int = 0

    @property
    def owned(self) -> Pages:
        """The pages owned now, int32 [count]."""
        return self.pages[: self.count]

    @property
    def full(self) -> int:
        """How many of them are full pages of the prefix (a hold), which is what they are credited as."""
        return self.count - int(self.boundary)


class Handle:
    """Base of the receipts.

    Attributes:
        pool: the pool that gave it.
        token: number of the run in the pool; each is used once.
    """

    __slots__ = ("__weakref__", "_run", "pool", "token")

    def __init__(self, pool: Ledger, token: int, run: Run) -> None:
        self.pool = pool
        self.token = token
        self._run = run

    @property
    def live(self) -> bool:
        """Whether it has been neither consumed nor released."""
        return self.pool.is_live(self.token)

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """Pages it owns, or owned until it was consumed: int32 [k], read-only, in chain order."""
        view = self._run.owned
        view.flags.writeable = False
        return view

    def release(self) -> None:
        """Give everything back.

        Raises:
            UsageFault: it was released or consumed before (B16).
        """
        self.pool.release_handle(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.release()

    def __del__(self) -> None:
        if sys.is_finalizing() or not self.pool.abandon(self.token):
            return
        warnings.warn(f"{self!r} was dropped; the pool takes it back", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "live" if self.live else "spent"
        return f"<{type(self).__name__} {self.token}: {self._run.count} pages, {state}>"


class Hold(Handle):
    """Pins the resident pages of a prefix.

    Attributes:
        keys: uint64 [hit_pages, 2], names of its full pages.
        boundary_key: uint64 [2], name of the partial page after them; None without one.
        sides: what the other pools of the rank hold at the end of the prefix; goes where the hold goes.
    """

    __slots__ = ("boundary_key", "keys", "sides")
    pool: BlockPool

    def __init__(self, pool: BlockPool, token: int, run: Run, keys: Keys, boundary_key: Keys | None) -> None:
        super().__init__(pool, token, run)
        self.keys = keys
        self.boundary_key = boundary_key
        self.sides: SideHolds | None = None

    @property
    def hit_pages(self) -> int:
        """How many full pages it pins; a partial page after them is not counted (B7)."""
        return self._run.full

    def release(self) -> None:
        """Give everything back, on every side.

        Raises:
            UsageFault: it was released or consumed before (B16).
        """
        super().release()
        self.let_sides_go()

    def let_sides_go(self) -> None:
        """Keep the pages alone."""
        sides, self.sides = self.sides, None
        if sides is not None:
            sides.release()

    def take(self) -> Hold:
        """Move the pages to a new hold; this one is spent.

        Raises:
            UsageFault: it is spent already (B6).
        """
        return self.pool.take_hold(self)

    def trim(self, pages: int) -> None:
        """Keep the first `pages` pages, release the others; a partial page stays only if all full ones do.

        Raises:
            UsageFault: it is spent, or holds fewer.
        """
        self.pool.trim_hold(self, pages)


class Reservation(Handle):
    """Staged pages for a restore: filled by a load, then committed or released."""

    __slots__ = ()


class Entitlement(Handle):
    """The promise that a request gets its lifetime pages, and the pages it has drawn so far."""

    __slots__ = ()

    @property
    def lifetime_pages(self) -> int:
        """Pages promised in all."""
        return self._run.lifetime

    @property
    def remaining_pages(self) -> int:
        """Pages it may still draw."""
        return self._run.lifetime - self._run.count

    @property
    def registered_pages(self) -> int:
        """How many of its leading pages have a name."""
        return self._run.registered

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) pages to copy, all groups of each, before the request's first write (B23, E4)."""
        first = self._run.registered
        targets = self._run.pages[first : first + len(self._run.sources)]
        return tuple(zip(self._run.sources.tolist(), targets.tolist(), strict=True))
