"""What a rank knows of one tier: which resident records are stored there, being saved, or were not saved.

A record is marked on its last page, whose key tells all tokens before it; the others may belong to several.
A mark names a page *and its occupant* (the page's generation), so it dies with the content it was made for.
Two things end one earlier: the tier says that it lost a record, or, where a tier cannot tell, time (C3).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.pool.index import Keys, Pages

KNOWN_FOR_S: Final = 300.0
"""How long a record counts as stored in a tier that cannot tell what it has lost."""

Flags = NDArray[np.bool_]
Lock = threading.RLock  # a factory in this version of Python
Generations = NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Saving:
    """Records on their way to one tier.

    Attributes:
        pages: int32[n], the last one of each.
        keys: uint64[n, 2], of the records.
        lost: which of them the tier has lost a shard of since the save began.
    """

    pages: Pages
    keys: Keys
    generations: Generations
    lost: Flags


class Marks:
    """Marks of one rank and tier; thread-safe.

    Args:
        pages: of the pool.
        told: whether the tier tells what it loses.
        lock: of the tier, re-entrant.
    """

    def __init__(self, pages: int, *, told: bool, lock: Lock) -> None:
        self._told = told
        self._lock = lock
        self._stored = np.zeros(pages, np.uint32)
        self._until = np.zeros(pages, np.float64)
        self._saving = np.zeros(pages, np.uint32)
        self._failed = np.zeros(pages, np.uint32)
        self._again = np.zeros(pages, np.uint32)
        self._flying: list[Saving] = []
        self._named: dict[int, bytes] = {}
        self._pages_of: dict[bytes, list[int]] = {}

    def missing(
        self, pages: Pages, generations: Generations, now: float, *, retry: bool, again: bool | None = None
    ) -> Flags:
        """Which pages are neither known to be stored nor being saved.

        Args:
            pages: int32[n].
            generations: uint32[n], of their occupants.
            now: on the store's clock.
            retry: those that were tried in vain as well (C4).
            again: those that are being saved are tried once more if that fails; None: with `retry`.
        """
        with self._lock:
            known = self._stored[pages] == generations
            if not self._told:
                known &= self._until[pages] > now
            saving = self._saving[pages] == generations
            if retry if again is None else again:
                self._again[pages[saving]] = generations[saving]
            if not retry:
                known |= self._failed[pages] == generations
            missing: Flags = ~(known | saving)
        return missing

    def begin(self, pages: Pages, keys: Keys, generations: Generations) -> Saving:
        """These pages are being saved."""
        saving = Saving(pages, keys, generations, np.zeros(len(pages), np.bool_))
        with self._lock:
            self._saving[pages] = generations
            self._failed[pages] = 0
            self._flying.append(saving)
        return saving

    def settled(self, saving: Saving, ok: Flags, now: float) -> tuple[Flags, Flags]:
        """A save has ended, `ok` bool[n]; the pages are still pinned.

        Returns:
            bool[n], those that are stored; bool[n], those that are not, and another try was asked for.
        """
        pages, generations = saving.pages, saving.generations
        with self._lock:
            self._flying.remove(saving)
            self._saving[pages] = 0
            good: Flags = ok & ~saving.lost
            self._store(pages[good], saving.keys[good], generations[good], now)
            self._failed[pages[~ok]] = generations[~ok]
            again: Flags = ~good & (self._again[pages] == generations)
            self._again[pages] = 0
        return good, again

    def state(self, pages: Pages, generations: Generations, now: float) -> tuple[Flags, Flags]:
        """Which pages are known to be stored, bool[n], and which are being saved, bool[n]."""
        with self._lock:
            stored = self._stored[pages] == generations
            if not self._told:
                stored &= self._until[pages] > now
            saving: Flags = self._saving[pages] == generations
        return stored, saving

    def absent(self, pages: Pages, generations: Generations) -> None:
        """Somebody has looked, and these pages are not stored."""
        with self._lock:
            mine = pages[self._stored[pages] == generations]
            self._stored[mine] = 0

    def restored(self, pages: Pages, keys: Keys, generations: Generations, now: float) -> None:
        """Pages were filled from this tier, so it has them."""
        with self._lock:
            self._store(pages, keys, generations, now)

    def lost(self, keys: Keys) -> None:
        """The tier has lost some of these records, uint64[n, 2]."""
        names = dict.fromkeys(names_of(keys))
        with self._lock:
            for saving in self._flying:
                close = np.isin(saving.keys[:, 0], keys[:, 0])  # then exactly
                for at in np.flatnonzero(close).tolist():
                    saving.lost[at] |= saving.keys[at].tobytes() in names
            for name in names:
                for page in self._pages_of.pop(name, ()):
                    self._stored[page] = 0
                    del self._named[page]

    def forget(self) -> None:
        """The tier was emptied."""
        with self._lock:
            self._stored[:] = 0
            self._failed[:] = 0
            self._named.clear()
            self._pages_of.clear()
            for saving in self._flying:
                saving.lost[:] = True

    def _store(self, pages: Pages, keys: Keys, generations: Generations, now: float) -> None:
        self._stored[pages] = generations
        self._failed[pages] = 0
        if not self._told:
            self._until[pages] = now + KNOWN_FOR_S
            return
        for page, name in zip(pages.tolist(), names_of(keys), strict=True):
            old = self._named.get(page)
            if old is not None and old != name:
                others = self._pages_of[old]
                others.remove(page)
                if not others:
                    del self._pages_of[old]
            if old != name:
                self._named[page] = name
                self._pages_of.setdefault(name, []).append(page)


def names_of(keys: Keys) -> Sequence[bytes]:
    """Each key of uint64[n, 2] as 16 bytes."""
    packed = np.ascontiguousarray(keys).tobytes()
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]
