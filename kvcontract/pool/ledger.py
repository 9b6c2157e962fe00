"""What the pool has given to whom, behind one lock: gauges, handles, waiters.

The verbs of `pool.py` are built on this: each enters the gate, works on `Books` and on the runs booked under
handles, and leaves; waiters are told afterwards, outside the lock, if room has grown.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.audit import audit
from kvcontract.pool.books import Books
from kvcontract.pool.handles import Handle, Run


@dataclass(frozen=True, slots=True)
class Gauges:
    """One consistent reading of a pool, in pages: `free + cached + held == total`.

    Attributes:
        total: usable pages.
        free: without content.
        cached: with content that nobody owns.
        held: owned or pinned by somebody.
        entitled: what admitted requests may still draw.
        pinned: read by saves or copies in flight, each counted once (B9); they are among the held ones.
        requests, holds, reservations: live handles of each kind.
    """

    total: int
    free: int
    cached: int
    held: int
    entitled: int
    pinned: int
    requests: int = 0
    holds: int = 0
    reservations: int = 0

    @property
    def available(self) -> int:
        """Pages that can be drawn: free ones, and cached ones by eviction."""
        return self.free + self.cached

    @property
    def budget(self) -> int:
        """What a request without a prefix may be promised: available - entitled, nothing else (B9)."""
        return self.available - self.entitled


class Ledger:
    """Runs booked under handles, over the books of one pool.

    Args:
        books: the pages' state; only ever touched inside the gate.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._entitled = 0
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._live: Counter[str] = Counter()  # runs by kind
        self._next_token = 0
        self._dropped: deque[int] = deque()
        self._callbacks: list[Callable[[], None]] = []

    def gauges(self) -> Gauges:
        """All gauges at one moment."""
        with self._gate() as books:
            return Gauges(
                total=books.total,
                free=books.free,
                cached=books.cached,
                held=books.held,
                entitled=self._owed(),
                pinned=books.pinned,
                requests=self._live["entitlement"],
                holds=self._live["hold"],
                reservations=self._live["reservation"],
            )

    @property
    def total(self) -> int:
        """Usable pages: all but page 0."""
        return self._books.total

    @property
    def free(self) -> int:
        """Pages without content."""
        return self.gauges().free

    @property
    def cached(self) -> int:
        """Pages with content that nobody owns: evictable."""
        return self.gauges().cached

    @property
    def held(self) -> int:
        """Pages that somebody owns or pins."""
        return self.gauges().held

    @property
    def entitled(self) -> int:
        """Pages that admitted requests may still draw."""
        return self.gauges().entitled

    @property
    def available(self) -> int:
        """Pages that can be drawn: free + cached."""
        return self.gauges().available

    @property
    def pinned_blocks(self) -> int:
        """Pages with saves or copies in flight, each counted once (B9)."""
        return self._books.pinned

    def check_books(self) -> None:
        """Audit every array against every promise.

        Raises:
            InternalFault: something disagrees; the message names all of it.
        """
        with self._gate() as books:
            audit(books, self._runs.values(), self._owed(), self._promised())

    def on_release(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, outside the lock, whenever room (available - entitled) has grown.

        Returns:
            A function that ends it.
        """
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    # For handles

    def is_live(self, token: int) -> bool:
        """Whether the handle of this number is neither consumed nor released."""
        return token in self._runs

    def release_handle(self, handle: Handle) -> None:
        """`Handle.release`."""
        with self._gate():
            self._close(self._claim(handle))

    def abandon(self, token: int) -> bool:
        """Note that a handle was dropped: the next verb takes its pages back. Lock-free, the GC calls it.

        Returns:
            Whether anything was still booked under it.
        """
        run = self._runs.get(token)
        if run is None:
            return False
        self._dropped.append(token)
        return run.count + run.lifetime > 0

    # Under the gate

    def _gate(self) -> _Gate:
        return _Gate(self)

    def enter(self) -> tuple[Books, int]:
        """Shut the gate; the books, and the room there was before dropped handles were taken back."""
        self._lock.acquire()
        try:
            room = self._room()
            self._take_back_dropped()
        except BaseException:
            self._lock.release()
            raise
        return self._books, room

    def leave(self, room: int) -> None:
        """Open the gate, and tell waiters if there is more room than that."""
        grown = self._room() > room
        self._lock.release()
        if grown:
            for callback in tuple(self._callbacks):
                callback()

    def _take_back_dropped(self) -> None:
        while self._dropped:
            run = self._forget(self._dropped.popleft())
            if run is not None:
                self._close(run)

    def _room(self) -> int:
        books = self._books
        return books.free + books.cached - self._owed()

    def _owed(self) -> int:
        """Pages that may still be drawn from what is available."""
        return self._entitled

    def _promised(self) -> int:
        """The same, summed over what is booked under handles."""
        return sum(run.lifetime - run.count for run in self._runs.values() if run.kind == "entitlement")

    def _open(self, run: Run) -> int:
        self._next_token += 1
        self._runs[self._next_token] = run
        self._live[run.kind] += 1
        return self._next_token

    def _peek(self, handle: Handle) -> Run:
        if handle.pool is not self:
            raise UsageFault(f"{handle!r} belongs to another pool")
        run = self._runs.get(handle.token)
        if run is None:
            raise UsageFault(f"{handle!r} was consumed or released before")
        return run

    def _claim(self, handle: Handle) -> Run:
        run = self._peek(handle)
        self._forget(handle.token)
        return run

    def _forget(self, token: int) -> Run | None:
        run = self._runs.pop(token, None)
        if run is not None:
            self._live[run.kind] -= 1
        return run

    def _close(self, run: Run) -> None:
        if run.reset_from is not None:
            self._books.reset[run.owned[run.reset_from :]] = 1
        if len(run.sources):
            self._books.unpin(run.sources)
        self._books.release(run.owned)
        if run.kind == "entitlement":
            self._entitled -= run.lifetime - run.count


class _Gate:
    """The one lock of a ledger, as a context: every verb passes it, so it costs as little as can be."""

    __slots__ = ("_ledger", "_room")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> Books:
        books, self._room = self._ledger.enter()
        return books

    def __exit__(self, *_: object) -> None:
        self._ledger.leave(self._room)
