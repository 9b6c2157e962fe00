"""The worker: runs a rank's copy operations between its device memory and the tiers.

A rank decides; a worker is told (names, block ids) and answers with one code a record, which is one page or
several.  Saving gathers its fields into wire order, sums its segments, puts a frame before them and hands
address and length to a tier.  Loading is the same backwards, and nothing is reported OK before its frame and
every segment have been checked as they landed (E7).  Pages of a record whose code is not OK hold undefined
bytes.

Between pages and the memory of a tier that lends it, a mover copies straight, and sums as it goes: in threads
where pages lie in host memory, beside a device in its streams, several batches at a time.  Other tiers reach
pages in host memory themselves; what lies on a device, is converted or encrypted passes through staging.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import Layout
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import Part, fingerprint, parts, wire_record
from kvcontract.core.lane import Lane, ThreadLane, Urgency
from kvcontract.core.pending import Pending, all_of
from kvcontract.memory.binding import Binding
from kvcontract.memory.copy import Blocks
from kvcontract.memory.device import DeviceMover
from kvcontract.memory.host_mover import HostMover
from kvcontract.memory.match import holds
from kvcontract.memory.repack import compile_program
from kvcontract.memory.staging import Staging
from kvcontract.memory.stream import StreamEvent
from kvcontract.store.chain import Chain, Job
from kvcontract.store.landing import Mover, PageKeys, Shard
from kvcontract.store.steps import Load, Save
from kvcontract.tiers.base import Clock, Code, Codes, Lease, Op, RecordKeys, Rows, SaveClass, Tier
from kvcontract.tiers.cipher import NO_KEY, KeyId, RecordCipher

BATCH_BYTES: Final = 32 * 2**20
"""Payload that one batch moves: what a later, more urgent operation may have to wait for."""

STAGING_BYTES: Final = 4 * BATCH_BYTES
"""Memory of a worker whose pages lie in host memory, for what cannot be moved as it lies."""

RING_BYTES: Final = 8 * BATCH_BYTES
"""Pinned memory of a worker beside a device, for each direction, taken at the first use of a tier that lends
none of its own."""

DEPTH: Final = 4
"""Batches of one operation that are on their way at one time, where a device copies."""

HOST_DEPTH: Final = 2
"""The same of pages in host memory: threads copy one while frames are made, or checked, for another."""

_KEPT_FAULTS: Final = 16

After = Callable[[], object] | StreamEvent
"""What the writing of pages is known by (C2): a function that waits for it, or an event of a device."""


class Worker:
    """One worker of a rank.

    Args:
        model: the declaration.
        layout_: what this worker holds.
        bindings: memory of each space that has stored groups, by its key.
        max_tp: largest degree of tensor parallelism that may share the records.
        lane: where copies and checks run; None makes one, which `close` ends.
        clock: what deadlines are measured on.
        staging_bytes: memory that operations may stage through at one time; beside a device, each way. None:
            STAGING_BYTES, or RING_BYTES.
        batch_bytes: payload that is moved between two looks at the deadline, and at what is more urgent.
        mover: who copies; None: threads of its own or `lane`, or where pages lie on a device, streams of its
            own.
        cipher: of what leaves the process; None: nothing is encrypted.

    Attributes:
        parts: what can be saved and loaded.
        mover: who copies.
        depth: batches of one operation that are on their way at one time.
        faults: the latest unexpected exceptions.

    Raises:
        UsageFault: declaration, layout and memory do not fit each other.
        PluginFault: a conversion cannot be found.
    """

    def __init__(
        self,
        model: KvModel,
        layout_: Layout,
        bindings: Mapping[str, Binding],
        *,
        max_tp: int,
        lane: Lane | None = None,
        clock: Clock = time.monotonic,
        staging_bytes: int | None = None,
        batch_bytes: int = BATCH_BYTES,
        mover: Mover | None = None,
        cipher: RecordCipher | None = None,
    ) -> None:
        self._cipher = cipher
        self.parts = parts(model)
        self.faults: deque[Exception] = deque(maxlen=_KEPT_FAULTS)
        missing = [part.space for part in self.parts if part.space not in bindings]
        if missing:
            raise UsageFault(f"no binding for space(s) {', '.join(missing)}")
        identity = fingerprint(model).parts
        self._shards = {
            part.name: _shards(
                model, part, layout_, bindings[part.space], max_tp, batch_bytes, identity[part.name]
            )
            for part in self.parts
        }
        self._own_lane = lane is None
        self.lane: Lane = ThreadLane(f"kvc-worker-{layout_.worker}") if lane is None else lane
        self.clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        # In order: what is awaited must not depend on addresses.  Whoever forgets what he was to settle does
        # not thereby end a chain, whose memory may still be written (R3).
        self._running: dict[Op, Chain] = {}
        self._closed = False
        self.mover = mover or self._own_mover(bindings, lane)
        self.depth = DEPTH if self.mover.remote else HOST_DEPTH
        for shard in self._every_shard():
            shard.moved_by(self.mover)
        if self.mover.remote:
            size, allocate = staging_bytes or RING_BYTES, self.mover.allocate
            self.staging = {verb: Staging(size, allocate) for verb in ("save", "load")}
        else:
            self.staging = dict.fromkeys(("save", "load"), Staging(staging_bytes or STAGING_BYTES))

    def _own_mover(self, bindings: Mapping[str, Binding], lane: Lane | None) -> Mover:
        """The one for where the pages lie."""
        devices = {bindings[part.space].device for part in self.parts}
        if all(device.type != "cuda" for device in devices):
            return HostMover(self.fault, lane)
        if len(devices) > 1:
            raise UsageFault(f"one worker's memory on several devices: {sorted(map(str, devices))}")
        largest = max(shard.batch_records * shard.record.payload_bytes for shard in self._every_shard())
        return DeviceMover(devices.pop(), largest, self.fault)

    def _every_shard(self) -> list[Shard]:
        return [shard for shards in self._shards.values() for shard in shards]

    def shards(self, part: Part) -> int:
        """Records that this worker reads for one page of a part."""
        return len(self._shards[part.name])

    def reads(self, part: Part) -> tuple[int, ...]:
        """Numbers of those records' shards."""
        return tuple(shard.record.shard for shard in self._shards[part.name])

    def writes(self, part: Part) -> tuple[int, ...]:
        """Numbers of the shards that it stores; others store the rest."""
        return tuple(shard.record.shard for shard in self._shards[part.name] if shard.writes)

    def record_bytes(self, part: Part, shard: int) -> int:
        """Bytes of one record, frame included."""
        found = next(item for item in self._shards[part.name] if item.record.shard == shard)
        return found.record_bytes

    def record_keys(self, part: Part, page_keys: PageKeys) -> RecordKeys:
        """Keys of every record that this worker reads for some pages.

        Args:
            part: of `parts`.
            page_keys: uint64[n, 2].

        Returns:
            [n * shards(part)], page by page, and within a page shard by shard.
        """
        columns = [shard.keys(page_keys) for shard in self._shards[part.name]]
        joined: RecordKeys = np.stack(columns, axis=1).reshape(-1)
        return joined

    def save(
        self,
        tier: Tier,
        part: Part,
        page_keys: PageKeys,
        blocks: Blocks,
        cls: SaveClass,
        deadline: float,
        after: After | None = None,
        *,
        handoff: str | None = None,
        key: KeyId = NO_KEY,
    ) -> Op:
        """Save pages to a tier; never raises.

        The pages must not change before the operation settles (C1).

        Args:
            tier: where to.
            part: of `parts`.
            page_keys: uint64[n, 2], names of the records.
            blocks: int[n], where they lie in the part's space; [n, pages] if a record has several.
            cls: why.
            deadline: no batch is begun after it.
            after: when the pages have been written (C2): a function that waits, called once, in the lane; or
                an event, which the device waits for.
            handoff: see `Tier.save`.
            key: that the payloads are encrypted with.

        Returns:
            u8[n] of `Code`, a record's being OK only if all its shards are, else the worst of them (E3).
            A record of which another worker writes every shard is OK.
        """
        if len(blocks) != len(page_keys):
            return self._refused("save", len(page_keys), f"{len(blocks)} blocks for {len(page_keys)} pages")
        shards = [shard for shard in self._shards[part.name] if shard.writes]
        cipher = self._cipher if key != NO_KEY else None

        first: Callable[[], object] = _at_once
        event: StreamEvent | None = None
        if callable(after):
            first = after
        elif after is not None and not self.mover.remote:
            first = after.synchronize
        else:
            event = after
        ids = np.asarray(blocks, np.int64)
        steps = Save(self, tier, page_keys, ids, cls, deadline, handoff, event, cipher, key)
        return self._start(Job("save", shards, len(ids), deadline, cls.urgency, steps, first))

    def load(
        self,
        tier: Tier,
        lease: Lease,
        rows: Rows,
        part: Part,
        page_keys: PageKeys,
        blocks: Blocks,
        deadline: float,
        *,
        only: Sequence[int] | None = None,
        clear: bool | None = None,
    ) -> Op:
        """Load pages from a tier and check every byte of them (E7); never raises.

        A record that is not what it should be is counted, and the tier is told to forget it.  The lease must
        be held until the operation settles: batches that begin after its end are EXPIRED.

        Args:
            tier: where from.
            lease: of that tier, on keys from `record_keys`.
            rows: int[n * shards], the lease's rows in the order of `record_keys`.
            part: of `parts`.
            page_keys: uint64[n, 2], names of the records.
            blocks: int[n], where to put them, none twice; [n, pages] if a record has several, 0: left out.
            deadline: no batch is begun after it.
            only: numbers of the shards to read, in the order of `reads(part)`; None: all of them.
            clear: whether records in the clear are taken, from a tier whose records are encrypted; None: its
                records are not.

        Returns:
            u8[n] of `Code`; bytes of the pages of one that is not OK are undefined.
        """
        # long: the arguments, one a line, and what they mean
        every, count = self._shards[part.name], len(page_keys)
        shards = [shard for shard in every if only is None or shard.record.shard in only]
        ids = np.asarray(blocks, np.int64)
        if wrong := _mismatch(ids, len(rows), count, len(shards)):
            return self._refused("load", count, wrong)
        table = np.asarray(rows, np.int64).reshape(count, len(shards))

        cipher = None if clear is None else self._cipher
        steps = Load(self, tier, lease, table, page_keys, ids, deadline, cipher, clear=bool(clear))
        return self._start(Job("load", shards, count, deadline, Urgency.RESTORE, steps))

    def stats(self) -> dict[str, int]:
        """Gauges (operations, staging_bytes) and counters (pages by verb and code, records by flaw)."""
        used = sum(staging.used_bytes for staging in set(self.staging.values()))
        with self._lock:
            return {
                "operations": len(self._running),
                "staging_bytes": used,
                **self.mover.stats(),
                **dict.fromkeys(("save_ok", "load_ok", "faults"), 0),
                **self._counts,
            }

    def close(self, deadline: float) -> bool:
        """Take no more work and wait for what runs; False if something still does (C10)."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        try:
            all_of(running).wait(deadline - self.clock())
        except TimeoutError:
            return False
        ended = self.mover.close(max(0.0, deadline - self.clock()))
        return (self.lane.close(max(0.0, deadline - self.clock())) and ended) if self._own_lane else ended

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += by

    def fault(self, error: Exception) -> None:
        """Keep an unexpected exception."""
        self.faults.append(error)
        self.count("faults")

    def settle(self, verb: str, op: Op, codes: Codes) -> None:
        """Give an operation its one terminal, counted (R8)."""
        for code, number in enumerate(np.bincount(codes).tolist()):
            if number:
                self.count(f"{verb}_{Code(code).name.lower()}", number)
        with self._lock:
            self._running.pop(op, None)
        op.settle(codes)

    def _refused(self, verb: str, pages: int, reason: str) -> Op:
        self.fault(UsageFault(f"{verb} refused: {reason}"))
        op: Op = Pending()
        self.settle(verb, op, np.full(pages, Code.REFUSED, np.uint8))
        return op

    def _start(self, job: Job) -> Op:
        chain = Chain(self, job)
        with self._lock:
            refused = self._closed
            if not refused:
                self._running[chain.op] = chain
        if refused:
            return self._refused(job.verb, job.pages, "the worker is closed")
        chain.start()
        return chain.op


def _mismatch(ids: Blocks, rows: int, pages: int, shards: int) -> str:
    """What does not fit in the arguments of a load; empty if all does."""
    used = ids[ids != 0] if ids.ndim > 1 else ids
    distinct = len(np.unique(used))
    if len(ids) == pages and distinct == used.size and rows == pages * shards:
        return ""
    found = f"{used.size} blocks, {distinct} distinct, and {rows} rows for {pages} pages"
    return f"{found} of {shards} records each"


def _at_once() -> None:
    """Nothing to wait for."""


def _shards(
    model: KvModel,
    part: Part,
    layout_: Layout,
    binding: Binding,
    max_tp: int,
    batch_bytes: int,
    identity: bytes,
) -> list[Shard]:
    """The shards of a part of which this worker holds anything."""
    count = part.shards(max_tp)
    worker, tp = layout_.worker, layout_.tp
    found = []
    for number in range(count):
        record = wire_record(model, part, number, count)
        if not holds(record, worker, tp):
            continue
        program = compile_program(model, binding, record, worker, tp)
        earlier = any(holds(record, other, tp, whole=True) for other in range(worker))
        writes = program.complete and not earlier
        found.append(Shard(record, program, identity, writes=writes, batch_bytes=batch_bytes))
    return found
