"""Which page holds which content: an open-addressing hash table in numpy arrays.

Slots hold page numbers, keys lie by page, so that reading a matched run touches neighbouring memory. Page 0
is never registered (B21), so 0 marks an empty slot. Deletion shifts later entries back instead of leaving
tombstones: the table never degrades, however often pages come and go. Keys are pseudo-random, so their low
bits are the hash, and nobody without the secret can aim at one slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.contract.errors import InternalFault
from kvcontract.core.jit import kernel

Pages = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]


class PageIndex:
    """Key to primary page, for a pool of `pages` pages. Not thread-safe: the pool's lock covers it.

    Attributes:
        keys: uint64 [pages, 2], the key each page was last given; valid for registered pages.
    """

    def __init__(self, pages: int) -> None:
        self.keys: Keys = np.zeros((pages, 2), np.uint64)
        self._slots: Pages = np.zeros(1 << max(3, (2 * pages - 1).bit_length()), np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def match(self, keys: Keys) -> Pages:
        """Pages of the longest prefix of `keys` (uint64 [n, 2]) that is present: int32 [k]."""
        out = np.empty(len(keys), np.int32)
        return out[: _find(self._slots, self.keys, keys, out, 1)]

    def lookup(self, keys: Keys) -> Pages:
        """Page of each of `keys` (uint64 [n, 2]), 0 where absent: int32 [n]."""
        out = np.empty(len(keys), np.int32)
        _find(self._slots, self.keys, keys, out, 0)
        return out

    def insert(self, keys: Keys, pages: Pages) -> Pages:
        """Name `pages` by `keys`; a key that is present keeps its primary (B15).

        Returns:
            The primary of each key, int32 [n]: the page itself, or the one that was there.
        """
        primary = np.empty(len(pages), np.int32)
        self._count += _insert(self._slots, self.keys, keys, pages, primary)
        return primary

    def remove(self, pages: Pages) -> None:
        """Forget primaries.

        Raises:
            InternalFault: one of them is not in the table.
        """
        removed = _remove(self._slots, self.keys, pages)
        self._count -= removed
        if removed != len(pages):
            raise InternalFault(f"page {pages[removed]} should be in the index and is not")


def _find_sample() -> tuple[Any, ...]:
    return (
        np.zeros(8, np.int32),
        np.zeros((2, 2), np.uint64),
        np.zeros((1, 2), np.uint64),
        np.zeros(1, np.int32),
        1,
    )


@kernel(sample=_find_sample)
def _find(slots: Pages, page_keys: Keys, keys: Keys, out: Pages, run_only: int) -> int:
    """Look up `keys`; with `run_only` stop at the first absent one. Returns how many were looked at."""
    mask = np.uint64(len(slots) - 1)
    last = len(slots) - 1
    for i in range(len(keys)):
        slot = np.int64(keys[i, 0] & mask)
        page = slots[slot]
        while page != 0 and (page_keys[page, 0] != keys[i, 0] or page_keys[page, 1] != keys[i, 1]):
            slot = (slot + 1) & last
            page = slots[slot]
        if page == 0 and run_only:
            return i
        out[i] = page
    return len(keys)


def _insert_sample() -> tuple[Any, ...]:
    pages = np.ones(1, np.int32)
    return np.zeros(8, np.int32), np.zeros((2, 2), np.uint64), np.ones((1, 2), np.uint64), pages, pages.copy()


@kernel(sample=_insert_sample)
def _insert(slots: Pages, page_keys: Keys, keys: Keys, pages: Pages, primary: Pages) -> int:
    """Insert absent keys, note the primary of each, and store every page's key. Returns how many are new."""
    mask = np.uint64(len(slots) - 1)
    last = len(slots) - 1
    added = 0
    for i in range(len(keys)):
        slot = np.int64(keys[i, 0] & mask)
        page = slots[slot]
        while page != 0 and (page_keys[page, 0] != keys[i, 0] or page_keys[page, 1] != keys[i, 1]):
            slot = (slot + 1) & last
            page = slots[slot]
        if page == 0:
            page = pages[i]
            slots[slot] = page
            added += 1
        primary[i] = page
        page_keys[pages[i], 0] = keys[i, 0]
        page_keys[pages[i], 1] = keys[i, 1]
    return added


def _remove_sample() -> tuple[Any, ...]:
    slots = np.zeros(8, np.int32)
    slots[0] = 1
    return slots, np.zeros((2, 2), np.uint64), np.ones(1, np.int32)


@kernel(sample=_remove_sample)
def _remove(slots: Pages, page_keys: Keys, pages: Pages) -> int:
    """Remove pages, shifting later entries of each cluster back. Stops at one that is absent."""
    mask = np.uint64(len(slots) - 1)
    last = len(slots) - 1
    for i in range(len(pages)):
        hole = np.int64(page_keys[pages[i], 0] & mask)
        while slots[hole] != pages[i]:
            if slots[hole] == 0:
                return i
            hole = (hole + 1) & last
        at = (hole + 1) & last
        while slots[at] != 0:
            home = np.int64(page_keys[slots[at], 0] & mask)
            if ((at - home) & last) >= ((at - hole) & last):  # may move back to the hole
                slots[hole] = slots[at]
                hole = at
            at = (at + 1) & last
        slots[hole] = 0
    return len(pages)
