"""The shared tier: a directory for the records of many processes and hosts.

One file a record, put in place whole; no index, no lock, no server.  Every member counts, evicts and sweeps
for itself, and what a member leaves behind when it dies ends by time alone (R5, R7).  A mount that goes away
means misses and saves that fail; when it is back, work goes on (H9).

It cannot tell losses: another member may evict.  Where a mount caches what others do (NFS: attributes, for
seconds), a lease of another host may be seen late: its reader then finds a record gone, which is a miss.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Lane, ThreadLane
from kvcontract.core.pending import Pending, all_of
from kvcontract.pool.keys import FleetSecret
from kvcontract.tiers.base import (
    HANDOFF_TTL_S,
    Buffers,
    Capabilities,
    Clock,
    Code,
    Lease,
    Level,
    Op,
    RecordKeys,
    Rows,
    SaveClass,
    key_bytes,
)
from kvcontract.tiers.shared_dir import FOOTER_BYTES, Piece, SharedDirectory, remove
from kvcontract.tiers.shared_leases import LeaseFiles, handoff_group
from kvcontract.tiers.shared_ops import Operations
from kvcontract.tiers.shared_reads import Reads
from kvcontract.tiers.shared_room import BLOCK_BYTES, Room, charged_bytes

LEASE_S: Final = 60.0
"""How long a reader's lease holds after its last use."""

