"""Pins on request: prefixes that are kept resident for a while, within a budget and a quota a scope."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcontract.contract.model import Scope
from kvcontract.pool.handles import Hold
from kvcontract.pool.index import Keys
from kvcontract.store.rank import Rank

PIN_TTL_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that stays resident.

    Attributes:
        id: for `unpin`.
        rank: where.
        tokens: how long it is: what was resident, and what budget and quota allow.
        refused_pages: resident pages that they did not.
        ends: on the store's clock.
    """

    id: int
    rank: str
    tokens: int
    refused_pages: int
    ends: float


class Pins:
    """Pins of one store; thread-safe.

    Args:
        budget: share of a pool that may be pinned in all.
        quota: share of a pool that one scope may pin.
        later: calls back after so many seconds on the store's clock, from any thread.
    """

    def __init__(
        self, budget: float, quota: float, later: Callable[[float, Callable[[], object]], object]
    ) -> None:
        self._budget = budget
        self._quota = quota
        self._later = later
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Hold, str, Scope]] = {}
        self._by_rank: Counter[str] = Counter()
        self._by_scope: Counter[tuple[str, Scope]] = Counter()
        self._last = 0

    @property
    def pages(self) -> int:
        """Pages that are pinned now, one in two pins counted twice."""
        return self._by_rank.total()

    def pin(self, rank: Rank, keys: Keys, scope: Scope, ttl_s: float, now: float) -> Pin:
        """Hold the longest prefix of a chain (uint64[n, 2]) resident in every pool, that may be held."""
        resident = rank.pool.probe(keys)
        with self._lock:
            left = min(
                int(self._budget * rank.pool.total) - self._by_rank[rank.name],
                int(self._quota * rank.pool.total) - self._by_scope[rank.name, scope],
            )
            hold = rank.pool.match_whole(keys[: max(0, min(resident, left))])
            if _in_the_way(rank):
                hold.trim(0)
            pages = hold.hit_pages
            refused = max(0, resident - pages)
            self._last += 1
            pin = Pin(self._last, rank.name, pages * rank.pool.page_tokens, refused, now + ttl_s)
            if pages:
                self._open[pin.id] = hold, rank.name, scope
                self._by_rank[rank.name] += pages
                self._by_scope[rank.name, scope] += pages
        if pages:
            self._later(ttl_s, lambda: self.unpin(pin.id))
        else:
            hold.release()
        return pin

    def unpin(self, number: int) -> bool:
        """End a pin; False if it has ended."""
        with self._lock:
            found = self._open.pop(number, None)
            if found is None:
                return False
            hold, rank, scope = found
            self._by_rank[rank] -= hold.hit_pages
            self._by_scope[rank, scope] -= hold.hit_pages
            if not self._by_scope[rank, scope]:
                del self._by_scope[rank, scope]
        hold.release()
        return True

    def clear(self) -> None:
        """End all of them."""
        for number in list(self._open):
            self.unpin(number)


def _in_the_way(rank: Rank) -> bool:
    """Whether less is left beside the full pages than one request needs: it would wait until a pin ends."""
    return any(side.pool.gauges().budget < side.lifetime(rank.pool.total) for side in rank.pool.sides)
