"""Records on one disk: durable, bounded, found again after a crash; synchronous and thread-safe.

What makes it safe to be killed, or to lose power, at any moment:

1. a record is findable once all its bytes are written;
2. a commit syncs the segment files first and writes the rows of what it synced second;
3. a slot is written again only after the commit that took its row away;
4. a file is removed only after the commit that took its segment away.

So a row points at the record it names, or at nothing; and what a disk changed on its own shows in the
record's front, its frame and its row.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvcontract.pool.keys import FleetSecret
from kvcontract.tiers.base import Code
from kvcontract.tiers.disk_files import FULL_ERRNOS, Files, Piece, RecordIo, Shape, direct_alignment
from kvcontract.tiers.disk_home import SECRET, Home, segment_path, survey
from kvcontract.tiers.disk_index import Contents, DiskIndex, SegmentRow, broken
from kvcontract.tiers.disk_places import Changes, Segment, Slot
from kvcontract.tiers.disk_slots import DiskSlots, Step
from kvcontract.tiers.frame import FINGERPRINT_BYTES
from kvcontract.tiers.frame import MAGIC as FRAME_MAGIC

_FINGERPRINT_AT: Final = 16
_NO_FINGERPRINT: Final = bytes(FINGERPRINT_BYTES)


class DiskStore:
    """Records by key in a directory that this process owns.

    Args:
        home: the directory; left by `close`, or if this fails.
        files: the seam.
        capacity_bytes: quota of the segment files.
        direct: use direct I/O; None: where the file system can, with a warning where it cannot.
        on_fault: told of what went wrong and was dealt with here.

    Raises:
        OSError, sqlite3.Error: the disk cannot be used.
    """

    def __init__(
        self,
        home: Home,
        files: Files,
        capacity_bytes: int,
        *,
        direct: bool | None,
        on_fault: Callable[[Exception], object],
    ) -> None:
        self.home = home
        self._files = files
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._commit_gate = threading.Lock()
        self._room_gate = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._lost: list[bytes] = []
        self._slots = DiskSlots(capacity_bytes, home.label.segment_bytes)
        try:
            align = None if direct is False else direct_alignment(files, home.segments)
            self._index = DiskIndex(home.path, files, capacity_bytes)
        except BaseException:
            home.leave()
            raise
        if align is None and direct is not False:
            warnings.warn(
                f"{home.path}: the file system refuses direct I/O; records go through the page cache",
                RuntimeWarning,
                stacklevel=3,
            )
        self.direct = align is not None
        self._io = RecordIo(files, align)
        try:
            self._next_segment = self._adopt(self._index.read())
            with self._lock:
                self._slots.shrink()
            self._commit(always=True)
        except BaseException:
            self._end()
            raise

    # What was there

    def _adopt(self, contents: Contents) -> int:
        """Take in what the index knows and the directory has; returns the number of the next segment."""
        found = survey(self.home.path).segments
        segments: dict[int, Segment] = {}
        for row in contents.segments:
            if (segment := self._opened(row, found.get(row.number))) is not None:
                segments[row.number] = segment
                self._slots.add(segment)
        taken: set[tuple[int, int]] = set()
        gone, missing = contents.damaged, len(segments) < len(contents.segments)
        for record in contents.records:
            place, home = (record.segment, record.slot), segments.get(record.segment)
            shape = Shape.make(record.record_bytes, record.head_bytes)
            if home is None or place in taken or not _holds(home, record.slot, shape):
                gone += 1
                continue
            taken.add(place)
            self._slots.adopt(Slot(home, record.slot, shape, record.fingerprint), record.key, record.stamp)
        self._slots.adopted()
        self._counts["rows_dropped"] += gone
        self._counts["index_lost"] += int(self._index.lost)
        if gone or missing:  # a damaged row may not even be deleted by its key
            self._rewrite()
        for number in sorted(found.keys() - segments.keys()):
            self._files.remove(segment_path(self.home.path, number))
            self._counts["orphans_removed"] += 1
        return max([0, *found, *(row.number for row in contents.segments)]) + 1

    def _opened(self, row: SegmentRow, size_bytes: int | None) -> Segment | None:
        if size_bytes != row.slot_bytes * row.slots or not size_bytes:
            return None  # cut, grown or gone: none of its rows can be believed
        try:
            fd = self._files.open(segment_path(self.home.path, row.number), direct=self.direct)
        except OSError as error:
            self._on_fault(error)
            return None
        return Segment(row.number, row.slot_bytes, row.slots, fd, rowed=True)

    # Records

    def find(self, keys: Iterable[bytes]) -> list[Slot | None]:
        """The slots of records, each pinned once; None where there is none."""
        with self._lock:
            found = [self._slots.find(key) for key in keys]
            for slot in found:
                if slot is not None:
                    self._slots.pin(slot)
        return found

    def pin(self, slots: Iterable[Slot]) -> None:
        """Keep slots as they are, once more."""
        with self._lock:
            for slot in slots:
                self._slots.pin(slot)

    def unpin(self, slots: Iterable[Slot]) -> None:
        """Undo one pin of each."""
        with self._lock:
            for slot in slots:
                self._slots.unpin(slot)

    def put(self, key: bytes, pieces: Sequence[Piece], *, pinned: bool) -> Slot | Code:
        """Write a record, unless it is there; findable on return, durable after a later `commit`.

        Args:
            key: of the record.
            pieces: where its bytes are.
            pinned: whether its slot is to be pinned on return.

        Returns:
            Its slot; or TOO_LARGE, or FULL.

        Raises:
            OSError, sqlite3.Error: it is absent.
        """
        shape = Shape.of(pieces)
        if not self._slots.fits(shape.slot_bytes):
            return Code.TOO_LARGE  # H7
        fingerprint = _fingerprint(pieces)
        with self._lock:
            if (held := self._slots.find(key)) is not None:
                self._pin_if(held, pinned=pinned)
                return held  # H2
            slot = self._slots.take(shape, fingerprint)
        try:
            slot = slot or self._make_room(shape, fingerprint)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_FULL:
                raise
            return self._full(error)
        if slot is None:
            return Code.FULL
        try:
            self._io.write(slot.segment.fd, slot.at, key, pieces, shape)
        except OSError as error:
            self.unpin([slot])
            if error.errno in FULL_ERRNOS:
                return self._full(error)
            raise
        except BaseException:
            self.unpin([slot])
            raise
        with self._lock:
            stored = self._slots.find(key)  # somebody else may have finished the same record meanwhile
            if stored is None:
                self._slots.publish(slot, key)
                stored = slot
            self._pin_if(stored, pinned=pinned)
            self._slots.unpin(slot)
        return stored

    def _pin_if(self, slot: Slot, *, pinned: bool) -> None:
        if pinned:
            self._slots.pin(slot)

    def get(self, slot: Slot, key: bytes, pieces: Sequence[Piece]) -> Code:
        """Read the record of a pinned slot; one that is damaged is forgotten (H3)."""
        if sum(size for _, size in pieces) != slot.shape.record_bytes:
            return Code.SHORT
        try:
            flaw = self._io.read(slot.segment.fd, slot.at, key, pieces, slot.shape)
        except OSError as error:
            self._on_fault(error)
            self.drop([slot], "unreadable")
            return Code.FAILED
        if flaw is not None:
            self.drop([slot], f"flaw_{flaw.value}")
            return Code.CORRUPT
        return Code.OK

    def drop(self, slots: Iterable[Slot], reason: str) -> None:
        """Forget records, unless they were forgotten before; counted by reason."""
        with self._lock:
            for slot in slots:
                if slot.key is not None:
                    self._lost.append(slot.key)
                    self._counts["quarantined"] += 1
                    self._counts[reason] += 1
                    self._slots.drop(slot)

    def forget(self) -> None:
        """Forget every record; for good after the next `commit`."""
        with self._lock:
            self._slots.forget()

    def take_losses(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that were evicted, and that were quarantined, since the last call."""
        with self._lock:
            evicted, self._slots.evicted = self._slots.evicted, []
            lost, self._lost = self._lost, []
        return evicted, lost

    # Room

    def _make_room(self, shape: Shape, fingerprint: bytes) -> Slot | None:
        """A free slot, pinned once; None if there is none to be had."""
        grow = True
        with self._room_gate:  # one at a time makes room, for all who wait
            while True:
                with self._lock:
                    if (slot := self._slots.take(shape, fingerprint)) is not None:
                        return slot
                    step = self._slots.room(shape.slot_bytes, grow=grow)
                if step is None:
                    return None
                if step is Step.GROW:
                    grow = self._grow(shape.slot_bytes)
                elif step is Step.COMMIT:
                    self.commit()
                    grow = True

    def _grow(self, slot_bytes: int) -> bool:
        """Make a segment; False if the disk has no room for it."""
        with self._lock:
            slots = self._slots.growth(slot_bytes)
        number, self._next_segment = self._next_segment, self._next_segment + 1
        path = segment_path(self.home.path, number)
        try:
            self._files.create(path, slots * slot_bytes)
            fd = self._files.open(path, direct=self.direct)
        except OSError as error:
            with suppress(FileNotFoundError):
                self._files.remove(path)
            if error.errno in FULL_ERRNOS:
                self._full(error)
                return False
            raise
        with self._lock:
            self._slots.add(Segment(number, slot_bytes, slots, fd))
        return True

    def _full(self, error: Exception) -> Code:
        self._on_fault(error)
        with self._lock:
            self._counts["disk_full"] += 1
        return Code.FULL

    # Commits

    @property
    def uncommitted(self) -> int:
        """Records and losses that a crash would undo."""
        return self._slots.uncommitted

    @property
    def short(self) -> bool:
        """Whether writers will soon wait for a commit."""
        with self._lock:
            return self._slots.short

    @property
    def sync_losses(self) -> int:
        """Records that were findable and could not be made durable."""
        return self._counts["sync_failed"]

    def commit(self) -> bool:
        """Make durable all that is findable and all that was forgotten; False if a part was lost instead.

        Raises:
            sqlite3.Error, OSError: nothing is known to be durable; the next commit tries again.
        """
        return self._commit(always=False)

    def _commit(self, *, always: bool) -> bool:
        """Commit; `always`: also if there is only the quota to note, and the order of use."""
        with self._commit_gate:
            with self._lock:
                changes = self._slots.begin(stamps=always)
            if not changes and not always:
                return True
            try:
                whole = self._sync(changes)
                self._index.apply(changes)
            except BaseException as error:
                with self._lock:
                    self._slots.failed(changes)
                if not isinstance(error, Exception) or not broken(error):
                    raise
                self._on_fault(error)
                return self._rewrite() and whole
            self._settle(changes)
            return whole

    def _sync(self, changes: Changes) -> bool:
        """Sync what is about to be named; False if a segment could not be.

        A sync that failed is not tried again: the system tells of lost bytes once, and would say all is well.
        """
        whole = True
        for segment in dict.fromkeys(slot.segment for _, slot in changes.stored):
            try:
                self._files.sync(segment.fd)
            except OSError as error:
                self._on_fault(error)
                whole = False
                with self._lock:
                    lost = self._slots.lose(changes, segment)
                    self._counts["sync_failed"] += len(lost)
                    self._lost += lost
        return whole

    def _rewrite(self) -> bool:
        """Write the index anew from what is in memory, in the place of a damaged one."""
        with self._lock:
            every = self._slots.everything()
            self._counts["index_rewritten"] += 1
        try:
            whole = self._sync(every)
            self._index.restart()
            self._index.apply(every)
        except BaseException:
            with self._lock:
                self._slots.failed(every)
            raise
        self._settle(every)
        return whole

    def _settle(self, changes: Changes) -> None:
        with self._lock:
            self._slots.done(changes)
        for segment in changes.given_up:
            os.close(segment.fd)
            try:
                self._files.remove(segment_path(self.home.path, segment.number))
            except OSError as error:  # it goes on counting; the next start sweeps it
                self._on_fault(error)
                continue
            with self._lock:
                self._slots.removed(segment)

    # The whole

    def secret(self, create: bool | FleetSecret) -> FleetSecret | None:
        """The fleet's secret that is kept with the store; None: there is none, and none is to be made."""
        path = self.home.path / SECRET
        return FleetSecret.of_file(path, create=create) if create or path.exists() else None

    def figures(self) -> dict[str, int]:
        """Gauges and counters."""
        with self._lock:
            return {
                "capacity_bytes": self._slots.capacity_bytes,
                "allocated_bytes": self._slots.allocated_bytes,
                "used_bytes": self._slots.used_bytes,
                "records": len(self._slots),
                "uncommitted": self._slots.uncommitted,
                "evictions": self._slots.evictions,
                "direct_io": int(self.direct),
                "foreign_files": len(self.home.foreign),
                **dict.fromkeys(("quarantined", "rows_dropped", "orphans_removed", "disk_full"), 0),
                **self._counts,
            }

    @property
    def max_record_bytes(self) -> int:
        """Of a record whose first piece is a header of ordinary size."""
        return Shape.most_bytes(self._slots.capacity_bytes)

    def close(self) -> bool:
        """Commit and end; nobody reads or writes any more.  False if not all is durable."""
        whole = False
        try:
            whole = self._commit(always=True)
        except (OSError, sqlite3.Error) as error:
            self._on_fault(error)
        finally:
            self._end()
        return whole

    def _end(self) -> None:
        try:
            self._index.close()
        except sqlite3.Error as error:
            self._on_fault(error)
        finally:
            with self._lock:
                for segment in self._slots.segments():
                    os.close(segment.fd)
            self.home.leave()


def _holds(segment: Segment, slot: int, shape: Shape) -> bool:
    return 0 <= slot < segment.slots and shape.slot_bytes == segment.slot_bytes


def _fingerprint(pieces: Sequence[Piece]) -> bytes:
    """Of a framed record; it says for which model a record is, and decides nothing."""
    if not pieces or pieces[0][1] < _FINGERPRINT_AT + FINGERPRINT_BYTES:
        return _NO_FINGERPRINT
    begin = ctypes.string_at(pieces[0][0], _FINGERPRINT_AT + FINGERPRINT_BYTES)
    return begin[_FINGERPRINT_AT:] if begin.startswith(FRAME_MAGIC) else _NO_FINGERPRINT
