"""A disk tier, spoken to in numbers, and files that fail when told to."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.lane import InlineLane
from kvcontract.memory.checksum import crc32c
from kvcontract.tiers.base import Buffers, Code, Lease, RecordKeys, SaveClass, Tier, record_keys
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.disk_files import Files
from kvcontract.tiers.frame import encode, header_bytes

SLOT: Final = 4096
BYTES: Final = 1000
HEAD: Final = 128
BIG: Final = HEAD + SLOT
FOREVER: Final = math.inf
CALM_S: Final = 60.0
SLOTS: Final = 12
NUMBERS: Final = range(30)
FINGERPRINT: Final = bytes(range(16))


def size_of(number: int) -> int:
    """Of a record of NUMBERS: they come in two sizes, which share the quota."""
    return BIG if number % 2 else BYTES


class Clock:
    """A clock that moves when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


class FaultyFiles(Files):
    """Files whose calls can be made to fail.

    Attributes:
        faults: by verb, what is called with the number of the call, counted from 1; it may raise.
        calls: by verb, how many there were.
        most_bytes: that one write takes; short writes are what a system may do at any time.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Callable[[int], object]] = {}
        self.calls: dict[str, int] = {}
        self.most_bytes: int | None = None
        self.torn = False

    def _call(self, verb: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if (fault := self.faults.get(verb)) is not None:
            fault(self.calls[verb])

    def open(self, path: Path, *, direct: bool) -> int:
        """Or fail."""
        self._call("open")
        return super().open(path, direct=direct)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Or fail."""
        self._call("allocate")
        super().allocate(fd, size_bytes)

    def read(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        """Or fail."""
        self._call("read")
        return super().read(fd, views, at)

    def write(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        """All, a part, or fail, torn perhaps."""
        try:
            self._call("write")
        except OSError:
            if self.torn:
                super().write(fd, [views[0][:512]], at)
            raise
        if self.most_bytes is not None:
            views = [views[0][: self.most_bytes]]
        return super().write(fd, views, at)

    def sync(self, fd: int) -> None:
        """Or fail."""
        self._call("sync")
        super().sync(fd)

    def remove(self, path: Path) -> None:
        """Or fail."""
        self._call("remove")
        super().remove(path)

    def commit(self, db: sqlite3.Connection) -> None:
        """Or fail."""
        self._call("commit")
        super().commit(db)


def raising(code: int, *numbers: int) -> Callable[[int], None]:
    """A fault of some calls, or of all."""

    def fault(number: int) -> None:
        if not numbers or number in numbers:
            raise OSError(code, os.strerror(code))

    return fault


DISK_FULL: Final = raising(errno.ENOSPC)


def keys_of(*numbers: int) -> RecordKeys:
    """One record key a number."""
    pages = np.array([[number, ~number & (2**64 - 1)] for number in numbers], np.uint64).reshape(-1, 2)
    return record_keys(pages, 0, 0, 1)


def content(number: int, size: int = BYTES) -> NDArray[np.uint8]:
    """The bytes that belong to a number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def framed(number: int, size: int = BYTES) -> NDArray[np.uint8]:
    """A whole record of a number: frame and payload, `size` bytes in all."""
    payload = content(number, size - header_bytes(1))
    head = encode(FINGERPRINT, keys_of(number).tobytes(), [len(payload)], [crc32c(payload)])
    return np.concatenate([np.frombuffer(head, np.uint8), payload])


def in_pieces(records: Sequence[NDArray[np.uint8]]) -> Buffers:
    """Records as a worker has them: a header and a payload that lies elsewhere."""
    cuts = [cut for record in records for cut in (record[:HEAD], record[HEAD:].copy())]
    pieces = Buffers.of(cuts)
    return Buffers(pieces.address, pieces.length_bytes, 2 * np.arange(len(records) + 1), pieces.keepalive)


def tier_of(home: Path, slots: int, **options: Any) -> DiskTier:
    """A tier with room for some records of BYTES, that works in the caller's thread."""
    options.setdefault("lane", InlineLane())
    options.setdefault("direct", False)
    return DiskTier(home, slots * SLOT, **options)


def save(
    tier: Tier,
    *numbers: int,
    size: int = BYTES,
    deadline: float = FOREVER,
    cls: SaveClass = SaveClass.CACHEABLE,
    handoff: str | None = None,
    of: Callable[[int, int], NDArray[np.uint8]] = content,
) -> list[Code]:
    """Save the content of numbers in one batch."""
    buffers = in_pieces([of(number, size) for number in numbers])
    op = tier.save(keys_of(*numbers), buffers, cls, deadline, handoff=handoff)
    return [Code(code) for code in op.wait(CALM_S)]


def load(tier: Tier, lease: Lease, rows: list[int], size: int = BYTES) -> tuple[list[Code], list[bytes]]:
    """Load rows of a lease into fresh memory of which each byte is 0xEE."""
    target = [np.full(size, 0xEE, np.uint8) for _ in rows]
    op = tier.load(lease, np.array(rows, np.int64), Buffers.of(target), FOREVER)
    return [Code(code) for code in op.wait(CALM_S)], [array.tobytes() for array in target]


def present(tier: Tier, *numbers: int) -> list[bool]:
    """Which records a lookup finds; the lease goes back at once."""
    with tier.lookup(keys_of(*numbers), FOREVER).value as lease:
        return [bool(here) for here in lease.present]


def equal(
    tier: Tier,
    *numbers: int,
    size: int = BYTES,
    of: Callable[[int, int], NDArray[np.uint8]] = content,
) -> list[bool | None]:
    """Per number whether its bytes come back as they were saved; None: absent, also when it is read."""
    found: list[bool | None] = []
    with tier.lookup(keys_of(*numbers), FOREVER).value as lease:
        for row, number in enumerate(numbers):
            codes, read = load(tier, lease, [row], size) if lease.present[row] else ([Code.MISS], [b""])
            found.append(read[0] == of(number, size).tobytes() if codes == [Code.OK] else None)
    return found


def flush(tier: Tier) -> bool:
    """Whether everything is durable."""
    return tier.flush("durable", FOREVER).wait(CALM_S)


def segment_files(home: Path) -> list[Path]:
    """The files that hold records, in the order they were made."""
    return sorted((home / "segments").glob("*.kvseg"))


def usage_is_right(tier: DiskTier) -> bool:
    """Whether the figures are those of the files."""
    stats = tier.stats()
    files = sum(path.stat().st_size for path in segment_files(tier.directory))
    return stats["allocated_bytes"] == files <= stats["capacity_bytes"]
