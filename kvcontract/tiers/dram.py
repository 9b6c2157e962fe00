"""The DRAM tier: records in host memory, copied in a lane, evicted least recently used first."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Lane, ThreadLane, Urgency
from kvcontract.core.pending import Pending, all_of
from kvcontract.memory.slab import Allocate
from kvcontract.tiers.base import (
    HANDOFF_TTL_S,
    Buffers,
    Capabilities,
    Clock,
    Code,
    Codes,
    Lease,
    Level,
    Op,
    RecordKeys,
    Rows,
    SaveClass,
    key_bytes,
)
from kvcontract.tiers.dram_work import DramWork, Hold
from kvcontract.tiers.lending import Loan
from kvcontract.tiers.slots import Slot, Slots

LOCKED_RECORDS: Final = 256
"""Records of a loan that are seen to under the lock at one time: a lookup must not wait for all of them."""

T = TypeVar("T")

_Entry = tuple[Slot, int]  # a slot and the generation it was found in
_Piece = tuple[int, int]  # address, bytes


@dataclass(slots=True)
class _Receipt:
    """What a lease holds: per key its slot, pinned while `held`."""

    entries: list[_Entry | None]
    held: bool = True


class DramTier:
    """Records in host memory.

    Args:
        capacity_bytes: quota of memory, allocated as it is needed.
        lane: where copies run; stays the caller's to close, after this. None makes one, which `close` ends.
        clock: what deadlines are measured on.
        name: labels statistics.
        allocate: where memory comes from, for instance pinned for a device.
        handoff_ttl_s: how long a handoff is kept if nobody releases it.

    Attributes:
        faults: the latest unexpected exceptions.

    Raises:
        UsageFault: no capacity.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        lane: Lane | None = None,
        clock: Clock = time.monotonic,
        name: str = "dram",
        allocate: Allocate | None = None,
        handoff_ttl_s: float = HANDOFF_TTL_S,
    ) -> None:
        if capacity_bytes < 1:
            raise UsageFault(f"tier {name!r}: a capacity of {capacity_bytes} B; expected at least 1 B")
        self._name = name
        self._own_lane = lane is None
        self._lane: Lane = ThreadLane(f"kvc-{name}") if lane is None else lane
        self._clock = clock
        self._slots = Slots(capacity_bytes, allocate)
        self._work = DramWork(self._slots, self._lane, clock, handoff_ttl_s)
        self._lock, self.faults = self._work.lock, self._work.faults
        self._leases = 0
        # Filled by leases, without the lock: a lease may be released by the garbage collector, anywhere.
        self._returned: deque[_Receipt] = deque()

    @property
    def name(self) -> str:
        """Labels statistics."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """Volatile and private; records are copied straight from and to the memory given."""
        return Capabilities(
            persistent=False, shared=False, zero_copy=True, max_record_bytes=self._slots.capacity_bytes
        )

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """See `Tier.lookup`; answers at once."""
        try:
            lease = self._lookup(keys, deadline)
        except Exception as error:  # noqa: BLE001 - kept; a lookup that fails finds nothing (A10)
            self._work.fault(error)
            lease = Lease.nothing(self._name, len(keys), failed=True)
        return Pending.of(lease)

    def _lookup(self, keys: RecordKeys, deadline: float) -> Lease:
        wanted, counts = key_bytes(keys), self._work.counts
        with self._lock:
            self._settle_returns()
            if self._work.closed or self._clock() > deadline:
                counts["lookup_refused" if self._work.closed else "lookup_expired"] += 1
                return Lease.nothing(self._name, len(keys))
            entries: list[_Entry | None] = []
            for key in wanted:
                slot = self._slots.find(key)
                if slot is not None:
                    self._slots.pin(slot)
                entries.append(None if slot is None else (slot, slot.generation))
            present = np.array([entry is not None for entry in entries], np.bool_)
            found = int(present.sum())
            counts["hits"] += found
            counts["misses"] += len(entries) - found
            if not found:
                return Lease.nothing(self._name, len(keys))
            self._leases += 1
        receipt = _Receipt(entries)
        return Lease(self._name, present, receipt=receipt, release=lambda: self._returned.append(receipt))

    # Loads

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        count, work = len(rows), self._work
        if lease.tier != self._name or len(buffers) != count:
            return work.ended("load", count, Code.REFUSED)
        entries = self._pin_rows(lease, rows)
        if entries is None:
            return work.ended("load", count, Code.EXPIRED)

        def body(codes: Codes) -> None:
            try:
                for row, pieces in enumerate(buffers.pieces()):
                    codes[row] = work.each(partial(self._load_one, entries[row], pieces, deadline))
            finally:
                unpin()

        def unpin() -> None:
            self._unpin([entry[0] for entry in entries if isinstance(entry, tuple)])

        return work.start("load", count, body, Urgency.RESTORE, unpin)

    def _unpin(self, slots: list[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self._slots.unpin(slot)

    def _pin_rows(self, lease: Lease, rows: Rows) -> list[_Entry | Code] | None:
        """Pin what a load reads; None if the lease has ended. A row without a record has its code instead."""
        with self._lock:
            self._settle_returns()
            receipt = lease.receipt
            if not isinstance(receipt, _Receipt):
                return [Code.MISS] * len(rows)  # a lease on nothing
            if not receipt.held:
                return None
            found: list[_Entry | Code] = []
            for row in rows.tolist():
                entry = receipt.entries[row] if 0 <= row < len(receipt.entries) else Code.REFUSED
                if isinstance(entry, tuple):
                    self._slots.pin(entry[0])
                found.append(Code.MISS if entry is None else entry)
            return found

    def _load_one(self, entry: _Entry | Code, pieces: list[_Piece], deadline: float) -> Code:
        if isinstance(entry, Code):
            return entry
        if self._clock() > deadline:
            return Code.EXPIRED
        slot, _ = entry
        if sum(size for _, size in pieces) != slot.record_bytes:
            return Code.SHORT
        at = slot.address
        for address, size in pieces:
            ctypes.memmove(address, at, size)  # releases the GIL
            at += size
        return Code.OK

    def borrow(self, lease: Lease, rows: Rows, record_bytes: int, deadline: float) -> Loan:
        """See `Lends.borrow`."""
        entries = self._pin_rows(lease, rows) if lease.tier == self._name else None
        if entries is None or self._clock() > deadline:
            self._unpin([entry[0] for entry in entries or () if isinstance(entry, tuple)])
            code = Code.EXPIRED if lease.tier == self._name else Code.REFUSED
            self._work.ended("load", len(rows), code)
            return Loan.nothing(len(rows), code)
        given = [entry if isinstance(entry, Code) else entry[0] for entry in entries]
        odd = [slot for slot in given if isinstance(slot, Slot) and slot.record_bytes != record_bytes]
        self._unpin(odd)
        given = [Code.SHORT if slot in odd else slot for slot in given]

        def end(_row: int, slot: Slot, _done: bool) -> None:
            self._slots.unpin(slot)

        return self._lent("load", given, end)

    # Saves

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """See `Tier.save`."""
        count, work = len(keys), self._work
        if len(buffers) != count:
            return work.ended("save", count, Code.REFUSED)
        hold = work.name(handoff) if cls is SaveClass.HANDOFF else None

        def body(codes: Codes) -> None:
            for row, (key, pieces) in enumerate(zip(key_bytes(keys), buffers.pieces(), strict=True)):
                codes[row] = work.each(partial(self._save_one, key, pieces, hold, deadline))

        return work.start("save", count, body, cls.urgency)

    def _save_one(self, key: bytes, pieces: list[_Piece], hold: Hold, deadline: float) -> Code:
        slot = self._room(key, sum(length for _, length in pieces), hold, deadline)
        if isinstance(slot, Code):
            return slot
        whole = False
        try:
            at = slot.address
            for address, length in pieces:
                ctypes.memmove(at, address, length)  # releases the GIL
                at += length
            whole = True
        finally:
            with self._lock:
                if whole:
                    self._work.publish(slot, key, hold)
                self._slots.unpin(slot)
        return Code.OK

    def _room(self, key: bytes, size: int, hold: Hold, deadline: float) -> Slot | Code:
        """A slot to write a record into, pinned; or how the save of it has ended already."""
        if self._clock() > deadline:
            return Code.EXPIRED
        if not self._slots.fits(size):
            return Code.TOO_LARGE  # H7
        with self._lock:
            self._settle_returns()
            return self._taken(key, size, hold)

    def _taken(self, key: bytes, size: int, hold: Hold) -> Slot | Code:
        if (held := self._slots.find(key)) is not None:
            self._work.hold(hold, held)
            return Code.OK  # H2
        return self._slots.reserve(size) or Code.FULL

    def reserve(
        self,
        keys: RecordKeys,
        record_bytes: int,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Loan:
        """See `Lends.reserve`."""
        work = self._work
        hold = work.name(handoff) if cls is SaveClass.HANDOFF else None
        names, given, faults = key_bytes(keys), list[Slot | Code](), list[Exception]()
        late = self._clock() > deadline
        if late or not self._slots.fits(record_bytes):
            given = [Code.EXPIRED if late else Code.TOO_LARGE] * len(names)  # H7
        else:
            for some in _shares(names):
                with self._lock:
                    self._settle_returns()
                    for name in some:
                        try:
                            given.append(
                                Code.REFUSED if work.closed else self._taken(name, record_bytes, hold)
                            )
                        except Exception as error:  # noqa: BLE001 - kept; it befalls one record (H1)
                            faults.append(error)
                            given.append(Code.FAILED)
        for fault in faults:
            work.fault(fault)

        def end(row: int, slot: Slot, done: bool) -> None:
            if done:
                work.publish(slot, names[row], hold)
            self._slots.unpin(slot)

        return self._lent("save", given, end)

    def _lent(self, verb: str, given: list[Slot | Code], end: Callable[[int, Slot, bool], None]) -> Loan:
        """A loan of slots, which is an operation until it ends."""
        lent = [(row, slot) for row, slot in enumerate(given) if isinstance(slot, Slot)]
        codes = np.array([Code.OK if isinstance(item, Slot) else item for item in given], np.uint8)
        address = np.zeros(len(given), np.int64)
        rows = np.array([row for row, _ in lent], np.int64)
        address[rows] = [slot.address for _, slot in lent]
        if not lent:
            self._work.finish(verb, Pending(), codes)
            return Loan(address, codes, None)
        op = self._work.begin(verb)
        if op is None:
            self._unpin([slot for _, slot in lent])
            self._work.ended(verb, len(given), Code.REFUSED)
            return Loan.nothing(len(given), Code.REFUSED)

        def ended(done: NDArray[np.bool_]) -> Codes:
            final = codes.copy()
            final[rows[~done[rows]]] = Code.FAILED
            for some in _shares(lent):
                with self._lock:
                    for row, slot in some:
                        end(row, slot, bool(done[row]))
            self._work.finish(verb, op, final)
            return final

        return Loan(address, codes, ended)

    def discard(self, lease: Lease, rows: Rows) -> None:
        """See `Tier.discard`."""
        receipt = lease.receipt
        if lease.tier != self._name or not isinstance(receipt, _Receipt):
            return
        gone: list[bytes] = []
        with self._lock:
            self._settle_returns()
            for row in rows.tolist():
                entry = receipt.entries[row] if 0 <= row < len(receipt.entries) else None
                if entry is not None and entry[0].generation == entry[1] and entry[0].key is not None:
                    self._work.counts["quarantined"] += 1
                    gone.append(entry[0].key)
                    self._slots.drop(entry[0])
        self._work.tell(gone, "quarantined")

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`."""
        return self._work.on_loss(callback)

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; at once.  Handoffs end with it."""
        with self._lock:
            self._settle_returns()
            for handoff in list(self._work.handoffs):
                self._work.end_handoff(handoff)
            self._slots.forget()
        return Pending.of(self._clock() <= deadline)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """See `Tier.flush`; landed is visible here, and nothing is durable."""
        with self._lock:
            saves = [op for op, verb in self._work.running.items() if verb == "save"]
        return all_of(saves).map(lambda _: level != "durable" and self._clock() <= deadline)

    def release_handoff(self, lease_id: str) -> None:
        """See `Tier.release_handoff`; early."""
        with self._lock:
            self._work.end_handoff(lease_id)

    def stats(self) -> dict[str, int]:
        """Gauges (bytes, records, leases, handoffs, operations) and counters (by verb and code)."""
        with self._lock:
            self._settle_returns()
            gauges = {
                "capacity_bytes": self._slots.capacity_bytes,
                "allocated_bytes": self._slots.allocated_bytes,
                "used_bytes": self._slots.used_bytes,
                "records": len(self._slots),
                "leases": self._leases,
                "handoffs": len(self._work.handoffs),
                "operations": len(self._work.running),
                "evictions": self._slots.evictions,
            }
            counters = dict.fromkeys(("hits", "misses", "save_ok", "load_ok", "quarantined", "faults"), 0)
            return {**gauges, **counters, **self._work.counts}

    def close(self, deadline: float) -> bool:
        """See `Tier.close`; memory is given back only if nothing can still touch it (C10)."""
        with self._lock:
            self._work.closed = True
            running = list(self._work.running)
        try:
            all_of(running).wait(deadline - self._clock())
        except TimeoutError:
            return False  # the operations still own the memory: it lives as long as they do
        with self._lock:
            self._settle_returns()
            self._work.handoffs.clear()
            self._slots.clear()
        return self._lane.close(max(0.0, deadline - self._clock())) if self._own_lane else True

    def _settle_returns(self) -> None:
        """Unpin what leases gave back and handoffs outlived; every locked entry begins with this."""
        while self._returned:
            receipt = self._returned.popleft()
            receipt.held = False
            self._leases -= 1
            for entry in receipt.entries:
                if entry is not None:
                    self._slots.unpin(entry[0])
        self._work.end_overdue()


def _shares(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + LOCKED_RECORDS] for at in range(0, len(items), LOCKED_RECORDS))
