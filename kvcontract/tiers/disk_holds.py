"""What keeps records of a disk store from eviction: leases and handoffs, each a pin of a slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as numbers

import numpy as np

from kvcontract.tiers.base import Clock, Code, Lease, Rows
from kvcontract.tiers.disk_places import Slot
from kvcontract.tiers.disk_store import DiskStore

Entry = tuple[Slot, bytes]
"""A slot and the key it was found under."""


@dataclass(slots=True)
class _Receipt:
    """What a lease holds: per key its slot, pinned while `held`."""

    entries: list[Entry | None]
    held: bool = True


@dataclass(slots=True)
class _Handoff:
    """Slots pinned for a decode side that has not fetched them yet."""

    ends: float
    slots: list[Slot]


class Holds:
    """Leases and handoffs of one tier; thread-safe.

    Args:
        tier: name of the tier, as its leases bear it.
        store: whose slots are pinned.
        clock: what handoffs end on.
        handoff_ttl_s: how long one is kept if nobody releases it.
    """

    def __init__(self, tier: str, store: DiskStore, clock: Clock, handoff_ttl_s: float) -> None:
        self._tier, self._store, self._clock, self._ttl_s = tier, store, clock, handoff_ttl_s
        self._lock = threading.Lock()
        self._leases = 0
        # Filled by leases, without the lock: a lease may be released by the garbage collector, anywhere.
        self._returned: deque[_Receipt] = deque()
        self._handoffs: dict[str | int, _Handoff] = {}
        self._unnamed = numbers(1)  # handoffs that only time ends

    def lease(self, keys: Sequence[bytes]) -> Lease:
        """A lease on the records that are there."""
        with self._lock:
            self._settle()
            slots = self._store.find(keys)
            present = np.array([slot is not None for slot in slots], np.bool_)
            if not present.any():
                return Lease.nothing(self._tier, len(keys))
            self._leases += 1
        pairs = zip(slots, keys, strict=True)
        receipt = _Receipt([None if slot is None else (slot, key) for slot, key in pairs])
        return Lease(self._tier, present, receipt=receipt, release=lambda: self._returned.append(receipt))

    def pin_rows(self, lease: Lease, rows: Rows) -> list[Entry | Code] | None:
        """Pin some records of a lease once more, for who reads them.

        Returns:
            Per row its entry, or the code of a row without one; None if the lease has ended.
        """
        with self._lock:
            self._settle()
            receipt = lease.receipt
            if not isinstance(receipt, _Receipt):
                return [Code.MISS] * len(rows)  # a lease on nothing
            if not receipt.held:
                return None
            found: list[Entry | Code] = []
            for row in rows.tolist():
                entry = receipt.entries[row] if 0 <= row < len(receipt.entries) else Code.REFUSED
                found.append(Code.MISS if entry is None else entry)
            self._store.pin(entry[0] for entry in found if not isinstance(entry, Code))
            return found

    @staticmethod
    def slots(lease: Lease, rows: Rows) -> list[Slot]:
        """The slots of some records of a lease, whether it has ended or not."""
        receipt = lease.receipt
        if not isinstance(receipt, _Receipt):
            return []
        chosen = [receipt.entries[row] for row in rows.tolist() if 0 <= row < len(receipt.entries)]
        return [entry[0] for entry in chosen if entry is not None]

    def name(self, handoff: str | None) -> str | int:
        """What a handoff is kept under: its id, or one that nobody can release."""
        return handoff or next(self._unnamed)

    def keep(self, name: str | int, slot: Slot) -> None:
        """Make one pin of a slot that of a handoff."""
        with self._lock:
            handoff = self._handoffs.setdefault(name, _Handoff(self._clock() + self._ttl_s, []))
            handoff.slots.append(slot)

    def release(self, name: str | int) -> None:
        """End a handoff, if there is one of that name."""
        with self._lock:
            self._end(name)

    def release_all(self) -> None:
        """End every handoff."""
        with self._lock:
            for name in list(self._handoffs):
                self._end(name)

    def settle(self) -> None:
        """Unpin what leases gave back and handoffs outlived; before anything is evicted."""
        if self._returned or self._handoffs:
            with self._lock:
                self._settle()

    def figures(self) -> dict[str, int]:
        """Gauges."""
        with self._lock:
            self._settle()
            return {"leases": self._leases, "handoffs": len(self._handoffs)}

    def _settle(self) -> None:
        while self._returned:
            receipt = self._returned.popleft()
            receipt.held = False
            self._leases -= 1
            self._store.unpin(entry[0] for entry in receipt.entries if entry is not None)
        now = self._clock() if self._handoffs else 0.0
        for name in [name for name, handoff in self._handoffs.items() if handoff.ends <= now]:
            self._end(name)

    def _end(self, name: str | int) -> None:
        handoff = self._handoffs.pop(name, None)
        self._store.unpin(handoff.slots if handoff else ())
