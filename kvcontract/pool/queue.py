"""Who is admitted next: first come, first served, without the deadlocks that holds can make (B8).

A request that waits with a hold keeps pages from everyone. Several such behind a head that does not fit would
wait for ever: 100 pages, two requests of 80 with prefixes of 40 pages each leave 20, and neither fits. So::

    the head fits                    -> it is next
    it fits without some plain holds -> the last of these are shed, no more than needed; the head is next
    a hold must not be shed          -> its request may pass the head if it fits, a bounded number of times

A plain hold that is shed stays matchable: when its request has become the head, what is still resident of it
is held again. While nobody is active, passing is not bounded: the head waits for those holds alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.booking import needs, rooms_without
from kvcontract.pool.handles import Hold
from kvcontract.pool.index import Keys
from kvcontract.pool.pool import BlockPool

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """A request that waits for its pages.

    Attributes:
        item: whatever the caller queues.
        lifetime_pages: pages it is to be promised.
        hold: what it would start from now; None without one, or after it was shed.
        keep: whether the hold must not be shed.
        number: order of arrival.
        shed: what a hold that was shed had: keys of its pages, uint64 [n, 2], and of a partial page; None
            once it is held again.
        passed: how many later requests were admitted before it.
    """

    item: T
    lifetime_pages: int
    hold: Hold | None
    keep: bool
    number: int
    shed: tuple[Keys, Keys | None] | None = None
    passed: int = 0


class AdmissionQueue(Generic[T]):
    """Requests waiting for one pool, in order of arrival. For one thread; others may use the pool meanwhile.

    ::

        while (waiter := queue.next()) is not None:
            answer = admit(pool, ..., prefix=...)    # from waiter.hold, which may have changed
            if isinstance(answer, Later):
                break                                # somebody was faster; nothing has changed
            queue.admitted(waiter)

    Args:
        pool: where the pages come from.
        most_passes: how many requests may pass another while there are active ones.

    Raises:
        UsageFault: `most_passes` is negative.
    """

    def __init__(self, pool: BlockPool, *, most_passes: int = 8) -> None:
        if most_passes < 0:
            raise UsageFault(f"most_passes is {most_passes}; allowed is 0 or more")
        self._pool = pool
        self._most_passes = most_passes
        self._waiters: list[Waiter[T]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter[T]]:
        return iter(tuple(self._waiters))

    def push(
        self, item: T, lifetime_pages: int, hold: Hold | None = None, *, keep: bool = False
    ) -> Waiter[T]:
        """Queue a request at the end.

        Args:
            item: what to get back.
            lifetime_pages: pages it is to be promised.
            hold: the prefix it starts from.
            keep: the hold must not be shed: its content cannot be had again, or is promised to somebody.

        Raises:
            UsageFault: it could never fit (B10), or the hold is spent or of another pool.
        """
        if not 0 <= lifetime_pages <= self._pool.total:
            raise UsageFault(f"a lifetime of {lifetime_pages} pages; the pool has {self._pool.total}")
        self._pool.rooms_without(() if hold is None else (hold,))
        self._arrivals += 1
        waiter = Waiter(item, lifetime_pages, hold, keep, self._arrivals)
        self._waiters.append(waiter)
        return waiter

    def remove(self, waiter: Waiter[T]) -> None:
        """Take a request out that gives up; its hold stays the caller's to release.

        Raises:
            UsageFault: it is not queued.
        """
        if waiter not in self._waiters:
            raise UsageFault("this request is not queued: admitted, removed, or another queue's")
        self._waiters.remove(waiter)

    def admitted(self, waiter: Waiter[T]) -> None:
        """Take a request out that has its pages; those before it have been passed.

        Raises:
            UsageFault: it is not queued.
        """
        self.remove(waiter)
        for other in self._waiters:
            other.passed += int(other.number < waiter.number and waiter.lifetime_pages > 0)

    def next(self) -> Waiter[T] | None:
        """Whose turn it is: a request that fits now, or None. Sheds and takes holds as that needs."""
        for waiter in self._waiters:
            if not waiter.lifetime_pages:
                return waiter  # B10: already finished; it waits for nobody
        if not self._waiters:
            return None
        head = self._waiters[0]
        self._hold_again(head)
        if self._make_room(head):
            return head
        if head.passed < self._most_passes or not self._pool.gauges().requests:
            for waiter in self._waiters[1:]:
                if waiter.keep and waiter.hold is not None and self._make_room(waiter):
                    return waiter
        return None

    def stuck(self) -> Waiter[T] | None:
        """The last request whose hold must not be shed, if only giving it up lets anybody go on.

        None while anything is active, being restored or saved, or being resolved: that will make room.
        """
        gauges = self._pool.gauges()
        mine = sum(waiter.hold is not None for waiter in self._waiters)
        if gauges.requests or gauges.reservations or gauges.pinned or gauges.holds > mine:
            return None
        if self.next() is not None:
            return None
        kept = [waiter for waiter in self._waiters if waiter.keep and waiter.hold is not None]
        return kept[-1] if kept else None

    def _make_room(self, waiter: Waiter[T]) -> bool:
        """Shed as few of the last plain holds as it takes to fit a request; if all are too few, shed none."""
        needed = needs(self._pool, waiter.lifetime_pages, waiter.hold)
        plain = [
            other
            for other in reversed(self._waiters[1:])
            if other is not waiter and other.hold is not None and not other.keep
        ]
        rooms = rooms_without(self._pool, [other.hold for other in plain if other.hold is not None])
        enough = next((number for number, found in enumerate(rooms) if _enough(found, needed)), None)
        if enough is None:
            return False
        for other in plain[:enough]:
            _shed(other)
        return True

    def _hold_again(self, waiter: Waiter[T]) -> None:
        if waiter.shed is not None:
            keys, boundary = waiter.shed
            hold = self._pool.match_whole(keys, boundary=boundary)
            waiter.hold, waiter.shed = hold if hold.pages.size else None, None
            if waiter.hold is None:
                hold.release()


def _enough(rooms: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    return all(room >= need for room, need in zip(rooms, needed, strict=True))


def _shed(waiter: Waiter[T]) -> None:
    """Let a hold go: its pages stay matchable until somebody needs them."""
    if waiter.hold is not None:
        waiter.shed = waiter.hold.keys.copy(), waiter.hold.boundary_key
        waiter.hold.release()
        waiter.hold = None
