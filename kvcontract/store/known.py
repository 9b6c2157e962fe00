"""What a store knows of its tiers: which pages each has, rank by rank, and who is told when that changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys
from kvcontract.store.events import RESET, TierEvents
from kvcontract.store.marks import Flags, Marks, Saving
from kvcontract.store.rank import Rank
from kvcontract.tiers.base import RecordKeys, TellsLosses, Tier


class Known:
    """What is known of one tier; thread-safe.

    Args:
        tier: which.
        ranks: of the store.
        part: id of the part whose records count.
        events: told of changes; None: nobody is.

    Attributes:
        shared_out: whether a handoff goes here.
    """

    def __init__(self, tier: Tier, ranks: Sequence[Rank], part: int, events: TierEvents | None) -> None:
        told = isinstance(tier, TellsLosses)
        self.tier = tier
        self._part = part
        self._events = events
        # One lock for what is stored and what is told of it: the stream must be in the order of the changes.
        self._lock = threading.RLock()
        self._marks = {rank.name: Marks(rank.pool.pages, told=told, lock=self._lock) for rank in ranks}
        self.unsubscribe: Callable[[], None] = (
            tier.on_loss(self._lost) if isinstance(tier, TellsLosses) else lambda: None
        )

    def of(self, rank: Rank) -> Marks:
        """Marks of a rank's pages."""
        return self._marks[rank.name]

    def settled(
        self,
        rank: Rank,
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
            chain: keys of the sequence, the numbers of the saved pages in it, and what it holds, if told.

        Returns:
            bool[n], those that are to be tried again.
        """
        keys, numbers, content = chain
        with self._lock:
            good, again = self.of(rank).settled(saving, ok, now)
            if self._events is not None and content is not None and good.any():
                self._events.stored(self.tier.name, keys, numbers[good], content)
        return again

    def forget(self) -> None:
        """The tier was emptied (C11)."""
        with self._lock:
            for marks in self._marks.values():
                marks.forget()
            if self._events is not None:
                self._events.cleared(self.tier.name, RESET)

    def _lost(self, keys: RecordKeys, reason: str) -> None:
        """One record of a page is enough: the page can be found no more (R2)."""
        mine: Keys = np.ascontiguousarray(keys["page_key"][keys["part"] == self._part])
        if not len(mine):
            return
        mine = np.unique(mine, axis=0)
        with self._lock:
            for marks in self._marks.values():
                marks.lost(mine)
            if self._events is not None:
                self._events.removed(self.tier.name, mine, reason)
