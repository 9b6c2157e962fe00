"""Which record lies in which slot of which segment file, under one quota; no I/O, no threads.

Segments are files of equal slots, made when first needed.  Records of a size share segments, sizes share the
quota: room is made by evicting the least recently used records of the same size, or by giving up a segment
of another size that has been idle for longer.

What is known here runs ahead of the durable index.  A slot whose row may still exist on disk is not free
when its record goes: it becomes free by the commit that deletes the row (`begin`, then `done` or `failed`),
so that no row ever points at another record's bytes.

Not thread-safe: `DiskStore` calls everything under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum

from kvcontract.contract.errors import InternalFault
from kvcontract.tiers.disk_files import Shape
from kvcontract.tiers.disk_places import AHEAD_SLOTS, Changes, Segment, SizeClass, Slot


class Step(Enum):
    """What to do for room, before asking again."""

    AGAIN = "again"
    GROW = "grow"
    COMMIT = "commit"


class DiskSlots:
    """Records by key in slots of segments.

    Args:
        capacity_bytes: quota; segment files never add up to more.
        segment_bytes: of a segment, unless one slot or what is left of the quota is another size.

    Attributes:
        used_bytes: of the records that can be found.
        allocated_bytes: of all segment files.
        evictions: records that had to go for others.
        evicted: their keys, until somebody takes them out.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes, self.segment_bytes = capacity_bytes, segment_bytes
        self.used_bytes = 0
        self.allocated_bytes = 0
        self.evictions = 0
        self.evicted: list[bytes] = []
        self._classes: dict[int, SizeClass] = {}
        self._index: dict[bytes, Slot] = {}
        self._now = 0
        self._touched_keys: dict[bytes, None] = {}
        self._vacated: list[Slot] = []
        self._made: list[Segment] = []
        self._given_up: list[Segment] = []
        self._leaving: dict[Segment, None] = {}  # given up, the file is still there

    def __len__(self) -> int:
        return len(self._index)

    @property
    def uncommitted(self) -> int:
        """Keys that the next commit is about."""
        return len(self._touched_keys)

    @property
    def short(self) -> bool:
        """Whether a commit would give slots that are free."""
        return any(held.going for held in self._classes.values())

    def segments(self) -> Iterator[Segment]:
        """Every one whose file may be there."""
        for held in self._classes.values():
            yield from held.segments
        yield from self._leaving

    def find(self, key: bytes) -> Slot | None:
        """The slot that holds a record, which thereby counts as used."""
        slot = self._index.get(key)
        if slot is not None:
            self._touch(slot)
            self._classes[slot.segment.slot_bytes].used.move_to_end(key)
        return slot

    def fits(self, slot_bytes: int) -> bool:
        """Whether a slot could ever be had."""
        return slot_bytes <= self.capacity_bytes

    # Room

    def take(self, shape: Shape, fingerprint: bytes) -> Slot | None:
        """A free slot to write a record into, pinned once; None without one.

        End it with `publish` or without, and with `unpin` in both cases.
        """
        held = self._classes.get(shape.slot_bytes)
        place = held.place() if held is not None else None
        if held is None or place is None:
            return None
        slot = Slot(*place, shape, fingerprint)
        self.pin(slot)
        self._look_ahead(held)
        return slot

    def _look_ahead(self, held: SizeClass) -> None:
        """Evict before the last free slot is taken, so that writers need not wait for the commit."""
        if held.going or held.left() >= AHEAD_SLOTS:
            return
        batch = held.batch
        if held.left() < batch - 1 and not self.growth(next(iter(held.segments)).slot_bytes):
            for slot in held.coldest(batch):
                self._evict(slot)

    def room(self, slot_bytes: int, *, grow: bool) -> Step | None:
        """What gives a slot of this size, after evicting if need be; None if nothing may be evicted.

        Args:
            slot_bytes: of the slot.
            grow: whether a new segment may be made.
        """
        if grow and self.growth(slot_bytes):
            return Step.GROW
        mine = self._classes.setdefault(slot_bytes, SizeClass())
        if mine.going or self._given_up:
            return Step.COMMIT
        own = next(iter(mine.coldest(1)), None)
        others = (segment for segment in self._idle() if segment.slot_bytes != slot_bytes)
        coldest = min(others, key=lambda item: item.idle_since, default=None)
        if coldest is not None and (own is None or coldest.idle_since < own.touched):
            self.give_up(coldest)
            return Step.COMMIT
        if own is None:
            return None
        for slot in mine.coldest(mine.batch):
            self._evict(slot)
        return Step.COMMIT if mine.going else Step.AGAIN

    def growth(self, slot_bytes: int) -> int:
        """How many slots a new segment would have; 0 if the quota has no room for one."""
        left = self.capacity_bytes - self.allocated_bytes
        return max(0, min(max(1, self.segment_bytes // slot_bytes), left // slot_bytes))

    def add(self, segment: Segment) -> None:
        """Take a segment in whose file is there."""
        held = self._classes.setdefault(segment.slot_bytes, SizeClass())
        held.segments[segment] = None
        if segment.fresh < segment.slots:
            held.open.append(segment)
        self.allocated_bytes += segment.file_bytes
        if not segment.rowed:
            self._made.append(segment)

    def give_up(self, segment: Segment) -> None:
        """Evict all of a segment; its file may be removed after the next commit."""
        for slot in list(segment.records.values()):
            self._evict(slot)
        held = self._classes[segment.slot_bytes]
        del held.segments[segment]
        held.free = deque(place for place in held.free if place[0] is not segment)
        held.open = [item for item in held.open if item is not segment]
        self._leaving[segment] = None
        self._given_up.append(segment)

    def removed(self, segment: Segment) -> None:
        """The file of a segment that was given up is gone."""
        del self._leaving[segment]
        self.allocated_bytes -= segment.file_bytes

    def shrink(self) -> None:
        """Give up the longest idle segments until what is left fits the quota."""
        over = self.allocated_bytes - self.capacity_bytes
        for segment in sorted(self._idle(), key=lambda item: item.idle_since):
            if over <= 0:
                break
            over -= segment.file_bytes
            self.give_up(segment)

    # Records

    def publish(self, slot: Slot, key: bytes) -> None:
        """Make a taken slot findable; its bytes are complete (R3)."""
        self._enter(slot, key)
        self._touched_keys[key] = None

    def adopt(self, slot: Slot, key: bytes, stamp: int) -> None:
        """Take in a record that the index knows, in the order of their stamps; `adopted` ends it."""
        slot.rowed = True
        self._now = max(self._now, stamp - 1)
        self._enter(slot, key)
        slot.stamp = stamp

    def adopted(self) -> None:
        """Every record is taken in: what none of them lies in is free."""
        for held in self._classes.values():
            for segment in held.segments:
                segment.fresh = max(segment.records, default=-1) + 1
                numbers = range(segment.fresh)
                held.free += [(segment, number) for number in numbers if number not in segment.records]
            held.open = [segment for segment in held.segments if segment.fresh < segment.slots]

    def _enter(self, slot: Slot, key: bytes) -> None:
        if key in self._index:
            raise InternalFault("a record was published under a key that is taken")
        slot.key = key
        self._index[key] = slot
        self._classes[slot.segment.slot_bytes].used[key] = slot
        slot.segment.records[slot.number] = slot
        self.used_bytes += slot.shape.record_bytes
        self._touch(slot)

    def pin(self, slot: Slot) -> None:
        """Keep a slot as it is until a matching `unpin`."""
        slot.pins += 1
        slot.segment.pins += 1

    def unpin(self, slot: Slot) -> None:
        """Undo one `pin`; a slot without a findable record is then free, or is so after the next commit."""
        if slot.pins < 1:
            raise InternalFault("a slot was unpinned more often than pinned")
        slot.pins -= 1
        slot.segment.pins -= 1
        if not slot.pins and slot.key is None:
            self._free(slot)

    def drop(self, slot: Slot) -> None:
        """Forget a slot's record."""
        key = slot.key
        if key is None:
            return
        del self._index[key]
        del self._classes[slot.segment.slot_bytes].used[key]
        del slot.segment.records[slot.number]
        self.used_bytes -= slot.shape.record_bytes
        slot.key = None
        self._touched_keys[key] = None
        if slot.rowed:
            self._vacated.append(slot)
        if not slot.pins:
            self._free(slot)

    def forget(self) -> None:
        """Forget every record."""
        for slot in list(self._index.values()):
            self.drop(slot)

    # Commits

    def begin(self, *, stamps: bool = False) -> Changes:
        """What there is to commit; from now on those rows may exist.

        Args:
            stamps: also records that were only used since the index was told of them.
        """
        if stamps:
            used = (key for key, slot in self._index.items() if slot.touched != slot.stamp)
            self._touched_keys.update(dict.fromkeys(used))
        keys, self._touched_keys = list(self._touched_keys), {}
        stored = [(key, slot) for key in keys if (slot := self._index.get(key)) is not None]
        changes = Changes(keys, stored, self._made, self._given_up, self._vacated)
        self._made, self._given_up, self._vacated = [], [], []
        for _, slot in stored:
            slot.rowed = True
        for segment in changes.made:
            segment.rowed = True
        return changes

    def everything(self) -> Changes:
        """What an index has to be told that knows nothing; ends what was to commit."""
        changes = self.begin()
        changes.stored = list(self._index.items())
        changes.touched = list(dict.fromkeys([*changes.touched, *self._index]))
        changes.made = [segment for held in self._classes.values() for segment in held.segments]
        for _, slot in changes.stored:
            slot.rowed = True
        return changes

    def done(self, changes: Changes) -> None:
        """The changes are durable."""
        for slot in changes.vacated:
            slot.rowed = False
            if not slot.pins:
                self._classes[slot.segment.slot_bytes].going -= 1
                self._free(slot)

    def failed(self, changes: Changes) -> None:
        """The changes may or may not be durable: all of them are to commit again."""
        self._touched_keys = dict.fromkeys([*changes.touched, *self._touched_keys])
        self._made = changes.made + self._made
        self._given_up = changes.given_up + self._given_up
        self._vacated = changes.vacated + self._vacated

    def lose(self, changes: Changes, segment: Segment) -> list[bytes]:
        """Forget what a commit was about to name in a segment; returns the keys."""
        lost = [(key, slot) for key, slot in changes.stored if slot.segment is segment]
        gone = {key for key, _ in lost}
        changes.stored = [(key, slot) for key, slot in changes.stored if key not in gone]
        for _, slot in lost:
            self.drop(slot)
        return list(gone)

    def _idle(self) -> Iterator[Segment]:
        for held in self._classes.values():
            yield from (segment for segment in held.segments if not segment.pins)

    def _evict(self, slot: Slot) -> None:
        if slot.key is not None:
            self.evicted.append(slot.key)
        self.evictions += 1
        self.drop(slot)

    def _free(self, slot: Slot) -> None:
        held = self._classes[slot.segment.slot_bytes]
        if slot.rowed:
            held.going += 1
        elif slot.segment in held.segments:  # else it was given up
            held.free.append((slot.segment, slot.number))

    def _touch(self, slot: Slot) -> None:
        self._now += 1
        slot.touched = slot.segment.idle_since = self._now
