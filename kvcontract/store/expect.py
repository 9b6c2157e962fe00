"""Which records are to be relayed to a tier, told so that nothing which arrives meanwhile is missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcontract.pool.index import Keys
from kvcontract.store.known import Known
from kvcontract.store.marks import Flags
from kvcontract.store.rank import Berth
from kvcontract.store.relay import Relays
from kvcontract.store.saves import Run
from kvcontract.tiers.base import Clock


class Expectations:
    """Tells relays what to expect, and what was there already.

    Args:
        known: of each tier, fastest first.
        relays: told.
        clock: the store's.
    """

    def __init__(self, known: Sequence[Known], relays: Relays, clock: Clock) -> None:
        self._known = tuple(known)
        self._relays = relays
        self._clock = clock
        self._arrivals: deque[tuple[int, Keys, Flags]] = deque()

    def add(self, number: int, rank: Berth, run: Run, rows: NDArray[np.int64]) -> None:
        """Records that are in the tier above, or on their way there, are to be relayed to this one.

        `pass_on` has to follow, without any lock held.

        Args:
            number: of the tier.
            rank: whose pages.
            run: of the records.
            rows: int64[n], of its generations.
        """
        if not len(rows):
            return
        stored, coming = self._above(number, rank, run, rows)
        rows = rows[stored | coming]
        if not len(rows) or not self._relays.expect(number, rank, run, rows):
            return
        # Looked at again: what has arrived since, or has failed to, is told by nobody else.
        stored, coming = self._above(number, rank, run, rows)
        if not coming.all():
            there = ~coming
            self._arrivals.append((number - 1, run.keys[rows[there] + run.first], stored[there]))

    def pass_on(self) -> None:
        """Tell the relays of records that were there already; they ask tiers."""
        while True:
            try:
                arrival = self._arrivals.popleft()
            except IndexError:
                return
            self._relays.arrived(*arrival)

    def _above(self, number: int, rank: Berth, run: Run, rows: NDArray[np.int64]) -> tuple[Flags, Flags]:
        """Which records the tier above a tier has, and which are on their way there, bool[n] each."""
        numbers = rows + run.first
        above = self._known[number - 1].of(rank)
        coming = self._relays.coming(number - 1, run.keys[numbers])  # before what they come to
        stored, saving = above.state(run.pages[numbers, -1], run.generations[rows], self._clock())
        return stored, coming | saving
