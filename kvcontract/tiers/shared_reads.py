"""The reading side of a shared tier: look-ups that lease, loads under a lease, records found damaged."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Buffers, Clock, Code, Lease, Op, RecordKeys, Rows, key_bytes
from kvcontract.tiers.shared_dir import Piece, SharedDirectory, remove
from kvcontract.tiers.shared_leases import LeaseFiles
from kvcontract.tiers.shared_ops import Operations
from kvcontract.tiers.shared_room import Room


@dataclass(slots=True, eq=False)
class _Receipt:
    """What a lease holds: per key the record's name and inode, 0 if absent; its file stays while used."""

    names: list[str]
    inodes: list[int]
    path: str
    touched: float
    uses: int = 1
    held: bool = True


class Reads:
    """Look-ups and loads of one member.

    Args:
        home: the directory.
        leases: its leases.
        room: its quota, which is told of records that are set aside.
        ops: where everything runs.
        name: of the tier.
        clock: what deadlines are measured on.
        lease_s: how long a lease holds after its last use.
        touch_s: how exactly the last use of a record is known.
    """

    def __init__(
        self,
        home: SharedDirectory,
        leases: LeaseFiles,
        room: Room,
        ops: Operations,
        *,
        name: str,
        clock: Clock,
        lease_s: float,
        touch_s: float,
    ) -> None:
        self._home, self._leases, self._room, self._ops = home, leases, room, ops
        self._name, self._clock, self._lease_s, self._touch_s = name, clock, lease_s, touch_s
        self._lock = threading.Lock()
        self._live: dict[_Receipt, None] = {}
        # Filled by leases, without the lock: a lease may be released by the garbage collector, anywhere.
        self._returned: deque[_Receipt] = deque()

    @property
    def leased(self) -> int:
        """Leases that are held."""
        with self._lock:
            return sum(receipt.held for receipt in self._live)

    @property
    def ended(self) -> list[str]:
        """Paths of leases that nobody uses any more; their files are being taken away."""
        with self._lock:
            return [receipt.path for receipt in self._live if not receipt.uses]

    def settle_returns(self) -> None:
        """Take back what leases gave back; whoever enters the tier begins with this."""
        while self._returned:
            receipt = self._returned.popleft()
            receipt.held = False
            self._unuse(receipt)

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """See `Tier.lookup`."""
        pending: Pending[Lease] = Pending()
        count = len(keys)

        def failed() -> None:
            self._ops.count("lookup_failed")
            self._ops.end(pending, Lease.nothing(self._name, count, failed=True))

        def begin() -> None:
            if self._clock() > deadline:
                self._ops.count("lookup_expired")
                self._ops.end(pending, Lease.nothing(self._name, count))
                return
            names = [key.hex() for key in key_bytes(keys)]
            self._home.check()
            self._look(names, pending)

        if not self._ops.start("lookup", pending, begin, failed):
            self._ops.count("lookup_refused")
            pending.settle(Lease.nothing(self._name, count))
        return pending

    def _look(self, names: list[str], pending: Pending[Lease]) -> None:
        inodes = [0] * len(names)
        trouble: deque[OSError] = deque()

        def look(rows: range) -> None:
            try:
                for row in rows:
                    found = self._home.found(names[row])
                    inodes[row] = 0 if found is None else found.st_ino
            except OSError as error:
                trouble.append(error)

        def then() -> None:
            if not trouble:
                try:
                    self._ops.end(pending, self._lease(names, inodes))
                except OSError as error:
                    trouble.append(error)
                else:
                    return
            self._ops.fault(trouble[0])
            self._ops.count("lookup_failed")
            self._ops.end(pending, Lease.nothing(self._name, len(names), failed=True))

        self._ops.spread(len(names), look, then)

    def _lease(self, names: list[str], inodes: list[int]) -> Lease:
        """Lease what was found, then look whether it is still there: so nothing slips through between."""
        receipt = self._confirmed(names, inodes) if any(inodes) else None
        hits = sum(inode > 0 for inode in inodes)
        self._ops.count("hits", hits)
        self._ops.count("misses", len(names) - hits)
        if receipt is None:
            return Lease.nothing(self._name, len(names))
        present = np.array(inodes, np.uint64) > 0
        return Lease(self._name, present, receipt=receipt, release=lambda: self._returned.append(receipt))

    def _confirmed(self, names: list[str], inodes: list[int]) -> _Receipt | None:
        rows = [row for row, inode in enumerate(inodes) if inode]
        touched = self._clock()
        path, now_ns = self._leases.read_lease([names[row] for row in rows], self._lease_s)
        receipt = _Receipt(names, inodes, path, touched)
        with self._lock:
            self._live[receipt] = None
        try:
            for row in rows:
                found = self._home.found(names[row])
                inodes[row] = 0 if found is None else found.st_ino
                if found is not None and now_ns - found.st_mtime_ns > self._touch_s * 1e9:
                    self._leases.touch(self._home.file(names[row]))  # the least recently used go first
        except OSError:
            self._unuse(receipt)
            raise
        if any(inodes):
            return receipt
        self._unuse(receipt)
        return None

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        count, receipt = len(rows), lease.receipt
        if lease.tier != self._name or len(buffers) != count:
            return self._ops.ended("load", count, Code.REFUSED)
        if not isinstance(receipt, _Receipt):
            return self._ops.ended("load", count, Code.MISS)  # a lease on nothing
        with self._lock:
            held = receipt.held
            receipt.uses += held
        if not held:
            return self._ops.ended("load", count, Code.EXPIRED)
        op: Op = Pending()
        codes = np.full(count, Code.FAILED, np.uint8)

        def end() -> None:
            self._unuse(receipt)
            self._ops.end_records("load", op, codes)

        def begin() -> None:
            wanted, pieces = rows.tolist(), buffers.pieces()

            def work(part: range) -> None:
                for at in part:
                    one = partial(self._load_one, receipt, wanted[at], pieces[at], deadline)
                    codes[at] = self._ops.each(one)

            self._ops.spread(count, work, end)

        if not self._ops.start("load", op, begin, end):
            self._unuse(receipt)
            return self._ops.ended("load", count, Code.REFUSED)
        return op

    def _load_one(self, receipt: _Receipt, row: int, pieces: list[Piece], deadline: float) -> Code:
        if not 0 <= row < len(receipt.names):
            return Code.REFUSED
        if not receipt.inodes[row]:
            return Code.MISS
        now = self._clock()
        if now > deadline or not self._prolonged(receipt, now):
            return Code.EXPIRED
        code = self._home.read(receipt.names[row], pieces)
        if code is Code.CORRUPT:
            self._set_aside()
        return code

    def _prolonged(self, receipt: _Receipt, now: float) -> bool:
        """Touch a lease that is in use; False if it had ended."""
        if now - receipt.touched > self._lease_s / 4:
            if not self._leases.touch(receipt.path):
                return False
            receipt.touched = now
        return True

    def discard(self, lease: Lease, rows: Rows) -> None:
        """See `Tier.discard`; renames the records at once, so that nobody finds them any more."""
        receipt = lease.receipt
        if lease.tier != self._name or not isinstance(receipt, _Receipt):
            return
        for row in rows.tolist():
            if 0 <= row < len(receipt.names) and receipt.inodes[row]:
                try:
                    aside = self._home.set_aside(receipt.names[row], receipt.inodes[row])
                except OSError as error:
                    self._ops.fault(error)
                    continue
                if aside:
                    self._set_aside()

    def _set_aside(self) -> None:
        self._ops.count("quarantined")
        self._room.lost()

    def leave(self) -> None:
        """End every lease: nobody can read any more."""
        with self._lock:
            left = list(self._live)
            self._live.clear()
            for receipt in left:
                receipt.held = False
        for receipt in left:
            remove(receipt.path)

    def _unuse(self, receipt: _Receipt) -> None:
        with self._lock:
            receipt.uses -= 1
            ended = not receipt.uses and receipt in self._live
        if ended:
            self._ops.background(partial(self._end, receipt))

    def _end(self, receipt: _Receipt) -> None:
        remove(receipt.path)
        with self._lock:
            self._live.pop(receipt, None)
