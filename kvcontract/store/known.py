"""What a store knows of its tiers: which records each has, rank by rank, and who is told of changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys, Pages
from kvcontract.store.events import RESET, TierEvents
from kvcontract.store.marks import KNOWN_FOR_S, Flags, Generations, Marks, Saving, names_of
from kvcontract.store.rank import Berth
from kvcontract.tiers.base import Clock, RecordKeys
from kvcontract.tiers.guard import GuardedTier

_RECENT: Final = 4
"""Names of stored records that are kept, for each page of the pools."""


class Known:
    """What is known of one tier; thread-safe.

    A record's mark is on its last page, and dies with that page's occupant.  So that what comes back from one
    tier is not saved to another that has it, the latest names of stored records are kept beyond that.

    Args:
        tier: which; what it must not do, it does not.
        ranks: of the store.
        part: id of the part whose records count.
        events: told of changes; None: nobody is.
        clock: the store's.
    """

    def __init__(
        self, tier: GuardedTier, ranks: Sequence[Berth], part: int, events: TierEvents | None, clock: Clock
    ) -> None:
        told = tier.tells_losses
        self.tier = tier
        self._part = part
        self._clock = clock
        self._events = events
        # One lock for what is stored and what is told of it: the stream must be in the order of the changes.
        self._lock = threading.RLock()
        self._recent: dict[bytes, float] = {}  # until when the record is believed to be there
        self._most = _RECENT * sum(rank.pool.pages for rank in ranks)
        self._lost_at: dict[bytes, float] = {}
        self._lost_before = -math.inf  # when the latest of those was lost that are not in there any more
        self._told = told
        self._marks = {rank.name: Marks(rank.pool.pages, told=told, lock=self._lock) for rank in ranks}
        self.unsubscribe = tier.on_loss(self._lost)

    def of(self, rank: Berth) -> Marks:
        """Marks of a rank's pages."""
        return self._marks[rank.name]

    def settled(
        self,
        rank: Berth,
        saving: Saving,
        ok: Flags,
        now: float,
        chain: tuple[Keys, NDArray[np.int64], Content | None],
    ) -> Flags:
        """A save has ended; see `Marks.settled`.

        Args:
            rank: whose pages.
            saving: what was saved.
            ok: bool[n].
            now: on the store's clock.
            chain: keys of the sequence's records, numbers of the saved ones, what all of them hold, if told.

        Returns:
            bool[n], those that are to be tried again.
        """
        keys, numbers, content = chain
        with self._lock:
            good, again = self.of(rank).settled(saving, ok, now)
            self._remember(saving.keys[good], now)
            if self._events is not None and content is not None and good.any():
                self._events.stored(self.tier.name, keys, numbers[good], content)
        return again

    def restored(self, rank: Berth, pages: Pages, keys: Keys, generations: Generations, since: float) -> None:
        """Records came back from this tier, read from `since` on: what it has not lost since, it has."""
        now = self._clock()
        with self._lock:
            there = self._kept(keys, since)
            self._remember(keys[there], now)
            self.of(rank).restored(pages[there], keys[there], generations[there], now)

    def relayed(
        self,
        rank: Berth,
        pages: Pages,
        keys: Keys,
        generations: Generations,
        since: float,
        chain: tuple[Keys, NDArray[np.int64], Content | None],
    ) -> None:
        """Pages came from another tier, saved from `since` on; on the device may be others by now.

        Args:
            rank: whose pages they were.
            pages: int32[n].
            keys: uint64[n, 2].
            generations: uint32[n], of the occupants they had.
            since: on the store's clock.
            chain: see `settled`.
        """
        now, (all_keys, numbers, content) = self._clock(), chain
        with self._lock:
            there = self._kept(keys, since)
            self._remember(keys[there], now)
            if self._events is not None and content is not None and there.any():
                self._events.stored(self.tier.name, all_keys, numbers[there], content)
            there &= rank.pool.generation[pages] == generations
            self.of(rank).restored(pages[there], keys[there], generations[there], now)

    def absent(self, rank: Berth, pages: Pages, keys: Keys, generations: Generations) -> None:
        """Somebody has looked for pages, and the tier has not got them: they are to be saved anew (C3)."""
        with self._lock:
            for name in names_of(keys):
                self._recent.pop(name, None)
            self.of(rank).absent(pages, generations)

    def _kept(self, keys: Keys, since: float) -> Flags:
        """Which pages the tier has not lost since, bool[n]."""
        lost = [self._lost_at.get(name, self._lost_before) >= since for name in names_of(keys)]
        return ~np.array(lost, np.bool_)

    def recall(self, rank: Berth, pages: Pages, keys: Keys, generations: Generations) -> None:
        """Records came back from another tier: maybe this one has them too."""
        now = self._clock()
        with self._lock:
            there = np.array([self._recent.get(name, 0.0) > now for name in names_of(keys)], np.bool_)
            self.of(rank).restored(pages[there], keys[there], generations[there], now)

    def _remember(self, keys: Keys, now: float) -> None:
        until = math.inf if self._told else now + KNOWN_FOR_S
        for name in names_of(keys):
            self._recent.pop(name, None)
            self._recent[name] = until
        while len(self._recent) > self._most:
            del self._recent[next(iter(self._recent))]

    def forget(self) -> None:
        """The tier was emptied (C11)."""
        with self._lock:
            self._recent.clear()
            self._lost_at.clear()
            self._lost_before = self._clock()
            for marks in self._marks.values():
                marks.forget()
            if self._events is not None:
                self._events.cleared(self.tier.name, RESET)

    def _lost(self, keys: RecordKeys, reason: str) -> None:
        """One shard of a record is enough: the record can be found no more (R2)."""
        mine: Keys = np.ascontiguousarray(keys["page_key"][keys["part"] == self._part])
        if not len(mine):
            return
        mine = np.unique(mine, axis=0)
        now = self._clock()
        with self._lock:
            for name in names_of(mine):
                self._recent.pop(name, None)
                self._lost_at.pop(name, None)
                self._lost_at[name] = now
            while len(self._lost_at) > self._most:
                self._lost_before = self._lost_at.pop(next(iter(self._lost_at)))
            for marks in self._marks.values():
                marks.lost(mine)
            if self._events is not None:
                self._events.removed(self.tier.name, mine, reason)
