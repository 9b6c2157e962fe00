"""Leases as files: what no member of a shared directory may evict, and for how long.

A lease is one file that names records.  It holds from its last touch for as long as its own name says, by
the file system's clock; so whoever dies takes nothing along for longer than that.  Two kinds:

``r-<member>-<number>.<ms>``         of a reader, touched as long as it is used
``h-<handoff>-<member>-<number>.<ms>``  of a handoff's saves, never touched; any member may take it away

The order of steps makes them safe.  A reader writes its lease, then looks whether the records are there.
Whoever evicts renames a record, then reads the leases: either the reader finds the record gone, or its lease
is seen and the record gets its name back.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from kvcontract.tiers.base import RECORD_KEY_BYTES
from kvcontract.tiers.shared_dir import TEMP, SharedDirectory, remove
from kvcontract.tiers.shared_io import write_all

_FILE: Final = re.compile(
    r"(?P<kind>[rh])-(?:(?P<group>[0-9a-f]{32})-)?[0-9a-f]{16}-\d+\.(?P<ms>[1-9]\d{0,8})"
)
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NS_PER_MS: Final = 1_000_000


class Held:
    """Names of records that leases hold, as they were a moment ago."""

    def __init__(self, leases: list[frozenset[bytes]]) -> None:
        self._leases = leases

    def __contains__(self, name: str) -> bool:
        key = bytes.fromhex(name)
        return any(key in lease for lease in self._leases)


class _Live(NamedTuple):
    path: str
    group: str | None
    since_ns: int
    ttl_ns: int
    size: int


class LeaseFiles:
    """The leases of all members of a directory.

    Args:
        home: the directory.
    """

    def __init__(self, home: SharedDirectory) -> None:
        self._home = home
        self._numbers = count(1)
        self._read: dict[str, tuple[int, frozenset[bytes]]] = {}  # by file, since only its time changes

    def read_lease(self, names: Iterable[str], ttl_s: float) -> tuple[str, int]:
        """Lease records for a reader; returns the lease's path and the file system's time in ns."""
        return self._write("r", names, ttl_s)

    def handoff(self, handoff: str, names: Iterable[str], ttl_s: float) -> str:
        """Lease records for a handoff, before they are saved; returns the lease's path."""
        return self._write(f"h-{handoff_group(handoff)}", names, ttl_s)[0]

    def _write(self, kind: str, names: Iterable[str], ttl_s: float) -> tuple[str, int]:
        milliseconds = max(1, round(ttl_s * 1000))
        path = f"{self._home.leases}/{kind}-{self._home.instance}-{next(self._numbers)}.{milliseconds}"
        fd = os.open(path, _CREATE, 0o600)
        try:
            try:
                write_all(fd, [bytes.fromhex("".join(names))])
                now_ns = os.fstat(fd).st_mtime_ns
            finally:
                os.close(fd)
        except OSError:
            remove(path)
            raise
        return path, now_ns

    def touch(self, path: str) -> bool:
        """Prolong a lease; False if it has ended."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def end_handoff(self, group: str) -> None:
        """Take away what a handoff leased, whoever wrote it; of all handoffs if the group is empty."""
        beginning = f"h-{group}-" if group else "h-"
        with os.scandir(self._home.leases) as entries:
            for entry in entries:
                if entry.name.startswith(beginning):
                    remove(entry.path)

    def held(self, released: frozenset[str], *, leftover_s: float) -> Held:
        """Read all leases; those that have ended are taken away.

        Args:
            released: paths of leases, and groups of handoffs, that have ended although their files are there.
            leftover_s: after which other files of ours are what a dead member left.

        Raises:
            OSError: one of them cannot be read: nothing is known then.
        """
        now_ns = self._home.now_ns()
        live: list[_Live] = []
        begun: dict[str | None, int] = {}  # a handoff's time begins with its first save
        for entry, group, ms in self._entries(now_ns, leftover_s):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            begun[group] = min(found.st_mtime_ns, begun.get(group, found.st_mtime_ns))
            live.append(_Live(entry.path, group, found.st_mtime_ns, ms * _NS_PER_MS, found.st_size))
        leases, kept = [], {}
        for path, group, touched, ttl_ns, size in live:
            since = touched if group is None else begun[group]
            # One from the future is of a clock that was wrong: it would never end.
            if abs(now_ns - since) > ttl_ns:
                remove(path)
            elif not released & {path, group} and (content := self._content(path, size)) is not None:
                leases.append(content[1])
                kept[path] = content
        self._read = kept
        return Held(leases)

    def _entries(self, now_ns: int, leftover_s: float) -> Iterable[tuple[os.DirEntry[str], str | None, int]]:
        with os.scandir(self._home.leases) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match is not None:
                    yield entry, match["group"], int(match["ms"])
                elif entry.name.startswith(TEMP):
                    self._sweep_mark(entry, now_ns, leftover_s)

    def _sweep_mark(self, entry: os.DirEntry[str], now_ns: int, leftover_s: float) -> None:
        try:
            age_ns = now_ns - entry.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return
        if age_ns > leftover_s * 1e9 and not entry.name.startswith(f"{TEMP}{self._home.instance}-"):
            remove(entry.path)

    def _content(self, path: str, size: int) -> tuple[int, frozenset[bytes]] | None:
        """Length of a lease and the keys that it names; None if it ended meanwhile.

        One that is being written is read in part: its reader has not looked for the records yet.
        """
        known = self._read.get(path)
        if known is not None and known[0] == size:
            return known
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        step = RECORD_KEY_BYTES
        keys = frozenset(data[at : at + step] for at in range(0, len(data) - step + 1, step))
        return len(data), keys


def handoff_group(handoff: str) -> str:
    """The name of a handoff in file names: of one length, and hiding the text (D4)."""
    return hashlib.blake2b(handoff.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
