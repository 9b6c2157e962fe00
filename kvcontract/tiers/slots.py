"""Slots of memory under one quota: records of a size share slots, sizes share the quota.

Memory comes in chunks of equal slots, allocated when first needed.  When the quota is spent, room is made by
evicting the least recently used record of the same size, or, if all of another size's chunk has been idle
for longer than that, by giving the whole chunk back.  A pinned slot is neither evicted nor reused, and every
reuse of a slot has another generation, so that a late reader can tell.

Not thread-safe: `DramTier` calls everything under its lock.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault
from kvcontract.contract.layout import round_up
from kvcontract.memory.slab import Allocate

SLOT_ALIGN_BYTES: Final = 64
_CHUNKS: Final = 256


def anonymous_memory(size_bytes: int) -> mmap.mmap:
    """Page-aligned memory of the process, given to it by the system only where it is touched."""
    return mmap.mmap(-1, size_bytes)


class _Chunk:
    """A piece of the quota, cut into slots; `idle_since` is the last touch of any of them."""

    __slots__ = ("idle_since", "memory", "pins", "slots")

    def __init__(self, memory: NDArray[np.uint8], slot_bytes: int) -> None:
        self.memory = memory
        self.pins = 0
        self.idle_since = 0
        base = memory.ctypes.data
        self.slots = [Slot(self, base + at, slot_bytes) for at in range(0, memory.nbytes, slot_bytes)]


class Slot:
    """Room for one record.

    Attributes:
        address: where its bytes begin.
        slot_bytes: room.
        record_bytes: of the record it holds.
        key: of that record; None while it is free, written, or forgotten.
        generation: raised each time it becomes free.
        pins: leases, copies and handoffs that need it as it is.
        chunk: what it is cut from.
        touched: when it was last used, in uses of the whole store.
    """

    __slots__ = ("address", "chunk", "generation", "key", "pins", "record_bytes", "slot_bytes", "touched")

    def __init__(self, chunk: _Chunk, address: int, slot_bytes: int) -> None:
        self.chunk = chunk
        self.touched = 0
        self.address = address
        self.slot_bytes = slot_bytes
        self.record_bytes = 0
        self.key: bytes | None = None
        self.generation = 0
        self.pins = 0


class _SizeClass:
    """All slots of one size: `used` from least to most recently used."""

    __slots__ = ("chunks", "free", "used")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.free: list[Slot] = []
        self.used: OrderedDict[bytes, Slot] = OrderedDict()


class Slots:
    """Records by key in slots of memory.

    Args:
        capacity_bytes: quota; what is allocated never exceeds it.
        allocate: where chunks come from; may raise, which leaves everything as it was.

    Attributes:
        used_bytes: of the records that can be found.
        allocated_bytes: of all chunks.
        evictions: records that had to go for others.
        evicted: their keys, until somebody takes them out.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocate | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.allocated_bytes = 0
        self.evictions = 0
        self.evicted: list[bytes] = []
        self._allocate = allocate or anonymous_memory
        self._classes: dict[int, _SizeClass] = {}
        self._index: dict[bytes, Slot] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._index)

    def find(self, key: bytes) -> Slot | None:
        """The slot that holds a record, which thereby counts as used."""
        slot = self._index.get(key)
        if slot is not None:
            self._touch(slot)
            self._classes[slot.slot_bytes].used.move_to_end(key)
        return slot

    def fits(self, record_bytes: int) -> bool:
        """Whether a record could ever be held."""
        return _slot_bytes(record_bytes) <= self.capacity_bytes

    def reserve(self, record_bytes: int) -> Slot | None:
        """A slot to write a record into, pinned once; None if nothing may be evicted for it.

        End it with `publish` or without, and with `unpin` in both cases.
        """
        size = _slot_bytes(record_bytes)
        mine = self._classes.setdefault(size, _SizeClass())
        if not mine.free and not self._grow(size, mine) and not self._make_room(size, mine):
            return None
        slot = mine.free.pop()
        slot.record_bytes = record_bytes
        self.pin(slot)
        return slot

    def publish(self, slot: Slot, key: bytes) -> None:
        """Make a reserved slot findable; its bytes are complete (R3)."""
        if key in self._index:
            raise InternalFault("a record was published under a key that is taken")
        slot.key = key
        self._index[key] = slot
        self._classes[slot.slot_bytes].used[key] = slot
        self.used_bytes += slot.record_bytes
        self._touch(slot)

    def pin(self, slot: Slot) -> None:
        """Keep a slot as it is until a matching `unpin`."""
        slot.pins += 1
        slot.chunk.pins += 1

    def unpin(self, slot: Slot) -> None:
        """Undo one `pin`; a slot without a findable record is then free."""
        if slot.pins < 1:
            raise InternalFault("a slot was unpinned more often than pinned")
        slot.pins -= 1
        slot.chunk.pins -= 1
        if not slot.pins and slot.key is None:
            self._free(slot)

    def drop(self, slot: Slot) -> None:
        """Forget a slot's record; the slot is free once nothing pins it."""
        if slot.key is None:
            return
        del self._index[slot.key]
        del self._classes[slot.slot_bytes].used[slot.key]
        self.used_bytes -= slot.record_bytes
        slot.key = None
        if not slot.pins:
            self._free(slot)

    def forget(self) -> None:
        """Forget every record; a slot that is pinned stays as it is until it is unpinned."""
        for slot in list(self._index.values()):
            self.drop(slot)

    def clear(self) -> None:
        """Forget everything and give the memory back, once nobody reads or writes it any more."""
        for slot in self._index.values():
            slot.key = None
        self._index.clear()
        self._classes.clear()
        self.used_bytes = self.allocated_bytes = 0

    def _touch(self, slot: Slot) -> None:
        self._now += 1
        slot.touched = slot.chunk.idle_since = self._now

    def _free(self, slot: Slot) -> None:
        slot.generation += 1
        held = self._classes.get(slot.slot_bytes)
        if (
            held is not None
        ):  # else it was cleared under a pin, and its memory is gone with the last reference
            held.free.append(slot)

    def _grow(self, size: int, mine: _SizeClass) -> bool:
        """Add a chunk to a size class; False if the quota has no room for a slot."""
        left = self.capacity_bytes - self.allocated_bytes
        count = min(max(1, self.capacity_bytes // _CHUNKS // size), left // size)
        if count < 1:
            return False
        memory = np.frombuffer(self._allocate(count * size), np.uint8, count * size)
        chunk = _Chunk(memory, size)
        mine.chunks.append(chunk)
        mine.free.extend(reversed(chunk.slots))
        self.allocated_bytes += memory.nbytes
        return True

    def _make_room(self, size: int, mine: _SizeClass) -> bool:
        """Evict until `mine` has a free slot; False if pins do not allow it."""
        while True:
            own = next((slot for slot in mine.used.values() if not slot.pins), None)
            coldest = min(self._idle_chunks(size), key=lambda item: item[1].idle_since, default=None)
            if coldest is not None and (own is None or coldest[1].idle_since < own.touched):
                self._give_back(*coldest)
                if self._grow(size, mine):
                    return True
            elif own is not None:
                self._evict(own)
                return True
            else:
                return False

    def _evict(self, slot: Slot) -> None:
        if slot.key is not None:
            self.evicted.append(slot.key)
        self.evictions += 1
        self.drop(slot)

    def _idle_chunks(self, but_size: int) -> Iterator[tuple[_SizeClass, _Chunk]]:
        for size, held in self._classes.items():
            if size != but_size:
                yield from ((held, chunk) for chunk in held.chunks if not chunk.pins)

    def _give_back(self, held: _SizeClass, chunk: _Chunk) -> None:
        for slot in chunk.slots:
            if slot.key is not None:
                self._evict(slot)
        gone = set(chunk.slots)
        held.free = [slot for slot in held.free if slot not in gone]
        held.chunks.remove(chunk)
        self.allocated_bytes -= chunk.memory.nbytes


def _slot_bytes(record_bytes: int) -> int:
    return round_up(max(1, record_bytes), SLOT_ALIGN_BYTES)
