"""The DRAM tier: records in host memory, copied in a lane, evicted least recently used first."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from typing import Final

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Lane, ThreadLane
from kvcontract.core.pending import Pending, all_of
from kvcontract.tiers.base import (
    HANDOFF_TTL_S,
    RECORD_KEY,
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
    guarded,
    key_bytes,
)
from kvcontract.tiers.slots import Allocate, Slot, Slots

_KEPT_FAULTS: Final = 16

_Entry = tuple[Slot, int]  # a slot and the generation it was found in
_Piece = tuple[int, int]  # address, bytes


@dataclass(slots=True)
class _Receipt:
    """What a lease holds: per key its slot, pinned while `held`."""

    entries: list[_Entry | None]
    held: bool = True


@dataclass(slots=True)
class _Handoff:
    """Slots pinned for a decode side that has not fetched them yet."""

    ends: float
    slots: list[Slot]


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
        self.faults: deque[Exception] = deque(maxlen=_KEPT_FAULTS)
        self._name = name
        self._own_lane = lane is None
        self._lane: Lane = ThreadLane(f"kvc-{name}") if lane is None else lane
        self._clock = clock
        self._handoff_ttl_s = handoff_ttl_s
        self._lock = threading.Lock()
        self._slots = Slots(capacity_bytes, allocate)
        self._counts: Counter[str] = Counter()
        self._leases = 0
        # Filled by leases, without the lock: a lease may be released by the garbage collector, anywhere.
        self._returned: deque[_Receipt] = deque()
        self._handoffs: dict[str | int, _Handoff] = {}
        self._unnamed = numbers(1)  # handoffs that only time ends, callbacks
        self._running: dict[Op, str] = {}
        self._loss_callbacks: dict[int, Callable[[RecordKeys, str], object]] = {}
        self._closed = False

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
            self._fault(error)
            lease = Lease.nothing(self._name, len(keys), failed=True)
        return Pending.of(lease)

    def _lookup(self, keys: RecordKeys, deadline: float) -> Lease:
        wanted = key_bytes(keys)
        with self._lock:
            self._settle_returns()
            if self._closed or self._clock() > deadline:
                self._counts["lookup_refused" if self._closed else "lookup_expired"] += 1
                return Lease.nothing(self._name, len(keys))
            entries: list[_Entry | None] = []
            for key in wanted:
                slot = self._slots.find(key)
                if slot is not None:
                    self._slots.pin(slot)
                entries.append(None if slot is None else (slot, slot.generation))
            present = np.array([entry is not None for entry in entries], np.bool_)
            found = int(present.sum())
            self._counts["hits"] += found
            self._counts["misses"] += len(entries) - found
            if not found:
                return Lease.nothing(self._name, len(keys))
            self._leases += 1
        receipt = _Receipt(entries)
        return Lease(self._name, present, receipt=receipt, release=lambda: self._returned.append(receipt))

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        count = len(rows)
        if lease.tier != self._name or len(buffers) != count:
            return self._ended("load", count, Code.REFUSED)
        entries = self._pin_rows(lease, rows)
        if entries is None:
            return self._ended("load", count, Code.EXPIRED)

        def body(codes: Codes) -> None:
            try:
                for row, pieces in enumerate(buffers.pieces()):
                    codes[row] = self._each(partial(self._load_one, entries[row], pieces, deadline))
            finally:
                unpin()

        def unpin() -> None:
            with self._lock:
                for slot, _ in filter(None, (entry for entry in entries if not isinstance(entry, Code))):
                    self._slots.unpin(slot)

        return self._start("load", count, body, unpin)

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
        count = len(keys)
        if len(buffers) != count:
            return self._ended("save", count, Code.REFUSED)
        hold = (handoff or next(self._unnamed)) if cls is SaveClass.HANDOFF else None

        def body(codes: Codes) -> None:
            for row, (key, pieces) in enumerate(zip(key_bytes(keys), buffers.pieces(), strict=True)):
                codes[row] = self._each(partial(self._save_one, key, pieces, hold, deadline))

        return self._start("save", count, body)

    def _save_one(self, key: bytes, pieces: list[_Piece], hold: str | int | None, deadline: float) -> Code:
        size = sum(length for _, length in pieces)
        if self._clock() > deadline:
            return Code.EXPIRED
        if not self._slots.fits(size):
            return Code.TOO_LARGE  # H7
        with self._lock:
            self._settle_returns()
            if (held := self._slots.find(key)) is not None:
                self._hold(hold, held)
                return Code.OK  # H2
            slot = self._slots.reserve(size)
        if slot is None:
            return Code.FULL
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
                    self._publish(slot, key, hold)
                self._slots.unpin(slot)
        return Code.OK

    def _publish(self, slot: Slot, key: bytes, hold: str | int | None) -> None:
        other = self._slots.find(key)  # somebody else may have finished the same record meanwhile
        if other is None:
            self._slots.publish(slot, key)
        self._hold(hold, other or slot)

    def _hold(self, hold: str | int | None, slot: Slot) -> None:
        if hold is None:
            return
        handoff = self._handoffs.setdefault(hold, _Handoff(self._clock() + self._handoff_ttl_s, []))
        self._slots.pin(slot)
        handoff.slots.append(slot)

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
                    self._counts["quarantined"] += 1
                    gone.append(entry[0].key)
                    self._slots.drop(entry[0])
        self._tell(gone, "quarantined")

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`."""
        number = next(self._unnamed)
        self._loss_callbacks[number] = callback

        def end() -> None:
            self._loss_callbacks.pop(number, None)

        return end

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; at once.  Handoffs end with it."""
        with self._lock:
            self._settle_returns()
            for handoff in list(self._handoffs):
                self._end_handoff(handoff)
            self._slots.forget()
        return Pending.of(self._clock() <= deadline)

    def _tell(self, names: list[bytes], reason: str) -> None:
        """Say what is lost; outside the lock, since whoever hears it may call back."""
        if names:
            keys: RecordKeys = np.frombuffer(b"".join(names), RECORD_KEY)
            for callback in tuple(self._loss_callbacks.values()):
                try:
                    callback(keys, reason)
                except Exception as error:  # noqa: BLE001 - kept; an operation must still settle (R8)
                    self._fault(error)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """See `Tier.flush`; landed is visible here, and nothing is durable."""
        with self._lock:
            saves = [op for op, verb in self._running.items() if verb == "save"]
        return all_of(saves).map(lambda _: level != "durable" and self._clock() <= deadline)

    def release_handoff(self, lease_id: str) -> None:
        """See `Tier.release_handoff`; early."""
        with self._lock:
            self._end_handoff(lease_id)

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
                "handoffs": len(self._handoffs),
                "operations": len(self._running),
                "evictions": self._slots.evictions,
            }
            counters = dict.fromkeys(("hits", "misses", "save_ok", "load_ok", "quarantined", "faults"), 0)
            return {**gauges, **counters, **self._counts}

    def close(self, deadline: float) -> bool:
        """See `Tier.close`; memory is given back only if nothing can still touch it (C10)."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        try:
            all_of(running).wait(deadline - self._clock())
        except TimeoutError:
            return False  # the operations still own the memory: it lives as long as they do
        with self._lock:
            self._settle_returns()
            self._handoffs.clear()
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
        now = self._clock() if self._handoffs else 0.0
        for name in [name for name, handoff in self._handoffs.items() if handoff.ends <= now]:
            self._end_handoff(name)

    def _end_handoff(self, name: str | int) -> None:
        handoff = self._handoffs.pop(name, None)
        for slot in handoff.slots if handoff else ():
            self._slots.unpin(slot)

    def _each(self, one: Callable[[], Code]) -> Code:
        """One record of a batch: what befalls it befalls no other (H1)."""
        try:
            return one()
        except Exception as error:  # noqa: BLE001 - kept; the record's code says it
            self._fault(error)
            return Code.FAILED

    def _start(
        self,
        verb: str,
        count: int,
        body: Callable[[Codes], None],
        undo: Callable[[], None] = lambda: None,
    ) -> Op:
        """Run an operation in the lane; `undo` stands in for a body that can not run at all."""
        op: Op = Pending()
        with self._lock:
            refused = self._closed
            if not refused:
                self._running[op] = verb
        if not refused:
            try:
                self._lane.submit(lambda: self._finish(verb, op, guarded(count, body, self._fault)))
            except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
                self._fault(error)
            else:
                return op
        undo()
        self._finish(verb, op, np.full(count, Code.REFUSED, np.uint8))
        return op

    def _ended(self, verb: str, count: int, code: Code) -> Op:
        op: Op = Pending()
        self._finish(verb, op, np.full(count, code, np.uint8))
        return op

    def _finish(self, verb: str, op: Op, codes: Codes) -> None:
        with self._lock:
            evicted, self._slots.evicted = self._slots.evicted, []
            self._running.pop(op, None)
            for code, count in enumerate(np.bincount(codes).tolist()):
                if count:
                    self._counts[f"{verb}_{Code(code).name.lower()}"] += count
        self._tell(evicted, "evicted")
        op.settle(codes)

    def _fault(self, error: Exception) -> None:
        with self._lock:
            self.faults.append(error)
            self._counts["faults"] += 1
