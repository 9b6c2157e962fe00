"""The disk tier: records in files of one directory with one owner, that survive restart and `kill -9`.

`DiskStore` keeps the records; here is what makes it a tier: look-ups, operations, barriers, losses.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count as numbers
from pathlib import Path
from typing import Final

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending, all_of
from kvcontract.pool.keys import FleetSecret
from kvcontract.tiers.base import (
    HANDOFF_TTL_S,
    RECORD_KEY,
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
from kvcontract.tiers.disk_files import BLOCK_BYTES, Files
from kvcontract.tiers.disk_holds import Holds
from kvcontract.tiers.disk_home import Meta, enter
from kvcontract.tiers.disk_store import DiskStore
from kvcontract.tiers.disk_work import Work

COMMIT_RECORDS: Final = 1024
COMMIT_DELAY_S: Final = 1.0
"""While saves go on, what they stored becomes durable when so many records wait, or so long has passed."""

_SEGMENT_BYTES: Final = 64 * 2**20
_FEW_SEGMENTS, _MANY_SEGMENTS = 16, 128


class DiskTier:
    """Records in a directory.

    Look-ups are answered from memory.  A record is findable when all its bytes are written, and durable once
    the index names it: in batches while saves go on, when none is running any more, by `flush("durable")`,
    and at `close`.  After a crash a key is absent or has the bytes that were saved (R7).  Each record is
    checked when it is read: that its place holds it, by the tier, and its bytes by who reads it; one that is
    damaged is forgotten and counted.  Leases and handoffs end with the process: nobody but the owner of the
    directory could have fetched what they kept.

    Args:
        directory: of the store, made if need be; `disk_home` says what is in it.
        capacity_bytes: quota of the files that hold records, the index not counted.  Less than last time
            evicts what is above it.
        lane: where records are read and written; stays the caller's to close, after this.  None makes some
            that `close` ends: one for loads, which do not wait behind saves, one for saves, one that commits.
        clock: what deadlines are measured on.
        name: labels statistics.
        workers: records that are read, and written, at one time in own lanes.
        segment_bytes: of each file; None: 64 MiB, or what makes 16 to 128 files of the first time's quota.
        meta: what the store is made for, such as its `max_tp`; opened again, it must be the same.
        fresh: where the directory holds a store of another format version, use ``<directory>.format<N>``
            beside it instead of refusing; the old one is not touched.
        direct: use direct I/O; None: where the file system can, with a warning where it cannot.
        files: through which the disk is reached.
        handoff_ttl_s: how long a handoff is kept if nobody releases it.

    Attributes:
        faults: the latest unexpected exceptions.

    Raises:
        UsageFault: no capacity or workers; or the directory has another owner, is of another format, was made
            for something else, or is no store.  All faults are named.
        OSError, sqlite3.Error: the disk cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        lane: Lane | None = None,
        clock: Clock = time.monotonic,
        name: str = "disk",
        workers: int = 4,
        segment_bytes: int | None = None,
        meta: Meta | None = None,
        fresh: bool = False,
        direct: bool | None = None,
        files: Files | None = None,
        handoff_ttl_s: float = HANDOFF_TTL_S,
    ) -> None:
        faults = [f"a capacity of {capacity_bytes} B; expected at least {BLOCK_BYTES} B"]
        faults = faults[: capacity_bytes < BLOCK_BYTES]
        if workers < 1:
            faults.append(f"{workers} workers; expected at least 1")
        if faults:
            raise UsageFault(f"tier {name!r}: {'; '.join(faults)}")
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._loss_callbacks: dict[int, Callable[[RecordKeys, str], object]] = {}
        self._numbers = numbers(1)
        self._left = False
        self._commit_queued = False
        self._committed_at = clock()
        self._known_losses = 0
        files = files or Files()
        home = enter(
            Path(directory).absolute(),
            files,
            segment_bytes=segment_bytes,
            default_bytes=_segment_bytes(capacity_bytes),
            meta=meta or {},
            fresh=fresh,
        )
        self._work = Work(name, lane, workers)
        try:
            self._store = DiskStore(home, files, capacity_bytes, direct=direct, on_fault=self._work.fault)
        except BaseException:
            self._work.close(0.0)
            raise
        self._holds = Holds(name, self._store, clock, handoff_ttl_s)

    @property
    def name(self) -> str:
        """Labels statistics."""
        return self._name

    @property
    def faults(self) -> deque[Exception]:
        """The latest unexpected exceptions."""
        return self._work.faults

    @property
    def directory(self) -> Path:
        """Where the store is; another than asked for if a fresh one was begun beside it."""
        return self._store.home.path

    @property
    def foreign_files(self) -> tuple[str, ...]:
        """Names in the directory that are not ours; they are left alone."""
        return self._store.home.foreign

    def kept_secret(self) -> FleetSecret | None:
        """The fleet's secret that lies with the records, mode 0600; None: nobody has made one.

        Raises:
            UsageFault: others may read the file, or it holds something else.
        """
        return self._store.secret(create=False)

    def keep_secret(self, secret: FleetSecret) -> FleetSecret:
        """Keep a secret, unless there is one already; returns the one that is kept.

        Raises:
            UsageFault: as `kept_secret`.
        """
        return self._store.secret(create=secret) or secret

    @property
    def capabilities(self) -> Capabilities:
        """Persistent, and this process's alone; memory is used as it is where the device allows it."""
        return Capabilities(persistent=True, shared=False, max_record_bytes=self._store.max_record_bytes)

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """See `Tier.lookup`; answers at once."""
        try:
            lease = self._lookup(keys, deadline)
        except Exception as error:  # noqa: BLE001 - kept; a lookup that fails finds nothing (A10)
            self._work.fault(error)
            lease = Lease.nothing(self._name, len(keys), failed=True)
        return Pending.of(lease)

    def _lookup(self, keys: RecordKeys, deadline: float) -> Lease:
        wanted = key_bytes(keys)
        if self._work.closed or self._clock() > deadline:
            self._work.count("lookup_refused" if self._work.closed else "lookup_expired")
            return Lease.nothing(self._name, len(keys))
        lease = self._holds.lease(wanted)
        found = int(lease.present.sum())
        self._work.count("hits", found)
        self._work.count("misses", len(wanted) - found)
        return lease

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        count = len(rows)
        if lease.tier != self._name or len(buffers) != count:
            return self._work.ended("load", count, Code.REFUSED)
        entries = self._holds.pin_rows(lease, rows)
        if entries is None:
            return self._work.ended("load", count, Code.EXPIRED)
        pieces = buffers.pieces()

        def one(row: int) -> Code:
            entry = entries[row]
            if isinstance(entry, Code):
                return entry
            if self._clock() > deadline:
                return Code.EXPIRED  # A9
            return self._store.get(*entry, pieces[row])

        def unpin() -> None:
            self._store.unpin(entry[0] for entry in entries if not isinstance(entry, Code))

        return self._work.start(
            "load", one, buffers, undo=unpin, before=self._tell_losses, after=self._commit_soon
        )

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
        if len(buffers) != count:
            return self._work.ended("save", count, Code.REFUSED)
        hold = self._holds.name(handoff) if cls is SaveClass.HANDOFF else None
        names, pieces = key_bytes(keys), buffers.pieces()

        def one(row: int) -> Code:
            if self._clock() > deadline:
                return Code.EXPIRED  # A9
            self._holds.settle()  # what was given back may be evicted for this
            slot = self._store.put(names[row], pieces[row], pinned=hold is not None)
            if isinstance(slot, Code):
                return slot
            if hold is not None:
                self._holds.keep(hold, slot)
            self._commit_soon(saving=True)
            return Code.OK

        return self._work.start(
            "save", one, buffers, undo=lambda: None, before=self._tell_losses, after=self._commit_soon
        )

    def discard(self, lease: Lease, rows: Rows) -> None:
        """See `Tier.discard`."""
        if lease.tier == self._name:
            self._store.drop(self._holds.slots(lease, rows), "discarded")
            self._tell_losses()
            self._commit_soon()

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`."""
        number = next(self._numbers)
        self._loss_callbacks[number] = callback

        def end() -> None:
            self._loss_callbacks.pop(number, None)

        return end

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; handoffs end with it.

        Nothing can be found from now on, and nothing comes back after a crash once it settles with True.
        """
        self._holds.settle()
        self._holds.release_all()
        self._store.forget()
        return self._committed([], deadline)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """See `Tier.flush`; landed is visible here, and durable is a commit more."""
        saves = self._work.running("save")
        if level == "durable":
            return self._committed(saves, deadline)
        return all_of(saves).map(lambda _: self._clock() <= deadline)

    def _committed(self, saves: Sequence[Op], deadline: float) -> Pending[bool]:
        """Whether a commit after some saves is durable, in time."""
        answer: Pending[bool] = Pending()
        known = self._known_losses

        def commit() -> None:
            done = self._clock() <= deadline and self._commit()  # else nothing more is begun (A9)
            losses = self._store.sync_losses
            self._known_losses = losses
            # What an earlier commit lost was submitted before us too, unless a barrier has told it by then.
            answer.settle(done and losses == known and self._clock() <= deadline)

        def submit(_: object) -> None:
            if not self._work.submit("commit", commit):
                answer.settle(False)

        all_of(saves).on_done(submit)
        return answer

    def release_handoff(self, lease_id: str) -> None:
        """See `Tier.release_handoff`; early."""
        self._holds.release(lease_id)

    def stats(self) -> dict[str, int]:
        """Gauges (bytes, records, leases, handoffs, operations) and counters (by verb, code and flaw)."""
        return {**self._store.figures(), **self._holds.figures(), **self._work.figures()}

    def close(self, deadline: float) -> bool:
        """See `Tier.close`; what was saved is durable, and the directory somebody else's to open."""
        try:
            all_of(self._work.shut()).wait(deadline - self._clock())
        except TimeoutError:
            return False  # operations still read and write the files, which stay open and locked (C10)
        if not self._work.close(deadline - self._clock()):
            return False
        self._holds.settle()
        self._holds.release_all()
        with self._lock:
            again, self._left = self._left, True
        return again or self._store.close()

    def _commit_soon(self, *, saving: bool | None = None) -> None:
        """See that what changed becomes durable: when the saves pause, or enough has come together."""
        waiting = self._store.uncommitted
        if not waiting or self._commit_queued or self._work.closed:
            return
        late = waiting >= COMMIT_RECORDS or self._clock() - self._committed_at >= COMMIT_DELAY_S
        if not (late or self._store.short) and (saving or self._work.saving()):
            return  # whoever settles last asks again
        with self._lock:
            queued, self._commit_queued = self._commit_queued, True
        if not queued and not self._work.submit("commit", self._commit):
            self._commit_queued = False

    def _commit(self) -> bool:
        self._commit_queued = False
        self._committed_at = self._clock()
        try:
            whole = self._store.commit()
        except Exception as error:  # noqa: BLE001 - kept and counted; the next commit tries again
            self._work.fault(error)
            self._work.count("commits_failed")
            return False
        self._tell_losses()
        return whole

    def _tell_losses(self) -> None:
        """Say what is lost; with no lock held, since whoever hears it may call back."""
        for names, reason in zip(self._store.take_losses(), ("evicted", "quarantined"), strict=True):
            if not names:
                continue
            keys: RecordKeys = np.frombuffer(b"".join(names), RECORD_KEY)
            for callback in tuple(self._loss_callbacks.values()):
                try:
                    callback(keys, reason)
                except Exception as error:  # noqa: BLE001 - kept; an operation must still settle (R8)
                    self._work.fault(error)


def _segment_bytes(capacity_bytes: int) -> int:
    few, many = capacity_bytes // _FEW_SEGMENTS, capacity_bytes // _MANY_SEGMENTS
    return max(BLOCK_BYTES, many, min(_SEGMENT_BYTES, few))
