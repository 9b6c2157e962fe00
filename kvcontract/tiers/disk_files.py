"""How the disk tier reaches the disk: a handful of calls, and whole records through them.

`Files` is the seam: every byte that is written and every barrier goes through it, so that faults can be put
in and orders be recorded.  `RecordIo` writes and reads one record at its place in a segment file, straight
from and to the caller's memory where the device can, else through memory of its own.

A record in its slot::

    offset  bytes
         0      8  magic  89 4B 56 44 53 0D 0A 1A
         8      2  format version
        10      2  zero
        12      4  crc32c of the front with these four bytes zero
        16      8  record bytes
        24      4  head bytes
        28     21  record key
        49     15  zero
                   zeros
   front-h      h  head: the record's first bytes, its frame's header as a rule
     front         the rest of the record, so that payloads begin where a device may write them from memory

Integers are little endian; a front is a multiple of 4 KiB, and so is a slot.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from kvcontract.contract.layout import round_up
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import RECORD_KEY_BYTES
from kvcontract.tiers.frame import Flaw

BLOCK_BYTES: Final = 4096
STAGE_BYTES: Final = 2**20
FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAGIC: Final = b"\x89KVDS\r\n\x1a"
FORMAT: Final = 2

_FIXED: Final = struct.Struct(f"<8sHHIQI{RECORD_KEY_BYTES}s15x")
_SUM: Final = struct.Struct("<I")
_SUM_AT: Final = 12
_MOST_FRONT_BYTES: Final = 16 * BLOCK_BYTES
_MOST_PIECES: Final = 1024  # IOV_MAX of Linux
_ALIGNMENTS: Final = (64, 512, 4096)  # tried in turn; torch and numpy align large memory to 64
_PYBUF_WRITE: Final = 0x200

Piece = tuple[int, int]  # address, bytes
Transfer = Callable[[int, Sequence[memoryview], int], int]

_memory: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object  # type: ignore[attr-defined] # a ctypes function behind the Callable
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)  # type: ignore[attr-defined]


class Files:
    """The system's own files; errors are its OSErrors."""

    def open(self, path: Path, *, direct: bool) -> int:
        """Open a segment file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def create(self, path: Path, size_bytes: int) -> None:
        """Make a file whose blocks belong to it, and make its name durable."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.allocate(fd, size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.sync_folder(path.parent)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Give a file its blocks; sparse where the file system cannot."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size_bytes)

    def read(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        """`os.preadv`."""
        return os.preadv(fd, views, at)

    def write(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        """`os.pwritev`."""
        return os.pwritev(fd, views, at)

    def sync(self, fd: int) -> None:
        """Make what was written to a file durable."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def commit(self, db: sqlite3.Connection) -> None:
        """End a transaction of the index; on return it is durable."""
        db.execute("commit")

    def checkpoint(self, db: sqlite3.Connection) -> None:
        """Move the index's log into its database."""
        db.execute("pragma wal_checkpoint(passive)").fetchall()


def direct_alignment(files: Files, folder: Path) -> int | None:
    """What memory must be aligned to for direct I/O in a folder; None where the file system refuses it.

    Found by trying: the answer depends on file system, device and kernel, and only the newest kernels tell.

    Raises:
        OSError: not even an ordinary file can be written there.
    """
    path = folder / f"probe-{os.getpid()}.tmp"
    size = BLOCK_BYTES
    memory = mmap.mmap(-1, 3 * size)
    with suppress(FileNotFoundError):
        path.unlink()
    files.create(path, 2 * size)
    try:
        fd = files.open(path, direct=True)
        try:
            for align in _ALIGNMENTS:
                views = [memoryview(memory)[at : at + size] for at in (align % size, size + align % size)]
                with suppress(OSError):
                    if files.write(fd, views, 0) == files.read(fd, views, 0) == 2 * size:
                        return align
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        files.remove(path)
    return None


class Shape(NamedTuple):
    """How a record lies in its slot.

    Attributes:
        record_bytes: of the record.
        head_bytes: of it that lie in the front.
        front_bytes: of the slot, before the rest of the record.
        slot_bytes: of the whole slot.
    """

    record_bytes: int
    head_bytes: int
    front_bytes: int
    slot_bytes: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def make(record_bytes: int, head_bytes: int) -> Shape:
        """The one of a record whose head has that length."""
        front = _blocks(_FIXED.size + head_bytes)
        return Shape(record_bytes, head_bytes, front, front + _blocks(record_bytes - head_bytes))

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Shape:
        """What suits a record that comes in these pieces: a short first piece is a header."""
        total = sum(size for _, size in pieces)
        first = pieces[0][1] if pieces else 0
        if total <= BLOCK_BYTES - _FIXED.size:
            return Shape.make(total, total)
        return Shape.make(total, first if _FIXED.size + first <= _MOST_FRONT_BYTES else 0)

    @staticmethod
    def most_bytes(capacity_bytes: int) -> int:
        """Of a record that fits a capacity, whichever header below 4 KiB it has."""
        blocks = capacity_bytes // BLOCK_BYTES
        return BLOCK_BYTES - _FIXED.size if blocks == 1 else max(0, blocks - 1) * BLOCK_BYTES


class _Stage(threading.local):
    """Aligned memory of each thread that does I/O: as much as there are workers, and nobody waits for it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _MOST_FRONT_BYTES + STAGE_BYTES + BLOCK_BYTES)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class RecordIo:
    """Whole records, to and from segment files.

    Args:
        files: the seam.
        align_bytes: of memory for direct I/O; None: files are opened without, and any memory will do.
    """

    def __init__(self, files: Files, align_bytes: int | None) -> None:
        self._files = files
        self._align = align_bytes
        self._stage = _Stage()

    def write(self, fd: int, at: int, key: bytes, pieces: Sequence[Piece], shape: Shape) -> None:
        """Write a record into its slot; all of it, or an OSError."""
        stage, front, head = self._stage, shape.front_bytes, shape.head_bytes
        ctypes.memset(stage.address, 0, front - head)
        _FIXED.pack_into(stage.view, 0, MAGIC, FORMAT, 0, 0, shape.record_bytes, head, key)
        rest = _copy(pieces, stage.address + front - head, head, into_stage=True)
        _SUM.pack_into(stage.view, _SUM_AT, crc32c(stage.view[:front]))
        if (straight := self._straight(rest)) is None:
            self._write_staged(fd, at, front, rest)
            return
        views, tail = straight
        if tail:
            end = stage.view[front : front + BLOCK_BYTES]
            ctypes.memset(stage.address + front, 0, BLOCK_BYTES)
            _copy([tail], stage.address + front, tail[1], into_stage=True)
            views.append(end)
        self._write_all(fd, [stage.view[:front], *views], at)

    def read(self, fd: int, at: int, key: bytes, pieces: Sequence[Piece], shape: Shape) -> Flaw | None:
        """Read a record from its slot; the memory is undefined if it has a flaw.

        Raises:
            OSError: the system could not read it.
        """
        stage, front, head = self._stage, shape.front_bytes, shape.head_bytes
        rest = _after(pieces, head)
        if (straight := self._straight(rest)) is None:
            whole = self._read_staged(fd, at, front, rest)
        else:
            views, tail = straight
            if tail:
                views.append(stage.view[front : front + BLOCK_BYTES])
            views.insert(0, stage.view[:front])
            whole = _all(self._files.read, fd, views, at)
            if tail:
                _copy([tail], stage.address + front, tail[1], into_stage=False)
        # A front that was not read whole may be that of an earlier record.
        if flaw := (_front_flaw(stage.view[:front], key, shape) if whole else Flaw.TRUNCATED):
            return flaw
        _copy(pieces, stage.address + front - head, head, into_stage=False)
        return None

    def _straight(self, rest: list[Piece]) -> tuple[list[memoryview], Piece | None] | None:
        """Memory that the device may use as it is, and what is left at its end; None if there is none."""
        if self._align is None:
            return [_memory(start, size, _PYBUF_WRITE) for start, size in rest], None
        tail = None
        if rest and (odd := rest[-1][1] % BLOCK_BYTES):
            start, size = rest[-1]
            tail = (start + size - odd, odd)
            rest = [*rest[:-1], (start, size - odd)] if size > odd else rest[:-1]
        if any(start % self._align or size % BLOCK_BYTES for start, size in rest):
            return None
        return [_memory(start, size, _PYBUF_WRITE) for start, size in rest], tail

    def _write_staged(self, fd: int, at: int, filled: int, rest: Sequence[Piece]) -> None:
        stage = self._stage
        for piece in _cut(rest, STAGE_BYTES, STAGE_BYTES):
            if piece is None:
                self._write_all(fd, [stage.view[:filled]], at)
                at, filled = at + filled, 0
                continue
            ctypes.memmove(stage.address + filled, *piece)
            filled += piece[1]
        padded = _blocks(filled)
        ctypes.memset(stage.address + filled, 0, padded - filled)
        if padded:
            self._write_all(fd, [stage.view[:padded]], at)

    def _read_staged(self, fd: int, at: int, front: int, rest: Sequence[Piece]) -> bool:
        """Read through the stage; the front stays where it is."""
        stage = self._stage
        here = stage.address + front
        whole, first, chunk = True, front, list[Piece]()
        for piece in [*_cut(rest, STAGE_BYTES, STAGE_BYTES), None]:
            if piece is not None:
                chunk.append(piece)
                continue
            size = sum(length for _, length in chunk)
            view = stage.view[front - first : front + _blocks(size)]
            whole = _all(self._files.read, fd, [view], at) and whole
            at, first = at + len(view), 0
            _copy(chunk, here, size, into_stage=False)
            chunk = []
        return whole

    def _write_all(self, fd: int, views: list[memoryview], at: int) -> None:
        if not _all(self._files.write, fd, views, at):
            raise OSError(errno.EIO, "the device took only a part of a record")


def _all(transfer: Transfer, fd: int, views: list[memoryview], at: int) -> bool:
    """Transfer every byte, however many calls it takes; False if the file or the device ends first."""
    while views:
        moved = transfer(fd, views[:_MOST_PIECES], at)
        if moved < 1:
            return False
        at += moved
        while views and moved >= len(views[0]):
            moved -= len(views[0])
            views = views[1:]
        if moved:
            views = [views[0][moved:], *views[1:]]
    return True


def _front_flaw(front: memoryview, key: bytes, shape: Shape) -> Flaw | None:
    magic, version, _, claimed, record_bytes, head_bytes, found = _FIXED.unpack_from(front)
    if magic != MAGIC:
        return Flaw.FOREIGN
    if version != FORMAT:
        return Flaw.OTHER_FORMAT
    _SUM.pack_into(front, _SUM_AT, 0)
    if claimed != crc32c(front):
        return Flaw.CORRUPT_HEADER
    if found != key or (record_bytes, head_bytes) != (shape.record_bytes, shape.head_bytes):
        return Flaw.WRONG_KEY
    return None


def _after(pieces: Sequence[Piece], skip: int) -> list[Piece]:
    """Pieces without their first bytes."""
    left = []
    for start, size in pieces:
        step = min(skip, size)
        skip -= step
        if size > step:
            left.append((start + step, size - step))
    return left


def _copy(pieces: Sequence[Piece], stage: int, size_bytes: int, *, into_stage: bool) -> list[Piece]:
    """Copy the first bytes of pieces to or from the stage; returns the pieces without them."""
    left = size_bytes
    for start, size in pieces:
        if not left:
            break
        step = min(left, size)  # 0 for an empty piece
        ctypes.memmove(*((stage, start) if into_stage else (start, stage)), step)  # releases the GIL
        stage, left = stage + step, left - step
    return _after(pieces, size_bytes)


def _cut(pieces: Sequence[Piece], room: int, chunk: int) -> list[Piece | None]:
    """Pieces cut so that chunks of them fill the stage; None says that a chunk is full and more follows."""
    out: list[Piece | None] = []
    for begin, length in pieces:
        start, size = begin, length
        while size:
            if not room:
                out.append(None)
                room = chunk
            step = min(size, room)
            out.append((start, step))
            start, size, room = start + step, size - step, room - step
    return out


def _blocks(size_bytes: int) -> int:
    return round_up(size_bytes, BLOCK_BYTES)
