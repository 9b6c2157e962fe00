"""Copies between pages in host memory and payloads there, such as the slots of a tier that lends them.

What is copied is summed piece by piece, while it is still in a core's cache: bytes come from memory once.
Summed is what was written, where it was written to.  A batch is copied by several jobs of a lane, so that
threads share it, and what is more urgent waits for a job only.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.lane import Lane, ThreadLane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.checksum import crc32c_iov, cuts
from kvcontract.memory.copy import Blocks, Program, refuse_repeated
from kvcontract.memory.slab import Allocate

COPIES: Final = 2
"""Threads of a mover; a second one gains the most, since one can not ask for all that memory gives."""

CHUNK_BYTES: Final = 512 * 1024
"""Copied, then summed: as much as a core's own cache keeps, and enough for a thread not to wait for others'
Python."""

JOB_BYTES: Final = 4 * 2**20
"""Payload that one job moves, at least one record."""

Sums = NDArray[np.uint32]
Fault = Callable[[Exception], object]
After = Callable[[], object]
_Move = tuple[int, int, int, int]  # piece of a page, where in it, where in the payload, bytes


class Event(Protocol):
    """Something of a device that a thread can wait for."""

    def synchronize(self) -> object:
        """Wait."""
        ...


class HostPlan:
    """What is worked out once for a program whose payloads lie in pages as long runs of bytes.

    Args:
        program: between pages and payloads; direct.
        segments: bytes of each segment of a payload.

    Attributes:
        segments: per segment its chunks, each a list of moves that follow each other in the payload.
        job_records: how many records one job moves.
    """

    def __init__(self, program: Program, segments: tuple[int, ...]) -> None:
        self.program = program
        self.job_records = max(1, JOB_BYTES // program.payload_bytes)
        _, lengths = program.buffers(np.empty(0, np.int64))
        self.segments: list[list[list[_Move]]] = []
        at = 0
        for found in cuts(lengths, segments):
            chunks: list[list[_Move]] = []
            room = 0
            for piece, begin, size in found:
                inside = begin
                while inside < begin + size:
                    if not room:
                        chunks.append([])
                        room = CHUNK_BYTES
                    step = min(begin + size - inside, room)
                    chunks[-1].append((piece, inside, at, step))
                    inside, at, room = inside + step, at + step, room - step
            self.segments.append(chunks)

    def out(self, pages: list[int], payload: int) -> list[int]:
        """Copy one record from where its pieces lie in pages; crc32c of each segment."""
        sums = []
        for chunks in self.segments:
            value = 0
            for moves in chunks:
                for piece, inside, at, size in moves:
                    ctypes.memmove(payload + at, pages[piece] + inside, size)  # releases the GIL
                first, last = moves[0], moves[-1]
                value = crc32c_iov((payload + first[2],), (last[2] + last[3] - first[2],), value)
            sums.append(value)
        return sums

    def into(self, pages: list[int], payload: int) -> list[int]:
        """The opposite."""
        sums = []
        for chunks in self.segments:
            value = 0
            for moves in chunks:
                for piece, inside, at, size in moves:
                    ctypes.memmove(pages[piece] + inside, payload + at, size)
                starts = [pages[piece] + inside for piece, inside, _, _ in moves]
                value = crc32c_iov(starts, [size for *_, size in moves], value)
            sums.append(value)
        return sums


class _Batch:
    """Records that are copied by several jobs, of which one may fail and the others go on.

    Args:
        one: copies a record, given where the pieces of its page lie, and its payload.
        pages: int64[n, pieces], where pages lie.
        address: int64[n], where payloads lie.
        segments: of a payload.
        fault: told of what went wrong.

    Attributes:
        landed: settles once nothing of the batch runs any more (R3), with sums, or None if anything failed.
    """

    def __init__(
        self,
        one: Callable[[list[int], int], list[int]],
        pages: NDArray[np.int64],
        address: NDArray[np.int64],
        segments: int,
        fault: Fault,
    ) -> None:
        self.landed: Pending[Sums | None] = Pending()
        self._one, self._pages, self._address, self._fault = one, pages, address, fault
        self._sums = np.zeros((len(address), segments), np.uint32)
        self._lock = threading.Lock()
        self._whole, self._left = True, 0

    def start(self, submit: Callable[[Callable[[], None]], None], records: int, after: After) -> None:
        """Submit jobs of so many records each, that wait for `after` first."""
        jobs = [slice(at, at + records) for at in range(0, len(self._address), records)]
        self._left = len(jobs) + 1
        for rows in jobs:
            try:
                submit(partial(self._run, rows, after))
            except Exception as error:  # noqa: BLE001 - a lane that is closed; kept by the owner
                self._end(error)
        self._end()

    def _run(self, rows: slice, after: After) -> None:
        error: Exception | None = None
        try:
            after()
            pairs = zip(self._pages[rows].tolist(), self._address[rows].tolist(), strict=True)
            self._sums[rows] = [self._one(pages, payload) for pages, payload in pairs]
        except Exception as raised:  # noqa: BLE001 - kept by the owner; the copy has failed (R4)
            error = raised
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if error is not None:
            self._fault(error)
        with self._lock:
            self._whole = self._whole and error is None
            self._left -= 1
            last = not self._left
        if last:
            self.landed.settle(self._sums if self._whole else None)


class HostMover:
    """The copies of one worker whose pages lie in host memory; what `DeviceMover` is beside a device.

    Args:
        fault: told of what went wrong.
        lane: where copies run; stays the caller's to close. None makes one of COPIES threads.

    Attributes:
        allocate: where host memory comes from that it is quick with: anywhere.
        remote: no; tiers reach the pages themselves.
    """

    allocate: Allocate | None = None
    remote = False

    def __init__(self, fault: Fault, lane: Lane | None = None) -> None:
        self._fault = fault
        self._own_lane = lane is None
        self._lane: Lane = ThreadLane("kvc-copies", COPIES) if lane is None else lane
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def plan(self, program: Program, segments: tuple[int, ...]) -> HostPlan | None:
        """What `out` and `into` need of a program; None if its payloads do not lie in pages as they are."""
        here = program.binding.device.type == "cpu"
        return HostPlan(program, segments) if program.direct and here else None

    def out(
        self,
        plan: HostPlan,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        urgency: Urgency = Urgency.RESTORE,
        after: Event | None = None,
    ) -> Pending[Sums | None]:
        """Copy pages to payloads.

        Args:
            plan: of their program.
            blocks: int[n], which must not change until the copy has landed (C1).
            address: int64[n], where each payload is to lie.
            urgency: which of those that wait goes first.
            after: what the pages were written before; who copies waits for it (C2).

        Returns:
            uint32[n, segments], once all has landed; None if something failed.

        Raises:
            UsageFault: a block id is out of range.
        """
        pages, _ = plan.program.buffers(blocks)
        batch = _Batch(plan.out, pages, address, len(plan.segments), self._fault)
        self._count("out", plan, len(address))
        batch.start(self._submit(urgency), plan.job_records, _at_once if after is None else after.synchronize)
        return batch.landed

    def into(
        self,
        plan: HostPlan,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        urgency: Urgency = Urgency.RESTORE,
    ) -> Pending[Sums | None]:
        """Copy payloads to pages, and sum them there: the pages hold what came, whatever its sums are.

        Args:
            plan: of their program.
            blocks: int[n], none twice, that nobody reads or writes.
            address: int64[n], where each payload lies.
            urgency: which of those that wait goes first.

        Returns:
            uint32[n, segments], once the pages are written; None if something failed.

        Raises:
            UsageFault: a block id is out of range or repeated.
        """
        pages, _ = plan.program.buffers(blocks)
        refuse_repeated(plan.program, blocks)
        batch = _Batch(plan.into, pages, address, len(plan.segments), self._fault)
        self._count("in", plan, len(address))
        batch.start(self._submit(urgency), plan.job_records, _at_once)
        return batch.landed

    def _submit(self, urgency: Urgency) -> Callable[[Callable[[], None]], None]:
        return lambda job: self._lane.submit(job, urgency)

    def _count(self, way: str, plan: HostPlan, records: int) -> None:
        with self._lock:
            self._counts[f"host_bytes_{way}"] += records * plan.program.payload_bytes

    def stats(self) -> dict[str, int]:
        """Counters of bytes by direction."""
        with self._lock:
            return {**dict.fromkeys(("host_bytes_out", "host_bytes_in"), 0), **self._counts}

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False if something still does."""
        return self._lane.close(deadline_s) if self._own_lane else True


def _at_once() -> None:
    """Nothing to wait for."""