_WORKERS: Final = 4
_SWEEP_S: Final = 60.0
_LEFTOVER_S: Final = 300.0
_TOUCH_S: Final = 10.0
_UNSYNCED: Final = 1 << 16  # records that may be less than durable at one time
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class SharedTier:
    """Records in a directory that other processes and hosts use too.

    Args:
        directory: on a file system that all members mount; made if it does not exist.
        capacity_bytes: quota; files count in blocks of 4 KiB.
        meta: what all members must agree on, such as ``{"max_tp": 8}``; plain JSON.
        lane: where all I/O runs; stays the caller's to close, after this. None makes one of some workers.
        clock: what deadlines are measured on; how long leases hold says the file system's own clock.
        name: labels statistics.
        handoff_ttl_s: how long a handoff is kept if nobody releases it.
        lease_s: how long a reader's lease holds after its last use.
        sweep_s: longest time between two walks through the directory while it is used.
        leftover_s: after which files that nobody finishes, and damaged ones, are swept.
        touch_s: how exactly the last use of a record is known.

    Raises:
        UsageFault: no capacity; or the directory holds something else, another format, another `meta`.
        EnvironmentFault: the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        meta: Mapping[str, Any] | None = None,
        lane: Lane | None = None,
        clock: Clock = time.monotonic,
        name: str = "shared",
        handoff_ttl_s: float = HANDOFF_TTL_S,
        lease_s: float = LEASE_S,
        sweep_s: float = _SWEEP_S,
        leftover_s: float = _LEFTOVER_S,
        touch_s: float = _TOUCH_S,
    ) -> None:
        if capacity_bytes < BLOCK_BYTES:
            raise UsageFault(
                f"tier {name!r}: a capacity of {capacity_bytes} B; expected at least {BLOCK_BYTES} B"
            )
        self._name, self._clock, self._handoff_ttl_s = name, clock, handoff_ttl_s
        self._home = home = SharedDirectory(Path(directory), meta or {})
        self._leases = leases = LeaseFiles(home)
        self._room = Room(
            home,
            leases,
            capacity_bytes,
            released=self._released_now,
            clock=clock,
            sweep_s=sweep_s,
            leftover_s=leftover_s,
        )
        self._own_lane = lane is None
        self._lane: Lane = ThreadLane(f"kvc-{name}", _WORKERS) if lane is None else lane
        self._ops = ops = Operations(self._lane, _WORKERS)
        self._reads = Reads(
            home, leases, self._room, ops, name=name, clock=clock, lease_s=lease_s, touch_s=touch_s
        )
        self._lock = threading.Lock()
        self._released: list[str] = []  # handoffs whose files are being taken away
        self._handoffs: dict[str, float] = {}  # of this member: when they end by themselves
        self._unnamed = numbers(1)
        self._unsynced: dict[str, None] = {}
        self._sweeping = False
        self._arrive()

    @property
    def name(self) -> str:
        """Labels statistics."""
        return self._name

    @property
    def faults(self) -> deque[Exception]:
        """The latest unexpected exceptions."""
        return self._ops.faults

    def kept_secret(self) -> FleetSecret | None:
        """The fleet's secret that lies with the records, mode 0600; None: nobody has made one.

        Raises:
            UsageFault: others may read the file, or it holds something else.
        """
        return self._home.secret(create=False)

    def keep_secret(self, secret: FleetSecret) -> FleetSecret:
        """Keep a secret, unless there is one already; returns the one that is kept.

        Raises:
            UsageFault: as `kept_secret`.
        """
        return self._home.secret(create=secret) or secret

    @property
    def capabilities(self) -> Capabilities:
        """Lasting and common; bytes move straight between files and the memory given."""
        blocks = self._room.capacity_bytes // BLOCK_BYTES
        return Capabilities(
            persistent=True,
            shared=True,
            zero_copy=True,
            max_record_bytes=blocks * BLOCK_BYTES - FOOTER_BYTES,
        )

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """See `Tier.lookup`; asks the file system in the lane.

        A lease holds as long as it is used, and `lease_s` longer: what its owner forgets, time ends.
        """
        self._arrive()
        return self._reads.lookup(keys, deadline)

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        self._arrive()
        return self._reads.load(lease, rows, buffers, deadline)

    def discard(self, lease: Lease, rows: Rows) -> None:
        """See `Tier.discard`; renames the records at once, so that nobody finds them any more."""
        self._reads.discard(lease, rows)

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """See `Tier.save`."""
        count = len(keys)
        self._arrive()
        if len(buffers) != count:
            return self._ops.ended("save", count, Code.REFUSED)
        op: Op = Pending()
        codes = np.full(count, Code.FAILED, np.uint8)

        def begin() -> None:
            names, pieces = [key.hex() for key in key_bytes(keys)], buffers.pieces()
            self._home.check()
            held = None
            if cls is SaveClass.HANDOFF and count and self._clock() <= deadline:
                held = self._hold(handoff, names)

            def work(part: range) -> None:
                for at in part:
                    codes[at] = self._ops.each(partial(self._save_one, names[at], pieces[at], deadline))

            def then() -> None:
                if held is not None and not (codes == Code.OK).any():
                    self._ops.background(partial(remove, held))
                self._ops.end_records("save", op, codes)

            self._ops.spread(count, work, then)

        if not self._ops.start("save", op, begin, lambda: self._ops.end_records("save", op, codes)):
            return self._ops.ended("save", count, Code.REFUSED)
        return op

    def _hold(self, handoff: str | None, names: list[str]) -> str:
        """Lease what a handoff is about to save; returns the lease's path."""
        name = handoff or f"{self._home.instance}-{next(self._unnamed)}"
        ends = self._clock() + self._handoff_ttl_s
        path = self._leases.handoff(name, names, self._handoff_ttl_s)
        with self._lock:
            self._handoffs.setdefault(handoff_group(name), ends)
        return path

    def _save_one(self, name: str, pieces: list[Piece], deadline: float) -> Code:
        size = sum(length for _, length in pieces)
        charge = charged_bytes(size)
        if self._clock() > deadline:
            return Code.EXPIRED
        if size < 1:
            return Code.REFUSED  # what has no bytes cannot be told from what lost them
        if charge > self._room.capacity_bytes:
            return Code.TOO_LARGE  # H7
        if self._home.found(name) is not None:
            return Code.OK  # H2
        for full in (False, True):
            if not self._room.reserve(charge, full=full):
                break
            try:
                self._room.place(self._home.write(name, pieces, size), name, charge)
            except OSError as error:
                self._room.give_back(charge)
                if error.errno not in _NO_ROOM:
                    raise
            else:
                self._written(name)
                return Code.OK
        return Code.FULL

    def _written(self, name: str) -> None:
        with self._lock:
            self._unsynced[name] = None
            oldest = next(iter(self._unsynced)) if len(self._unsynced) > _UNSYNCED else None
            if oldest is not None:
                del self._unsynced[oldest]
        if oldest is not None:
            self._home.sync([oldest])

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; for every member.  Handoffs end with it; what is leased can be read on."""
        pending: Pending[bool] = Pending()
        self._arrive()

        def begin() -> None:
            self._leases.end_handoff("")
            self._room.forget()
            with self._lock:
                self._handoffs.clear()
            self._ops.end(pending, self._clock() <= deadline)

        if not self._ops.start("reset", pending, begin, lambda: self._ops.end(pending, value=False)):
            pending.settle(False)
        return pending

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """See `Tier.flush`; landed is visible here, and durable means fsync of files and folders."""
        out: Pending[bool] = Pending()
        self._arrive()

        def sync() -> None:
            with self._lock:
                names, self._unsynced = list(self._unsynced), {}
            try:
                self._home.sync(names)
            except OSError:
                with self._lock:
                    self._unsynced = {**dict.fromkeys(names), **self._unsynced}
                raise
            self._ops.end(out, self._clock() <= deadline)

        def landed(_: object) -> None:
            if level != "durable":
                out.settle(self._clock() <= deadline)
            elif not self._ops.start("flush", out, sync, lambda: self._ops.end(out, value=False)):
                out.settle(False)

        all_of(self._ops.running("save")).on_done(landed)
        return out

    def release_handoff(self, lease_id: str) -> None:
        """See `Tier.release_handoff`; early, whichever member saved the records."""
        group = handoff_group(lease_id)
        with self._lock:
            self._handoffs.pop(group, None)
            self._released.append(group)  # for this member it has ended now, wherever its files are
        self._arrive()

        def begin() -> None:
            try:
                self._leases.end_handoff(group)
            finally:
                with self._lock:
                    self._released.remove(group)

        self._ops.background(begin)

    def _released_now(self) -> frozenset[str]:
        with self._lock:
            return frozenset([*self._released, *self._reads.ended])

    def stats(self) -> dict[str, int]:
        """Gauges (bytes, records, leases, handoffs, operations) and counters (by verb and code)."""
        self._arrive()
        room = self._room
        gauges = {
            "capacity_bytes": room.capacity_bytes,
            "used_bytes": room.used_bytes,
            "records": room.records,
            "leases": self._reads.leased,
            "handoffs": len(self._handoffs),
            "operations": self._ops.open,
            "evictions": room.evictions,
            "swept": room.swept,
            "foreign": room.foreign,
        }
        counters = dict.fromkeys(("hits", "misses", "save_ok", "load_ok", "quarantined", "faults"), 0)
        return {**gauges, **counters, **self._ops.counted()}

    def close(self, deadline: float) -> bool:
        """See `Tier.close`; records and handoffs stay, this member's leases end."""
        self._reads.settle_returns()
        running = self._ops.close()
        left: Pending[None] = Pending()

        def leave() -> None:
            try:
                self._reads.leave()
                self._home.leave()
            except OSError as error:
                self._ops.fault(error)  # time ends them
            left.settle(None)

        try:
            all_of(running).wait(deadline - self._clock())
            if self._ops.submit(leave):
                left.wait(deadline - self._clock())
        except TimeoutError:
            return False
        return self._lane.close(max(0.0, deadline - self._clock())) if self._own_lane else True

    def _arrive(self) -> None:
        """Every entry begins with this: take back what leases gave back, and see whether a walk is due."""
        self._reads.settle_returns()
        with self._lock:
            now = self._clock() if self._handoffs else 0.0
            self._handoffs = {name: ends for name, ends in self._handoffs.items() if ends > now}
            sweep = not self._sweeping and self._room.due()
            self._sweeping = self._sweeping or sweep
        if sweep:
            self._ops.background(self._sweep)

    def _sweep(self) -> None:
        try:
            self._room.sweep()
        finally:
            with self._lock:
                self._sweeping = False
