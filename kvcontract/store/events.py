"""What the tiers below a store hold, told to routers (I7); the device's own events come from its pools.

Same batches of arrays as `kvcontract.pool.events`, with the tier's name as medium: written where the store
learns that a page has become findable in a tier, or is no longer.  Names of partial pages do not occur.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.events import OVERFLOW, Cleared, Content, Event, Removed, Stored
from kvcontract.pool.index import Keys

RESET: Final = "reset"


class TierEvents:
    """Events of all tiers of one store, in order, until somebody takes them; thread-safe.

    Args:
        max_batches: most batches kept for a reader; beyond it all are dropped, and the stream says so by a
            `Cleared` of each medium with reason `OVERFLOW`.

    Raises:
        UsageFault: `max_batches` is below 2.
    """

    def __init__(self, *, max_batches: int = 1 << 16) -> None:
        if max_batches < 2:  # noqa: PLR2004 - one that says what was lost, one that is new
            raise UsageFault(f"a log of {max_batches} batches; allowed is 2 or more")
        self._max_batches = max_batches
        self._lock = threading.Lock()
        self._batches: list[Event] = []
        self._epochs: dict[str, int] = {}

    def take(self) -> list[Event]:
        """Everything since the last call, oldest first; from any thread."""
        with self._lock:
            batches, self._batches = self._batches, []
        return batches

    def stored(self, medium: str, keys: Keys, rows: NDArray[np.int64], content: Content) -> None:
        """Pages became findable.

        Args:
            medium: the tier's name.
            keys: uint64[n, 2], the chain from its start.
            rows: int64[k], which of its pages.
            content: of the n pages.
        """
        parents = np.concatenate([np.zeros((1, 2), np.uint64), keys[:-1]])[rows]
        tokens = content.token_ids.reshape(len(keys), -1)[rows].astype(np.int64)
        at = {row: number for number, row in enumerate(rows.tolist())}
        extras = {at[row]: identity for row, identity in content.extras.items() if row in at}
        with self._lock:
            epoch = self._epochs.setdefault(medium, 0)
            self._add(Stored(epoch, keys[rows], parents, tokens, content.scope, extras, medium))

    def removed(self, medium: str, keys: Keys, reason: str) -> None:
        """Pages (uint64[n, 2]) are findable no more."""
        with self._lock:
            self._add(Removed(self._epochs.setdefault(medium, 0), keys, reason, medium))

    def cleared(self, medium: str, reason: str) -> None:
        """Nothing is findable any more."""
        with self._lock:
            self._epochs[medium] = self._epochs.get(medium, 0) + 1
            self._add(Cleared(self._epochs[medium], reason, medium))

    def _add(self, event: Event) -> None:
        if len(self._batches) >= self._max_batches:
            self._batches = []
            for medium in sorted(self._epochs):
                self._epochs[medium] += 1
                self._batches.append(Cleared(self._epochs[medium], OVERFLOW, medium))
            return  # what did not fit is lost like the others: the reader starts anew
        self._batches.append(event)
