"""What the tiers cost beside the copies they make: the disk tier against the disk, DRAM against memcpy.

    python benchmarks/tiers.py [--json PATH|-] [--rounds N] [--only disk|dram] [--directory DIR]

Disk: records with frames of 1, 2.25 and 4 MiB, summed when they are saved and checked when they are loaded,
against plain direct reads and writes of the same sizes, places and memory at the same depth.  Every round of
saves is of new records in a store that is full, so that each evicts one and the index is committed; it ends
when all of it is durable.  The plain writes end with a sync.
DRAM: pages of 2.25 MiB in random order, into and out of memory that the tier lends, against copies page by
page with the same number of threads; with checksums, by a worker, which also makes frames and checks them.
Exit code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from dram import CALM_S, MIB, Bytes, all_ok, dram_rows, filled, keys_of
from paired import Case, Row, measure, publish, versions

from kvcontract.memory.checksum import SegmentSums
from kvcontract.tiers.base import Buffers, Op, RecordKeys, SaveClass, key_bytes
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.disk_files import BLOCK_BYTES, Shape
from kvcontract.tiers.disk_home import segment_path
from kvcontract.tiers.disk_index import read_index
from kvcontract.tiers.frame import FrameTemplate

SIZES = (MIB, MIB * 9 // 4, 4 * MIB)
SEGMENT_BYTES = MIB // 2
DEPTH = 4
MEMORY_BYTES = 256 * MIB
PASSES = 4
ROUND_BYTES = PASSES * MEMORY_BYTES
STORE_BYTES = 4 * ROUND_BYTES
OPERATION_BYTES = 16 * MIB
FLYING = 8
DISK_BAR = 0.85
FINGERPRINT = bytes(range(16))


def moved(pages: Bytes, by: int) -> Bytes:
    """The same memory, that many bytes further."""
    memory = (ctypes.c_uint8 * pages.nbytes).from_address(pages.ctypes.data + by)
    return np.frombuffer(memory, np.uint8).reshape(pages.shape)


class Framed:
    """Pages with frames, as a worker makes and checks them.

    Args:
        pages: uint8[n, size].
    """

    def __init__(self, pages: Bytes) -> None:
        self.pages = pages
        size = pages.shape[1]
        segments = [min(SEGMENT_BYTES, size - at) for at in range(0, size, SEGMENT_BYTES)]
        self.template = FrameTemplate(FINGERPRINT, segments)
        self.headers = np.zeros((len(pages), self.template.header_bytes), np.uint8)
        self._summer = SegmentSums([size], segments)
        self._address = pages.ctypes.data + size * np.arange(len(pages), dtype=np.int64)

    def seal(self, rows: slice, keys: RecordKeys) -> None:
        """Sum pages and make their headers."""
        self.headers[rows] = self.template.encode(keys, self._summer.sums(self._address[rows, None]))

    def check(self, rows: slice, keys: RecordKeys) -> None:
        """End if a page is not the one that was saved."""
        flaws, claimed = self.template.verify(self.headers[rows], keys)
        if any(flaws) or (self._summer.sums(self._address[rows, None]) != claimed).any():
            raise SystemExit(f"what came back is wrong: {flaws}")

    def buffers(self, rows: slice) -> Buffers:
        """Header and payload of pages."""
        size, head = self.pages.shape[1], self.headers.shape[1]
        payload = self._address[rows]
        headers = self.headers.ctypes.data + head * np.arange(len(self.pages), dtype=np.int64)[rows]
        return Buffers(
            np.stack([headers, payload], axis=1).ravel(),
            np.tile(np.array([head, size], np.int64), len(payload)),
            2 * np.arange(len(payload) + 1, dtype=np.int64),
            (self,),
        )


def batches(pages: int, size: int) -> list[slice]:
    """Rows of the operations of one round."""
    step = max(1, OPERATION_BYTES // size)
    return [slice(at, min(pages, at + step)) for at in range(0, pages, step)]


class DiskSide:
    """A disk tier that is full, and the memory that it is spoken to with.

    Args:
        folder: of the store.
        size: of a page.
        offset: of the pages' memory beyond an aligned address.
    """

    def __init__(self, folder: Path, size: int, offset: int) -> None:
        pages = MEMORY_BYTES // size
        self.tier = DiskTier(folder, STORE_BYTES, workers=DEPTH)
        self.source = Framed(filled(size, pages, offset))
        self.target = Framed(filled(size, pages, offset))
        self.plain_source = moved(self.source.pages, -offset)
        self.plain_target = moved(self.target.pages, -offset)
        self.turns = [(turn * pages, rows) for turn in range(PASSES) for rows in batches(pages, size)]
        self.pages = PASSES * pages
        self.number = 0
        for _ in range(STORE_BYTES // ROUND_BYTES + 1):
            self.save()

    def save(self) -> float:
        """Seconds of a round of saves, frames made on the way, until it is durable."""
        self.number += self.pages
        keys, flying = keys_of(self.number, self.pages), deque[Op]()
        start = time.perf_counter()
        for base, rows in self.turns:
            if len(flying) == FLYING:
                all_ok(flying.popleft())
            named = keys[base + rows.start : base + rows.stop]
            self.source.seal(rows, named)
            flying.append(self.tier.save(named, self.source.buffers(rows), SaveClass.CACHEABLE, math.inf))
        while flying:
            all_ok(flying.popleft())
        if not self.tier.flush("durable", math.inf).wait(CALM_S):
            raise SystemExit("not durable")
        return time.perf_counter() - start

    def load(self) -> float:
        """Seconds of a round of loads, every byte checked."""
        keys, flying = keys_of(self.number, self.pages), deque[tuple[int, slice, Op]]()

        def end_one() -> None:
            base, rows, op = flying.popleft()
            all_ok(op)
            self.target.check(rows, keys[base + rows.start : base + rows.stop])

        start = time.perf_counter()
        with self.tier.lookup(keys, math.inf).wait(CALM_S) as lease:
            for base, rows in self.turns:
                if len(flying) == FLYING:
                    end_one()
                wanted = np.arange(base + rows.start, base + rows.stop)
                op = self.tier.load(lease, wanted, self.target.buffers(rows), math.inf)
                flying.append((base, rows, op))
            while flying:
                end_one()
        return time.perf_counter() - start

    def close(self) -> None:
        """End."""
        if not self.tier.close(math.inf) or self.tier.faults:
            raise SystemExit(f"the tier ended badly: {list(self.tier.faults)}")


class PlainDisk:
    """Direct reads and writes of the very blocks that hold the records of a tier's latest round.

    A disk's speed differs from place to place, with what was done there last, and with the memory that bytes
    are moved to (how scattered its pages are): both sides use the same blocks and the same memory.

    Args:
        side: whose records.
    """

    def __init__(self, side: DiskSide) -> None:
        self._side = side
        self._size = side.source.pages.shape[1]
        self._fds: dict[int, int] = {}
        self._number = -1
        self._places: list[tuple[int, int]] = []

    def write(self) -> float:
        """Seconds of a round of writes, until it is durable."""
        return self._run(self._side.plain_source, os.pwrite, sync=True)

    def read(self) -> float:
        """Seconds of a round of reads, of what was written last."""
        target = self._side.plain_target
        return self._run(target, lambda fd, page, at: os.preadv(fd, [page], at), sync=False)

    def _look(self) -> None:
        """Find where the records of the latest round are."""
        if self._number == self._side.number:
            return
        self._number = self._side.number
        home = self._side.tier.directory
        rows = {row.key: row for row in read_index(home).records}
        self._places = []
        for key in key_bytes(keys_of(self._number, self._side.pages)):
            row = rows[key]
            if row.segment not in self._fds:
                path = segment_path(home, row.segment)
                self._fds[row.segment] = os.open(path, os.O_RDWR | os.O_DIRECT)
            at = row.slot * Shape.make(row.record_bytes, row.head_bytes).slot_bytes
            self._places.append((self._fds[row.segment], at + BLOCK_BYTES))

    def _run(self, pages: Bytes, move: Callable[[int, memoryview, int], int], *, sync: bool) -> float:
        self._look()
        left, lock, short = iter(enumerate(self._places)), threading.Lock(), list[int]()

        def work() -> None:
            while True:
                with lock:
                    number, place = next(left, (-1, (-1, -1)))
                if number < 0:
                    return
                page = memoryview(pages[number % len(pages)])
                if move(place[0], page, place[1]) != self._size:
                    short.append(number)

        threads = [threading.Thread(target=work) for _ in range(DEPTH)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for fd in {fd for fd, _ in self._places} if sync else ():
            os.fdatasync(fd)
        if short:
            raise SystemExit(f"short transfers: {short}")
        return time.perf_counter() - start

    def close(self) -> None:
        """End."""
        for fd in self._fds.values():
            os.close(fd)


def disk_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Each size both ways, with memory that the device can use, and without a bar with memory it cannot."""
    for size in SIZES:
        for offset, memory, bar in ((0, "aligned", DISK_BAR), (64, "unaligned", None)):
            place = folder / f"{size}-{offset}"
            place.mkdir()
            ours = DiskSide(place / "store", size, offset)
            theirs = PlainDisk(ours)
            try:
                for name, mine, other in (
                    ("save", ours.save, theirs.write),
                    ("load", ours.load, theirs.read),
                ):
                    ours.save()  # what is loaded is whole
                    label = f"disk: {name} {size / MIB:g} MiB records, {memory} memory, depth {DEPTH}"
                    note = f"{ours.pages} records a round" + (
                        "" if bar else "; every byte is copied once more"
                    )
                    yield measure(Case(label, mine, other, per_s=1e3, bar=bar, note=note), rounds)
            finally:
                ours.close()
                theirs.close()
                shutil.rmtree(place)


@contextmanager
def place(given: str | None) -> Iterator[Path]:
    """A folder on the disk to be measured, emptied in the end."""
    with tempfile.TemporaryDirectory(dir=given, prefix="kvc-benchmark-") as made:
        yield Path(made)


def run(rounds: int, only: str | None, directory: str | None) -> list[Row]:
    """Measure what was asked for."""
    rows: list[Row] = []
    if only in (None, "disk"):
        with ExitStack() as stack:
            rows += disk_rows(stack.enter_context(place(directory)), rounds)
    if only in (None, "dram"):
        rows += dram_rows(rounds)
    return rows


def main() -> int:
    """Run, print, say by the exit code whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="PATH|-", help="also write one JSON document")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each row, at least 9")
    parser.add_argument("--only", choices=("disk", "dram"), help="one tier")
    parser.add_argument(
        "--directory", metavar="DIR", help="on the disk to be measured (2 GiB); default: temporary"
    )
    given = parser.parse_args()
    if given.rounds < 9:
        parser.error("at least 9 rounds")
    rows = run(given.rounds, given.only, given.directory)
    return publish(rows, versions("numpy", "torch", "crc32c"), "Tiers", given.json)


if __name__ == "__main__":
    sys.exit(main())
