"""Memory of one batch, and how its bytes get there and away: by this thread at once, or by a mover."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.layout import round_up
from kvcontract.contract.wire import WireRecord
from kvcontract.core.lane import Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import Blocks, Program
from kvcontract.memory.slab import PAGE_BYTES, Allocate
from kvcontract.memory.staging import Room, Staged
from kvcontract.memory.stream import StreamEvent
from kvcontract.tiers.base import Buffers, RecordKeys, Rows, record_keys
from kvcontract.tiers.frame import FrameTemplate

PageKeys = NDArray[np.uint64]
Sums = NDArray[np.uint32]

RAMP: Final = 4
"""First and last batch of an operation are smaller by this where the mover is remote: others overlap them."""


class Mover(Protocol):
    """Copies between pages and host memory that sum what they move: `DeviceMover`, `HostMover`.

    Attributes:
        allocate: where host memory comes from that it is quick with; None: from anywhere.
        remote: whether only it reaches the pages: what goes to tiers, or comes, passes through host memory.
    """

    allocate: Allocate | None
    remote: bool

    def plan(self, program: Program, segments: tuple[int, ...]) -> Any:
        """What it has to know of a program; None if it can not move it, which one that is remote can."""
        ...

    def out(
        self,
        plan: Any,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        urgency: Urgency,
        after: StreamEvent | None = None,
    ) -> Pending[Sums | None]:
        """Pages to host memory; see `DeviceMover.out`."""
        ...

    def into(
        self, plan: Any, blocks: Blocks, address: NDArray[np.int64], *, urgency: Urgency
    ) -> Pending[Sums | None]:
        """Host memory to pages; see `DeviceMover.into`."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False if something still does."""
        ...


