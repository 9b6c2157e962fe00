"""What a disk may hold after the power has gone: everything that was synced, and any part of the rest.

`Recorder` keeps the order of writes, syncs, files made and removed, and commits of the index.  `image` makes
the directory that could be found if power had gone after any of them: writes that no sync covers are there
whole, in part, or not at all, sector by sector; a removal that no sync of the folder covers may not have
happened; a commit under way has left any part of what it wrote.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvcontract.tiers.disk_files import Files
from kvcontract.tiers.disk_index import NAMES

SECTOR: Final = 512
INDEX: Final = tuple(name for name in NAMES if not name.endswith("-shm"))  # shared memory outlives no crash


@dataclass(slots=True)
class Event:
    """One thing that happened to a directory.

    Attributes:
        kind: creating, created, write, sync, removed, folder, index, or a test's own.
        path: of the file.
        at, data: of a write.
        upto: of a sync: the events before this one were submitted when it began.
        index: contents of the index's files after a commit.
        numbers: a test's own.
    """

    kind: str
    path: Path = field(default=Path())
    at: int = 0
    data: bytes = b""
    upto: int = 0
    index: dict[str, bytes] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()


class Recorder(Files):
    """Files that remember the order of what was done to them.

    Args:
        home: of the store.
        syncs: whether syncs do what they say; a disk that lies shows that the checks can fail.
    """

    def __init__(self, home: Path, *, syncs: bool = True) -> None:
        self.log: list[Event] = []
        self._home, self._syncs = home, syncs
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Append an event."""
        with self._lock:
            self.log.append(event)

    def open(self, path: Path, *, direct: bool) -> int:
        """As it is."""
        fd = super().open(path, direct=direct)
        self._paths[fd] = path
        return fd

    def create(self, path: Path, size_bytes: int) -> None:
        """A file that may be there before it is durable."""
        self.note(Event("creating", path, at=size_bytes))
        super().create(path, size_bytes)
        self.note(Event("created", path, at=size_bytes))

    def write(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        """Not durable before a sync."""
        moved = super().write(fd, views, at)
        self.note(Event("write", self._paths[fd], at, b"".join(views)[:moved]))
        return moved

    def sync(self, fd: int) -> None:
        """Covers what was written before it began."""
        upto = len(self.log)
        super().sync(fd)
        if self._syncs:
            self.note(Event("sync", self._paths[fd], upto=upto))

    def sync_folder(self, path: Path) -> None:
        """Covers names."""
        super().sync_folder(path)
        self.note(Event("folder", path))

    def remove(self, path: Path) -> None:
        """Not durable before a sync of the folder."""
        super().remove(path)
        self.note(Event("removed", path))

    def commit(self, db: sqlite3.Connection) -> None:
        """Durable when it returns."""
        super().commit(db)
        self._index()

    def checkpoint(self, db: sqlite3.Connection) -> None:
        """Durable when it returns."""
        super().checkpoint(db)
        self._index()

    def _index(self) -> None:
        files = {name: (self._home / name).read_bytes() for name in INDEX if (self._home / name).exists()}
        self.note(Event("index", index=files))


def image(recorder: Recorder, home: Path, upto: int, target: Path, rng: np.random.Generator) -> None:
    """Make the directory that may be found if power goes after the first `upto` events."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "segments").mkdir(parents=True)
    shutil.copy(home / "store.json", target)
    log = recorder.log
    for path, content in _files(log[:upto], rng).items():
        (target / "segments" / path.name).write_bytes(content)
    states = [event.index for event in log[:upto] if event.kind == "index"]
    now = states[-1] if states else {}
    under_way = next((event.index for event in log[upto:] if event.kind == "index"), None)
    if under_way is not None and log[upto].kind == "index":
        now = {name: _part(now.get(name, b""), under_way[name], rng) for name in under_way}
    for name, content in now.items():
        (target / name).write_bytes(content)


def _files(log: Sequence[Event], rng: np.random.Generator) -> dict[Path, bytearray]:
    """Contents of the segment files."""
    durable = {event.path for event in log if event.kind == "created"}
    found: dict[Path, bytearray] = {}
    for event in log:
        if event.kind == "creating" and (event.path in durable or rng.random() < 0.5):
            size = event.at if event.path in durable else int(rng.integers(0, event.at + 1))
            found[event.path] = bytearray(size)
    last_folder = max((at for at, event in enumerate(log) if event.kind == "folder"), default=-1)
    synced = {event.path: event.upto for event in log if event.kind == "sync"}
    for at, event in enumerate(log):
        if event.kind == "write" and event.path in found:
            whole = at < synced.get(event.path, 0)
            _apply(found[event.path], event.at, event.data, None if whole else rng)
        elif event.kind == "removed" and (at < last_folder or rng.random() < 0.5):
            found.pop(event.path, None)
    return found


def _apply(content: bytearray, at: int, data: bytes, rng: np.random.Generator | None) -> None:
    """A write, or those of its sectors that luck has it."""
    if rng is None:
        content[at : at + len(data)] = data
        return
    share = float(rng.choice([0.0, 0.5, 1.0]))
    for start in range(0, len(data), SECTOR):
        if rng.random() < share:
            piece = data[start : start + SECTOR]
            content[at + start : at + start + len(piece)] = piece


def _part(before: bytes, after: bytes, rng: np.random.Generator) -> bytes:
    """A file on its way from one content to another."""
    share = float(rng.choice([0.0, 0.5, 1.0]))
    longest = max(len(before), len(after))
    old, new = before.ljust(longest, b"\0"), after.ljust(longest, b"\0")
    pieces = (
        (new if rng.random() < share else old)[start : start + SECTOR] for start in range(0, longest, SECTOR)
    )
    return b"".join(pieces)[: len(after) if rng.random() < 0.5 else max(len(before), len(after))]
