"""Segments, slots and sizes of a disk store: what `DiskSlots` keeps account of."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvcontract.tiers.disk_files import Shape

_AHEAD_SHARE: Final = 16
AHEAD_SLOTS: Final = 1024
_AHEAD_BYTES: Final = 256 * 2**20


class Segment:
    """One file of equal slots.

    Attributes:
        number: names the file; never used twice.
        slot_bytes, slots: of each, and how many.
        fd: open file.
        fresh: slots from this number on have never been written.
        records: by slot number, those that can be found.
        pins: of all its slots.
        idle_since: the last touch of any of its records.
        rowed: the index may know it.
    """

    __slots__ = ("fd", "fresh", "idle_since", "number", "pins", "records", "rowed", "slot_bytes", "slots")

    def __init__(self, number: int, slot_bytes: int, slots: int, fd: int, *, rowed: bool = False) -> None:
        self.number, self.slot_bytes, self.slots, self.fd = number, slot_bytes, slots, fd
        self.fresh = 0
        self.records: dict[int, Slot] = {}
        self.pins = 0
        self.idle_since = 0
        self.rowed = rowed

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return self.slot_bytes * self.slots


class Slot:
    """Room for one record, from `take` until it is free again.

    Attributes:
        segment, number: where it lies.
        key: of its record; None while it is written, and once it is forgotten.
        shape: of its record.
        fingerprint: of the record's frame; 16 zero bytes if it has none.
        pins: leases, copies and handoffs that need it as it is.
        touched: when it was last used, in uses of the whole store.
        stamp: `touched`, as the index has it.
        rowed: the durable index may have a row that points here.
    """

    __slots__ = ("fingerprint", "key", "number", "pins", "rowed", "segment", "shape", "stamp", "touched")

    def __init__(self, segment: Segment, number: int, shape: Shape, fingerprint: bytes) -> None:
        self.segment, self.number, self.shape, self.fingerprint = segment, number, shape, fingerprint
        self.key: bytes | None = None
        self.pins = 0
        self.touched = self.stamp = 0
        self.rowed = False

    @property
    def at(self) -> int:
        """Where it begins in the file."""
        return self.number * self.segment.slot_bytes


class SizeClass:
    """Segments of one slot size.

    Attributes:
        segments: in the order they were made.
        free: places that may be written again, the first to become so first: what was written in a row is
            read in a row, and replaced in a row.
        open: segments with places that were never written.
        used: from least to most recently used.
        going: slots that are free after the next commit.
    """

    __slots__ = ("free", "going", "open", "segments", "used")

    def __init__(self) -> None:
        self.segments: dict[Segment, None] = {}
        self.free: deque[tuple[Segment, int]] = deque()
        self.open: list[Segment] = []
        self.used: OrderedDict[bytes, Slot] = OrderedDict()
        self.going = 0

    @property
    def batch(self) -> int:
        """How many records are evicted at a time, so that not each of them waits for a commit of its own."""
        share = sum(segment.slots for segment in self.segments) // _AHEAD_SHARE
        size = next((segment.slot_bytes for segment in self.segments), 1)
        return max(1, min(share, AHEAD_SLOTS, _AHEAD_BYTES // size))

    def place(self) -> tuple[Segment, int] | None:
        """Somewhere to write, taken out of what is free."""
        if self.free or not self.open:
            return self.free.popleft() if self.free else None
        segment = self.open[-1]
        segment.fresh += 1
        if segment.fresh == segment.slots:
            self.open.pop()
        return segment, segment.fresh - 1

    def left(self) -> int:
        """How many places are free."""
        return len(self.free) + sum(segment.slots - segment.fresh for segment in self.open)

    def coldest(self, count: int) -> list[Slot]:
        """So many of the least recently used that nothing pins."""
        return list(islice((slot for slot in self.used.values() if not slot.pins), count))


@dataclass(slots=True)
class Changes:
    """What one commit makes durable.

    Attributes:
        touched: keys whose rows are replaced or deleted.
        stored: keys and slots whose rows are written.
        made: segments that become known.
        given_up: segments whose rows go; their files may be removed afterwards.
        vacated: slots that no row points at any more afterwards.
    """

    touched: list[bytes]
    stored: list[tuple[bytes, Slot]]
    made: list[Segment]
    given_up: list[Segment]
    vacated: list[Slot]

    def __bool__(self) -> bool:
        return bool(self.touched or self.made or self.given_up)
