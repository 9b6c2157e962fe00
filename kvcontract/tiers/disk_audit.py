"""A disk store seen from outside, for whoever operates it: what is in it, whether it is whole, what may go.

Reading needs no lock: the owner may be at work, so what is read may be stale, but is never wrong.  A record
that does not check out is looked up again: only one whose row still says the same is damaged, since a slot is
not written anew while a row points at it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcontract.contract.errors import EnvironmentFault, UsageFault
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import RECORD_KEY
from kvcontract.tiers.disk_files import FORMAT, Files, RecordIo, Shape
from kvcontract.tiers.disk_home import (
    KIND,
    Label,
    Owner,
    Survey,
    enter,
    read_label,
    read_owner,
    segment_path,
    survey,
)
from kvcontract.tiers.disk_index import Contents, RecordRow, read_index, still_there
from kvcontract.tiers.disk_store import DiskStore
from kvcontract.tiers.frame import FINGERPRINT_BYTES, Flaw, FrameHeader, decode

Progress = Callable[[int, int], object]
"""Told of records done, and of all."""

_NO_FINGERPRINT = bytes(FINGERPRINT_BYTES)


@dataclass(frozen=True, slots=True)
class Inventory:
    """A store at one moment.

    Attributes:
        path: of the directory.
        label: what it says of itself.
        owner: who has it open, or did not close it.
        contents: what its index holds.
        files: what its directory holds.
    """

    path: Path
    label: Label
    owner: Owner | None
    contents: Contents
    files: Survey


@dataclass(slots=True)
class Verdict:
    """What `verify` found.

    Attributes:
        records: that were read.
        record_bytes: of them.
        moved: that their owner evicted while they were read.
        unframed: without a frame, of which only the place could be checked.
        damaged: keys and what is wrong with them.
        rows_damaged: of the index.
    """

    records: int = 0
    record_bytes: int = 0
    moved: int = 0
    unframed: int = 0
    damaged: list[tuple[bytes, str]] = field(default_factory=list)
    rows_damaged: int = 0

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged and not self.rows_damaged


def inventory(path: Path) -> Inventory:
    """Look at a store.

    Raises:
        UsageFault: the directory holds no store that this version reads.
        EnvironmentFault: its index cannot be read.
    """
    label = _label(path)
    with _readable(path):
        contents = read_index(path)
    return Inventory(path, label, read_owner(path), contents, survey(path))


def groups(found: Inventory) -> list[dict[str, Any]]:
    """Records by what they hold: fingerprint, part and shard, with their number and bytes."""
    counts: Counter[tuple[bytes, int, int, int]] = Counter()
    sizes: Counter[tuple[bytes, int, int, int]] = Counter()
    for row in found.contents.records:
        key = np.frombuffer(row.key, RECORD_KEY)[0]
        group = (row.fingerprint, int(key["part"]), int(key["shard"]), int(key["shards"]))
        counts[group] += 1
        sizes[group] += row.record_bytes
    return [
        {
            "fingerprint": "" if group[0] == _NO_FINGERPRINT else group[0].hex(),
            "part": group[1],
            "shard": group[2],
            "shards": group[3],
            "records": count,
            "record_bytes": sizes[group],
        }
        for group, count in sorted(counts.items())
    ]


def usage(found: Inventory) -> dict[str, int]:
    """Bytes by what they are for; the first four add up to the segment files."""
    records = found.contents.records
    record_bytes = sum(row.record_bytes for row in records)
    slot_bytes = sum(Shape.make(row.record_bytes, row.head_bytes).slot_bytes for row in records)
    known = {row.number: row.slot_bytes * row.slots for row in found.contents.segments}
    files = found.files.segments
    orphan_bytes = sum(size for number, size in files.items() if number not in known)
    segment_bytes = sum(files.values())
    capacity = found.contents.facts.get("capacity_bytes", 0)
    return {
        "record_bytes": record_bytes,
        "padding_bytes": slot_bytes - record_bytes,
        "free_slot_bytes": segment_bytes - orphan_bytes - slot_bytes,
        "orphan_bytes": orphan_bytes,
        "segment_bytes": segment_bytes,
        "index_bytes": found.files.other_bytes,
        "capacity_bytes": capacity,
        "free_bytes": max(0, capacity - slot_bytes - orphan_bytes),
        "disk_free_bytes": shutil.disk_usage(found.path).free,
    }


def verify(path: Path, progress: Progress) -> Verdict:
    """Read every record: its place, its frame, and every segment of its payload.

    Raises:
        UsageFault: the directory holds no store that this version reads.
        EnvironmentFault: its index cannot be read.
    """
    found = inventory(path)
    verdict = Verdict(rows_damaged=found.contents.damaged)
    records = sorted(found.contents.records, key=lambda row: (row.segment, row.slot))
    io, fd, number = RecordIo(Files(), None), -1, -1
    try:
        for done, row in enumerate(records):
            progress(done, len(records))
            if row.segment != number:
                fd, number = _next(path, row.segment, fd), row.segment
            flaw = _flaw(io, fd, row)
            verdict.records += 1
            verdict.record_bytes += row.record_bytes
            verdict.unframed += row.fingerprint == _NO_FINGERPRINT
            if flaw is None:
                continue
            with _readable(path):
                there = still_there(path, row)
            if there:
                verdict.damaged.append((row.key, flaw))
            else:
                verdict.moved += 1
    finally:
        if fd >= 0:
            os.close(fd)
    progress(len(records), len(records))
    return verdict


def collect(path: Path, progress: Progress) -> tuple[Verdict, dict[str, int]]:
    """Remove what is damaged or belongs to nothing, and bring the index in order; needs the lock.

    Returns:
        What was wrong, and the figures of the store afterwards.

    Raises:
        UsageFault: the directory holds no store that this version reads, or its owner has it open.
        EnvironmentFault: the disk cannot be used.
    """
    label = _label(path)
    files, faults = Files(), list[Exception]()
    home = enter(path, files, segment_bytes=None, default_bytes=0, meta=label.meta, fresh=False)
    try:
        # The owner's quota, or what is there: tidying up evicts nothing.
        quota = max(_facts(path).get("capacity_bytes", 0), sum(survey(path).segments.values()))
        store = DiskStore(home, files, quota, direct=False, on_fault=faults.append)
    except (OSError, sqlite3.Error) as error:
        raise EnvironmentFault(f"{path} cannot be opened: {error}") from error
    try:
        verdict = verify(path, progress)
        slots = store.find(key for key, _ in verdict.damaged)
        held = [slot for slot in slots if slot is not None]
        store.drop(held, "collected")
        store.unpin(held)
    finally:
        whole = store.close()
    if not whole:
        raise EnvironmentFault(f"{path} could not be written: {faults}")
    return verdict, store.figures()


def _facts(path: Path) -> dict[str, int]:
    try:
        return read_index(path).facts
    except (sqlite3.Error, UnicodeDecodeError):
        return {}  # the index is begun anew, and everything in it gone


def _label(path: Path) -> Label:
    label = read_label(path) if path.is_dir() else None
    if label is None:
        raise UsageFault(f"{path} is no {KIND}: it has no store.json")
    if label.format != FORMAT:
        raise UsageFault(f"the store in {path} has format {label.format}; this version reads {FORMAT}")
    return label


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"the index of {path} cannot be read: {error}") from error


def _next(path: Path, number: int, before: int) -> int:
    """The segment file that is read next; -1 if it is not there."""
    if before >= 0:
        os.close(before)
    try:
        return os.open(segment_path(path, number), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _flaw(io: RecordIo, fd: int, row: RecordRow) -> str | None:
    shape = Shape.make(row.record_bytes, row.head_bytes)
    record = np.empty(row.record_bytes, np.uint8)
    try:
        flaw = io.read(fd, row.slot * shape.slot_bytes, row.key, [(record.ctypes.data, record.nbytes)], shape)
        if hasattr(os, "posix_fadvise"):  # what is read once need not push other things out of memory
            os.posix_fadvise(fd, row.slot * shape.slot_bytes, shape.slot_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return f"unreadable: {error}"
    if flaw is not None or row.fingerprint == _NO_FINGERPRINT:
        return flaw and flaw.value
    header = decode(record.data)
    if not isinstance(header, FrameHeader):
        return header.value
    if header.key != row.key:
        return Flaw.WRONG_KEY.value
    if header.fingerprint != row.fingerprint:
        return Flaw.OTHER_FINGERPRINT.value
    at = row.record_bytes - header.payload_bytes
    for size, claimed in header.segments:
        if at < 0 or crc32c(record[at : at + size]) != claimed:
            return Flaw.CORRUPT_PAYLOAD.value
        at += size
    return None
