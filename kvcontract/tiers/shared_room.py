"""Room in a shared directory: what lies there, counted by walking it, and what has to go for others.

Between two walks a member knows what it did itself; what others did it learns at the next.  So one member
keeps the quota exactly, and several overshoot by at most what they write between walks, which each bounds.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvcontract.contract.layout import round_up
from kvcontract.tiers.base import Clock
from kvcontract.tiers.shared_dir import (
    BAD,
    FOOTER_BYTES,
    GOING,
    GONE,
    NAME,
    TEMP,
    SharedDirectory,
    Written,
    remove,
    rename,
)
from kvcontract.tiers.shared_leases import Held, LeaseFiles

BLOCK_BYTES: Final = 4096
"""What files are charged in, as file systems do."""

_CANDIDATES: Final = 1 << 16  # that a walk remembers: memory stays bounded, the next walk finds the others
_DRIFT: Final = 32  # a member walks again when it has written this part of the quota
_AHEAD: Final = 256  # this part of the quota goes at once: leases are read for every batch
_AGAIN_S: Final = 1.0  # nothing could be evicted: look again after this


def charged_bytes(record_bytes: int) -> int:
    """What a record of that many bytes takes of the quota."""
    return round_up(record_bytes + FOOTER_BYTES, BLOCK_BYTES)


@dataclass(slots=True)
class _Candidate:
    """A file that may go, as it was when it was last looked at; oldest first."""

    touched_ns: int
    name: str
    charge: int


class Room:
    """The quota of one directory.  Everything here does I/O and is called in lanes only.

    Args:
        home: the directory.
        leases: what may not go.
        capacity_bytes: quota.
        released: what has ended for this member, although its files may still lie there: see
            `LeaseFiles.held`.
        clock: monotonic.
        sweep_s: longest time between walks, as long as anybody writes.
        leftover_s: after which a file that nobody finishes is what a dead member left.

    Attributes:
        records: files that can be found.
        evictions: records that had to go.
        swept: leftovers taken away.
        foreign: files of others that lay there at the last walk; they are left alone.
    """

    def __init__(
        self,
        home: SharedDirectory,
        leases: LeaseFiles,
        capacity_bytes: int,
        *,
        released: Callable[[], frozenset[str]],
        clock: Clock,
        sweep_s: float,
        leftover_s: float,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.records = self.evictions = self.swept = self.foreign = 0
        self._home, self._leases, self._released = home, leases, released
        self._clock, self._sweep_s, self._leftover_s = clock, sweep_s, leftover_s
        self._lock = threading.Lock()
        self._known = self._reserved = self._since = 0
        self._walked = -float("inf")
        self._doubtful = False  # something happened that only a walk can count
        self._queue: deque[_Candidate] = deque()
        self._whole = False  # the queue has every record that this member knows of

    @property
    def used_bytes(self) -> int:
        """What lies there and what is being written, as far as this member knows."""
        return self._known + self._reserved

    def due(self) -> bool:
        """Whether it is time for a walk."""
        headroom = self.capacity_bytes - self._known
        written = self._since > max(headroom // 4, self.capacity_bytes // _DRIFT)
        age_s = self._clock() - self._walked
        return written or age_s >= (_AGAIN_S if self._doubtful else self._sweep_s)

    def reserve(self, charge: int, *, full: bool = False) -> bool:
        """Take some of the quota, evicting what must go; False if leases do not allow it.

        Args:
            charge: bytes; given back with `give_back`, or made good by `place`.
            full: the file system has no room, whatever the quota says: as much must go first.
        """
        with self._lock:
            if self.due():
                self._walk()
            limit = min(self.capacity_bytes, self.used_bytes) if full else self.capacity_bytes
            if not self._make_room(limit - charge):
                return False
            self._reserved += charge
            self._since += charge
            return True

    def give_back(self, charge: int) -> None:
        """Undo `reserve`."""
        with self._lock:
            self._reserved -= charge

    def place(self, written: Written, name: str, charge: int) -> None:
        """Make a record findable that room was reserved for; one that is there already stays."""
        with self._lock:
            try:
                free = self._home.place(written.path, name)
            except OSError:
                remove(written.path)
                raise
            self._reserved -= charge
            if free:
                self._known += charge
                self.records += 1
                if self._whole:
                    self._queue.append(_Candidate(written.time_ns, name, charge))

    def lost(self) -> None:
        """A record was set aside: its bytes stay for a while, and are the first to go."""
        with self._lock:
            self.records = max(0, self.records - 1)
            self._doubtful = True

    def sweep(self) -> None:
        """Walk, if it is time."""
        with self._lock:
            if self.due():
                self._walk()

    def forget(self) -> None:
        """Make every record unfindable; what is leased can be read on."""
        with self._lock:
            for entry, name, ending in self._files():
                if ending in {"", GOING}:
                    rename(entry.path, self._home.file(name, GONE))
            self._walk()

    def _make_room(self, limit: int) -> bool:
        if self.used_bytes <= limit:
            return True
        left, walked = 2 * len(self._queue), False  # twice: what was used since is looked at again
        held = self._held()  # tells what need not be tried; what is tried is looked up again
        while self.used_bytes > limit:
            batch: list[_Candidate] = []
            wanted, ahead = self.used_bytes - limit, self.capacity_bytes // _AHEAD
            while left and self._queue and (wanted > 0 or wanted + ahead >= self._queue[0].charge):
                batch.append(self._queue.popleft())
                wanted -= batch[-1].charge
                left -= 1
            if batch:
                self._evict(batch, held)
            elif walked or (self._whole and self._clock() - self._walked < _AGAIN_S):
                return False
            else:
                self._walk()
                left, walked = 2 * len(self._queue), True
        return True

    def _evict(self, batch: list[_Candidate], held: Held) -> None:
        try:
            going = [item for item in batch if self._begin(item, held)]
            now_held = self._held() if going else held
            for item in going:
                self._end(item, now_held)
        except OSError:
            self._doubtful = True  # what became of the batch, a walk finds
            raise

    def _begin(self, item: _Candidate, held: Held) -> bool:
        """Rename a record that may go; False if it stays, or is gone."""
        path = self._home.file(item.name)
        if item.name.endswith(BAD):
            self._known -= item.charge
            self.swept += _remove_any(path)
            return False
        if item.name in held:
            self._queue.append(item)
            return False
        try:
            touched = os.lstat(path).st_mtime_ns
        except FileNotFoundError:
            touched = None
        if touched is not None and 0 < item.touched_ns < touched:
            item.touched_ns = touched  # somebody used it since
            self._queue.append(item)
            return False
        if touched is None or not rename(path, path + GOING):
            self._known -= item.charge
            self.records -= 1
            return False
        return True

    def _end(self, item: _Candidate, held: Held) -> None:
        """Let a renamed record go, or give it its name back if it was leased meanwhile."""
        going = self._home.file(item.name, GOING)
        if item.name in held:
            self._put_back(going, item.name)
            self._queue.append(item)
            return
        remove(going)
        self._known -= item.charge
        self.records -= 1
        self.evictions += 1

    def _put_back(self, going: str, name: str) -> None:
        try:
            self._home.place(going, name)
        except FileNotFoundError:
            self._doubtful = True  # another member came to the same decision, or its lease had ended

    def _held(self) -> Held:
        return self._leases.held(self._released(), leftover_s=self._leftover_s)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], str, str]]:
        """Files of ours: entry, name of the record (empty for one that is written), ending."""
        self.foreign = 0
        for entry in self._home.files():
            match = NAME.match(entry.name)
            name, ending = (match[0], entry.name[match.end() :]) if match else ("", entry.name)
            ours = ending in {GOING, GONE, BAD} or entry.name.startswith(TEMP)
            if ours or (not ending and entry.is_file(follow_symlinks=False)):
                yield entry, name, ending
            else:
                self.foreign += 1

    def _walk(self) -> None:
        """Count what lies there, take leftovers away, and remember what may go."""
        self._walked, self._since, self._doubtful = self._clock(), 0, True
        now_ns = self._home.now_ns()
        late: list[tuple[os.DirEntry[str], str, str]] = []
        known = records = 0

        def candidates() -> Iterator[_Candidate]:
            nonlocal known, records
            for entry, name, ending in self._files():
                if ending in {GOING, GONE}:
                    late.append((entry, name, ending))  # leases count that are read after this
                    continue
                charge = self._charge(entry, now_ns, old_goes=bool(ending))
                if charge is None or (not name and self._own(entry)):
                    continue
                known += charge
                if name:
                    records += not ending
                    touched = 0 if ending else entry.stat(follow_symlinks=False).st_mtime_ns
                    yield _Candidate(touched, name + ending, charge)

        oldest = heapq.nsmallest(_CANDIDATES, candidates(), key=lambda item: item.touched_ns)
        self._known, self.records = known, records
        self._queue = deque(oldest)
        self._whole, self._doubtful = len(oldest) < _CANDIDATES, False
        if late:
            self._settle(late, self._held())

    def _charge(self, entry: os.DirEntry[str], now_ns: int, *, old_goes: bool) -> int | None:
        """What a file counts for; None if it is no more."""
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        if old_goes and not self._own(entry) and now_ns - found.st_mtime_ns > self._leftover_s * 1e9:
            self.swept += _remove_any(entry.path)
            return None
        return round_up(found.st_size, BLOCK_BYTES)

    def _own(self, entry: os.DirEntry[str]) -> bool:
        """Whether this member is writing it: then it is reserved, and nobody's leftover."""
        return entry.name.startswith(f"{TEMP}{self._home.instance}-")

    def _settle(self, late: list[tuple[os.DirEntry[str], str, str]], held: Held) -> None:
        """Decide on records that were evicted or forgotten, as whoever did so would; that one may be dead."""
        for entry, name, ending in late:
            if name not in held:
                self.swept += remove(entry.path)
                continue
            self._known += self._charge(entry, 0, old_goes=False) or 0
            if ending == GOING:
                self._put_back(entry.path, name)
                self._doubtful = True  # it can be found again, and is no candidate yet


def _remove_any(path: str) -> bool:
    """Take a leftover away, whatever was set aside; a folder only if it is empty."""
    try:
        return remove(path)
    except IsADirectoryError:
        try:
            Path(path).rmdir()
        except OSError:
            return False  # not ours to empty; it is seen again at the next walk
        return True
