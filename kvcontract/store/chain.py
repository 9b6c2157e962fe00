"""One copy operation: a chain of batches, so that the memory it stages through is bounded.

A batch is some records of one shard.  Its payloads lie in the pages themselves or in a staging buffer, its
frames' headers beside them.  No step waits for a tier or for staging: it leaves itself behind as a callback,
and goes on in the lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.wire import WireRecord
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending
from kvcontract.memory.checksum import SegmentSums
from kvcontract.memory.copy import Program
from kvcontract.memory.staging import Staged, StagingBudget
from kvcontract.tiers.base import Buffers, Clock, Code, Codes, Op, RecordKeys, Rows, record_keys
from kvcontract.tiers.frame import FrameTemplate

PageKeys = NDArray[np.uint64]


class Shard:
    """What is worked out once for one part and shard.

    Args:
        record: its layout on the wire.
        program: between the worker's memory and the record.
        identity: 16 bytes, fingerprint of the part.
        writes: whether this worker is the one that stores it.
        batch_bytes: payload of one batch, at least one record.
    """

    def __init__(
        self, record: WireRecord, program: Program, identity: bytes, *, writes: bool, batch_bytes: int
    ) -> None:
        self.record, self.program, self.writes = record, program, writes
        self.template = FrameTemplate(identity, record.segments)
        none = np.empty(0, np.int64)
        # What lies on a device is nowhere that a tier can reach.
        self.direct = program.direct and program.binding.device.type == "cpu"
        self.lengths = program.buffers(none)[1] if self.direct else (record.payload_bytes,)
        self.summer = SegmentSums(self.lengths, record.segments)
        self.staged_summer = SegmentSums((record.payload_bytes,), record.segments)
        self.batch_records = max(1, batch_bytes // record.payload_bytes)

    def keys(self, page_keys: PageKeys) -> RecordKeys:
        """Record keys [n] of some pages, uint64[n, 2]."""
        return record_keys(page_keys, self.record.part.id, self.record.shard, self.record.shards)


class Landing:
    """Memory of one batch.

    Args:
        shard: whose records.
        blocks: int[n].
        staged: the payloads must not lie in the pages themselves.

    Attributes:
        blocks: int[n], or [n, pages of a record].
        headers: uint8[n, header_bytes].
        address: int64[n, pieces], where the payloads lie.
        staged: where the payloads lie, or None: in the pages themselves.
    """

    def __init__(self, shard: Shard, blocks: NDArray[np.int64], *, staged: bool = False) -> None:
        self.shard, self.blocks = shard, blocks
        self.headers = np.zeros((len(blocks), shard.template.header_bytes), np.uint8)
        self.staged: Staged | None = None
        if shard.direct and not staged:
            self.address, _ = shard.program.buffers(blocks)
        else:
            self.staged = Staged(shard.program, blocks)
            self.address = self.staged.address[:, None]

    def gather(self) -> None:
        """Bring the pages to where the payloads lie."""
        if self.staged is not None:
            self.staged.gather()

    def scatter(self, rows: Rows) -> None:
        """Bring the payloads of some records to their pages."""
        if self.staged is not None and len(rows):
            self.staged.scatter(rows)

    def sums(self, rows: Rows) -> NDArray[np.uint32]:
        """crc32c of each segment of some records, uint32[n, segments], as they lie in memory now."""
        summer = self.shard.summer if self.staged is None else self.shard.staged_summer
        return summer.sums(self.address[rows])

    def buffers(self) -> Buffers:
        """Header and payload of each record."""
        (count, size), lengths = self.headers.shape, self.shard.lengths
        if self.staged is not None:
            lengths = (self.shard.record.payload_bytes,)
        header = self.headers.ctypes.data + size * np.arange(count, dtype=np.int64)
        return Buffers(
            np.concatenate([header[:, None], self.address], axis=1).ravel(),
            np.tile(np.array([size, *lengths], np.int64), count),
            np.arange(count + 1, dtype=np.int64) * (len(lengths) + 1),
            (self,),
        )


class Host(Protocol):
    """What a chain needs of the worker it runs for."""

    lane: Lane
    clock: Clock
    staging: StagingBudget

    def fault(self, error: Exception) -> None:
        """Keep an unexpected exception."""
        ...

    def settle(self, verb: str, op: Op, codes: Codes) -> None:
        """Give an operation its terminal."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a chain is to do.

    Attributes:
        verb: names counters.
        shards: the columns of its work.
        blocks: int64[n], or [n, pages of a record]: the rows of its work.
        deadline: no batch is begun after it (A9).
        issue: starts a batch, given its landing, pages and column.
        check: judges what landed, given the tier's codes too; returns the codes that count.
        after: called first.
        staged: payloads are changed on the way, so none may lie in the pages themselves.
    """

    verb: str
    shards: list[Shard]
    blocks: NDArray[np.int64]
    deadline: float
    issue: Callable[[Landing, slice, int], Op]
    check: Callable[[Landing, slice, int, Codes], Codes] = lambda _landing, _pages, _column, codes: codes
    after: Callable[[], object] = lambda: None
    staged: bool = False


class Chain:
    """Runs a job; `op` settles with u8[n], the worst code of each page over its shards (E3).

    Exactly one continuation exists at any time, so its state needs no lock.
    """

    def __init__(self, host: Host, job: Job) -> None:
        self.op: Op = Pending()
        self._host, self._job = host, job
        # What nobody decides otherwise has failed; no column at all means that others do the work.
        self._codes = np.full((len(job.blocks), len(job.shards)), Code.FAILED, np.uint8)
        self._batches = deque(
            (column, slice(at, at + shard.batch_records))
            for column, shard in enumerate(job.shards)
            for at in range(0, len(job.blocks), shard.batch_records)
        )
        self._granted = 0
        self._flying: tuple[Landing, Op] | None = None

    def start(self) -> None:
        """Begin, in the lane."""
        self._submit(self._first)

    def _submit(self, step: Callable[[], None]) -> None:
        try:
            self._host.lane.submit(step)
        except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
            self._host.fault(error)
            self._finish()

    def _resume(self, _value: object = None) -> None:
        self._submit(self._go_on)

    def _first(self) -> None:
        try:
            self._job.after()
        except Exception as error:  # noqa: BLE001 - kept; pages that were not written are not saved (C2)
            self._host.fault(error)
            self._batches.clear()
        self._go_on()

    def _go_on(self) -> None:
        """Work until something has to be waited for, which resumes, or nothing is left."""
        while self._batches:
            try:
                if not self._step():
                    return  # another thread may be here already: touch nothing
            except Exception as error:  # noqa: BLE001 - kept; what befalls a batch befalls no other (H1)
                self._host.fault(error)
                self._land(Code.REFUSED if isinstance(error, UsageFault) else Code.FAILED)
        self._finish()

    def _step(self) -> bool:
        """One move of the first batch; False if the chain will be resumed."""
        if self._flying is not None:
            landing, op = self._flying
            if not op.done:
                op.on_done(self._resume)
                return False
            if op.value.shape != (len(landing.blocks),):  # A15
                raise InternalFault(
                    f"a tier answered {op.value.shape} codes for {len(landing.blocks)} records"
                )
            column, pages = self._batches[0]
            self._land(self._job.check(landing, pages, column, op.value))
            return True
        if self._host.clock() > self._job.deadline:
            while self._batches:
                self._land(Code.EXPIRED)
            return True
        return self._issue()

    def _issue(self) -> bool:
        column, pages = self._batches[0]
        shard, blocks = self._job.shards[column], self._job.blocks[pages]
        direct = shard.direct and not self._job.staged
        need = 0 if direct else len(blocks) * shard.record.payload_bytes

        def granted() -> None:
            self._granted = need
            self._resume()

        if need and not self._granted:
            if not self._host.staging.take(need, granted):
                return False
            self._granted = need
        landing = Landing(shard, blocks, staged=not direct)
        self._flying = landing, self._job.issue(landing, pages, column)
        return True

    def _land(self, codes: Codes | Code) -> None:
        """End the first batch."""
        self._flying = None
        self._give_back()
        column, pages = self._batches.popleft()
        self._codes[pages, column] = codes

    def _give_back(self) -> None:
        granted, self._granted = self._granted, 0
        if granted:
            self._host.staging.give_back(granted)

    def _finish(self) -> None:
        self._give_back()
        worst = self._codes.max(axis=1, initial=Code.OK).astype(np.uint8)
        self._host.settle(self._job.verb, self.op, worst)