class Shard:
    """What is worked out once for one part and shard.

    Args:
        record: its layout on the wire.
        program: between the worker's memory and the record.
        identity: 16 bytes, fingerprint of the part.
        writes: whether this worker is the one that stores it.
        batch_bytes: payload of one batch, at least one record.

    Attributes:
        plan: the mover's; None: it does not move this.
        remote: whether only the mover reaches the pages.
    """

    def __init__(
        self, record: WireRecord, program: Program, identity: bytes, *, writes: bool, batch_bytes: int
    ) -> None:
        self.record, self.program, self.writes = record, program, writes
        self.template = FrameTemplate(identity, record.segments)
        self.record_bytes = self.template.header_bytes + record.payload_bytes
        none = np.empty(0, np.int64)
        # What lies on a device is nowhere that a tier can reach.
        self.direct = program.direct and program.binding.device.type == "cpu"
        self.lengths = program.buffers(none)[1] if self.direct else (record.payload_bytes,)
        self.summer = SegmentSums(self.lengths, record.segments)
        self.staged_summer = SegmentSums((record.payload_bytes,), record.segments)
        self.batch_records = max(1, batch_bytes // record.payload_bytes)
        self.plan: Any = None
        self.remote = False

    def moved_by(self, mover: Mover) -> None:
        """Let it work out what it needs; before anything is moved, since it may take a while."""
        self.plan, self.remote = mover.plan(self.program, self.record.segments), mover.remote

    def keys(self, page_keys: PageKeys) -> RecordKeys:
        """Record keys [n] of some pages, uint64[n, 2]."""
        return record_keys(page_keys, self.record.part.id, self.record.shard, self.record.shards)

    def batches(self, pages: int) -> Iterator[slice]:
        """So many pages, cut into batches."""
        most, at = self.batch_records, 0
        small = max(1, most // RAMP) if self.remote else most
        while at < pages:
            left = pages - at
            size = small if at == 0 or left <= small else min(most, left - small if left > small else left)
            yield slice(at, at + size)
            at += size


class Landing:
    """A batch whose records lie in the pages themselves, or in a room of the host.

    Attributes:
        shard: of its records.
        headers: uint8[n, header_bytes], of their frames.
        address: int64[n, pieces], where the payloads lie.
    """

    def __init__(self, shard: Shard, blocks: Blocks, room: Room | None) -> None:
        self.shard = shard
        self.headers = np.zeros((len(blocks), shard.template.header_bytes), np.uint8)
        self._room, self._lengths = room, shard.lengths if room is None else (shard.record.payload_bytes,)
        self._staged: Staged | None = None
        if room is None:
            self.address, _ = shard.program.buffers(blocks)
        else:
            self._staged = Staged(shard.program, blocks, room.memory)
            self.address = self._staged.address[:, None]

    @staticmethod
    def room_bytes(shard: Shard, count: int, *, staged: bool = False) -> int:
        """Memory that so many records need; 0: they stay where they are, as they must not if `staged`."""
        return 0 if shard.direct and not staged else count * shard.record.payload_bytes

    def gather(self) -> Pending[Sums | None]:
        """Bring the pages to where the payloads lie; crc32c of each segment, uint32[n, segments]."""
        if self._staged is not None:
            self._staged.gather()
        return Pending.of(self.summed(np.arange(len(self.address))))

    def deliver(self, rows: Rows) -> Pending[Sums | None]:
        """crc32c of what came, for some records, where it will be read from now on."""
        return Pending.of(self.summed(rows))

    def summed(self, rows: Rows) -> Sums:
        """crc32c of each segment of some records, as they lie in host memory."""
        whole = len(self._lengths) == 1
        return (self.shard.staged_summer if whole else self.shard.summer).sums(self.address[rows])

    def accept(self, rows: Rows) -> None:
        """Let the pages have records whose sums were right."""
        if self._staged is not None and len(rows):
            self._staged.scatter(rows)

    def buffers(self) -> Buffers:
        """Header and payload of each record."""
        (count, size), lengths = self.headers.shape, self._lengths
        header = self.headers.ctypes.data + size * np.arange(count, dtype=np.int64)
        return Buffers(
            np.concatenate([header[:, None], self.address], axis=1).ravel(),
            np.tile(np.array([size, *lengths], np.int64), count),
            np.arange(count + 1, dtype=np.int64) * (len(lengths) + 1),
            (self,),
        )

    def give_back(self) -> None:
        """Let others have the room."""
        if self._room is not None:
            self._room.give_back()


class MovedLanding(Landing):
    """A batch between pages and host memory that a mover copies.

    Args:
        shard: of its records.
        blocks: int[n, ...], the pages.
        address: int64[n], where the payloads lie.
        mover: who copies.
        urgency: of its copies.
        after: what the pages were written before.
        room: what is given back with it.
    """

    def __init__(
        self,
        shard: Shard,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        mover: Mover,
        urgency: Urgency,
        after: StreamEvent | None = None,
        room: Room | None = None,
    ) -> None:
        self.shard, self._room, self._lengths = shard, room, (shard.record.payload_bytes,)
        self.headers = np.zeros((len(blocks), shard.template.header_bytes), np.uint8)
        self.address = address[:, None]
        self._blocks, self._mover, self._urgency, self._after = blocks, mover, urgency, after

    @staticmethod
    def room_bytes(shard: Shard, count: int, *, staged: bool = False) -> int:
        """Memory that so many records need, each aligned for a disk."""
        del staged
        return count * _aligned_bytes(shard)

    @staticmethod
    def rows_of(shard: Shard, count: int, room: Room) -> NDArray[np.int64]:
        """int64[n], where payloads lie in a room."""
        rows: NDArray[np.int64] = room.memory.ctypes.data + _aligned_bytes(shard) * np.arange(
            count, dtype=np.int64
        )
        return rows

    def gather(self) -> Pending[Sums | None]:
        """See `Landing.gather`."""
        return self._mover.out(
            self.shard.plan, self._blocks, self.address[:, 0], urgency=self._urgency, after=self._after
        )

    def deliver(self, rows: Rows) -> Pending[Sums | None]:
        """Copy to the pages, whatever it is, and sum it there (E7)."""
        return self._mover.into(
            self.shard.plan, self._blocks[rows], self.address[rows, 0], urgency=self._urgency
        )

    def accept(self, rows: Rows) -> None:
        """Nothing: they are there."""


def read_headers(address: NDArray[np.int64], headers: NDArray[np.uint8]) -> None:
    """Copy the beginnings of records into uint8[n, header_bytes]."""
    at, size = headers.ctypes.data, headers.shape[1]
    for row, start in enumerate(address.tolist()):
        ctypes.memmove(at + row * size, start, size)


def write_headers(address: NDArray[np.int64], headers: NDArray[np.uint8]) -> None:
    """The opposite."""
    at, size = headers.ctypes.data, headers.shape[1]
    for row, start in enumerate(address.tolist()):
        ctypes.memmove(start, at + row * size, size)


def _aligned_bytes(shard: Shard) -> int:
    return round_up(shard.record.payload_bytes, PAGE_BYTES)
