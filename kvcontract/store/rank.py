"""A rank: one scheduler with one pool, one index and its worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.wire import Part
from kvcontract.memory.binding import Binding
from kvcontract.pool.pool import BlockPool


class Rank:
    """What a store serves.

    Args:
        name: unique within the store.
        pool: the pages.
        bindings: the memory of each block-id space, by its key.
        tp: workers that the model is cut over.
    """

    def __init__(
        self, pool: BlockPool, bindings: Mapping[str, Binding], *, name: str = "0", tp: int = 1
    ) -> None:
        self.name = name
        self.pool = pool
        self.bindings = dict(bindings)
        self.tp = tp
        self._lock = threading.Lock()
        # Per part: the generation a page had when its content was last known to be stored; 0 is never.
        self._stored: dict[int, NDArray[np.uint32]] = {}
        self._saving: dict[int, NDArray[np.uint32]] = {}

    def unsaved(self, part: Part, pages: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which pages hold content that is neither known to be stored nor being saved; marks them saving."""
        generation = self.pool.generation[pages]
        with self._lock:
            stored, saving = self._marks(part)
            todo: NDArray[np.bool_] = (stored[pages] != generation) & (saving[pages] != generation)
            saving[pages[todo]] = generation[todo]
        return todo

    def settled(self, part: Part, pages: NDArray[np.int32], ok: NDArray[np.bool_]) -> None:
        """A save of pages ended; their content is stored where `ok`. The pages are still pinned."""
        with self._lock:
            stored, saving = self._marks(part)
            saving[pages] = 0
            stored[pages[ok]] = self.pool.generation[pages[ok]]

    def restored(self, part: Part, pages: NDArray[np.int32]) -> None:
        """Pages were filled from a tier, so their content is stored there (C3)."""
        with self._lock:
            stored, _ = self._marks(part)
            stored[pages] = self.pool.generation[pages]

    def _marks(self, part: Part) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        if part.id not in self._stored:
            self._stored[part.id] = np.zeros(self.pool.pages, np.uint32)
            self._saving[part.id] = np.zeros(self.pool.pages, np.uint32)
        return self._stored[part.id], self._saving[part.id]
