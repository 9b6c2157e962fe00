"""The durable index of a disk store: which record lies where, in SQLite.

It is read once, when the store is opened, and written in batches; look-ups go to memory.  A batch is one
transaction of a write-ahead log that is synced before `apply` returns, so after a crash it is there or not.
Rows carry a sum of themselves, and how many there must be is kept beside them: what a flipped bit takes away
or makes up shows.
"""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from kvcontract.tiers.base import RECORD_KEY_BYTES
from kvcontract.tiers.disk_files import Files
from kvcontract.tiers.disk_places import Changes, Segment, Slot
from kvcontract.tiers.frame import FINGERPRINT_BYTES

NAME: Final = "index.db"
NAMES: Final = (f"{NAME}-journal", f"{NAME}-shm", f"{NAME}-wal", NAME)
"""Its files; removed in this order, so that no log is ever left for another database to find."""

_LOG_ROWS: Final = 4096  # changed in the write-ahead log, after which it is moved into the database
_WAIT_S: Final = 5.0  # for an operator's reader
_ROW: Final = struct.Struct(f"<{RECORD_KEY_BYTES}sqqqq{FINGERPRINT_BYTES}sq")
_SEGMENT: Final = struct.Struct("<qqq")
_OUTSIDE: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
    }
)
"""Errors that say nothing about the index itself."""

_SCHEMA: Final = """
create table segments (number integer primary key, slot_bytes integer, slots integer, sum integer);
create table records (
    key blob primary key, segment integer, slot integer, record_bytes integer, head_bytes integer,
    fingerprint blob, stamp integer, sum integer
) without rowid;
create table facts (name text primary key, value integer) without rowid;
"""


class RecordRow(NamedTuple):
    """Where one record lies; `stamp` orders records by their use."""

    key: bytes
    segment: int
    slot: int
    record_bytes: int
    head_bytes: int
    fingerprint: bytes
    stamp: int


class SegmentRow(NamedTuple):
    """A segment file."""

    number: int
    slot_bytes: int
    slots: int


@dataclass(slots=True)
class Contents:
    """What an index holds.

    Attributes:
        segments, records: rows that are whole, records in the order of their use.
        damaged: rows that are not, and rows that are missing.
        facts: single numbers.
    """

    segments: list[SegmentRow] = field(default_factory=list)
    records: list[RecordRow] = field(default_factory=list)
    damaged: int = 0
    facts: dict[str, int] = field(default_factory=dict)


class DiskIndex:
    """The index of one store, opened by its owner.

    Args:
        folder: of the store.
        files: through which transactions end.
        capacity_bytes: quota of the store, kept for whoever reads it from outside.

    Attributes:
        lost: the index that was there could not be read, and a new one was begun.
    """

    def __init__(self, folder: Path, files: Files, capacity_bytes: int) -> None:
        self.lost = False
        self._capacity_bytes = capacity_bytes
        self._path = folder / NAME
        self._files = files
        self._rows = self._logged = 0
        try:
            self._db = self._opened()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not broken(error):
                raise
            self._lose()

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute("pragma journal_mode=wal").fetchall()
            db.execute("pragma synchronous=full")
            db.execute("pragma wal_autocheckpoint=0")
            db.execute("pragma cell_size_check=on")
            if not db.execute("select 1 from sqlite_schema").fetchone():
                db.executescript(f"begin immediate;{_SCHEMA}")
                self._files.commit(db)
                self._files.sync_folder(self._path.parent)  # SQLite sees to its log's name, not to its own
        except BaseException:
            db.close()
            raise
        return db

    def read(self) -> Contents:
        """Everything; an index that cannot be read is given up for an empty one."""
        try:
            contents = contents_of(self._db)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not broken(error):
                raise
            self.restart()
            contents = Contents(damaged=1)
        self._rows = contents.facts.get("records", 0)
        return contents

    def restart(self) -> None:
        """Begin anew with an empty index."""
        with suppress(sqlite3.Error):  # what is broken may not even close; its files go in any case
            self._db.close()
        self._lose()

    def _lose(self) -> None:
        self.lost = True
        for name in NAMES:
            self._path.with_name(name).unlink(missing_ok=True)
        self._files.sync_folder(self._path.parent)
        self._rows = 0
        self._db = self._opened()

    def apply(self, changes: Changes) -> None:
        """Make changes durable, all or none.

        Raises:
            sqlite3.Error: it could not be done; whether it was is unknown.
        """
        db = self._db
        db.execute("begin immediate")
        try:
            # The cursor counts: of the keys touched, some have no row.
            gone = db.executemany("delete from records where key = ?", [(key,) for key in changes.touched])
            rows = self._rows - max(0, gone.rowcount) + len(changes.stored)
            db.executemany(
                "insert into records values (?,?,?,?,?,?,?,?)",
                [_record_values(key, slot) for key, slot in changes.stored],
            )
            db.executemany(
                "delete from segments where number = ?", [(item.number,) for item in changes.given_up]
            )
            db.executemany(
                "insert or replace into segments values (?,?,?,?)",
                [_segment_values(item) for item in changes.made if item not in changes.given_up],
            )
            facts = [("records", rows), ("capacity_bytes", self._capacity_bytes)]
            db.executemany("insert or replace into facts values (?,?)", facts)
            self._files.commit(db)
        except BaseException:
            with suppress(sqlite3.Error):  # it may have ended already; the first error is told
                db.execute("rollback")
            raise
        self._rows = rows
        self._logged += len(changes.touched)
        if self._logged >= _LOG_ROWS:
            self._files.checkpoint(db)
            self._logged = 0

    def close(self) -> None:
        """Move the log into the database and end."""
        try:
            self._files.checkpoint(self._db)
        finally:
            self._db.close()


def read_index(folder: Path) -> Contents:
    """What the index of a store holds, read from outside while its owner may be writing.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    with closing(_outside(folder)) as db:
        return contents_of(db)


def still_there(folder: Path, row: RecordRow) -> bool:
    """Whether a row that was read from outside is in the index as it was.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    with closing(_outside(folder)) as db:
        found = db.execute("select * from records where key = ?", (row.key,)).fetchone()
    return found is not None and found[1:5] == row[1:5]


def _outside(folder: Path) -> sqlite3.Connection:
    uri = f"{(folder / NAME).absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=_WAIT_S)


def broken(error: Exception) -> bool:
    """Whether the index itself is damaged, in contrast to a disk that is full or will not answer.

    A flipped bit may change anything, names of tables and texts of errors included, so all that is not known
    to come from outside counts as damage.
    """
    if isinstance(error, UnicodeDecodeError):
        return True  # of a message that quotes the schema
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF not in _OUTSIDE


def contents_of(db: sqlite3.Connection) -> Contents:
    """What a connection sees, at one moment."""
    found = Contents()
    db.text_factory = _no_text
    db.execute("begin")
    try:
        for row in db.execute("select * from segments"):
            if _whole_segment(row):
                found.segments.append(SegmentRow(*row[:-1]))
            else:
                found.damaged += 1
        rows = 0
        for row in db.execute("select * from records"):
            rows += 1
            if _whole_record(row):
                found.records.append(RecordRow(*row[:-1]))
            else:
                found.damaged += 1
        for name, value in db.execute("select cast(name as blob), value from facts"):
            if isinstance(value, int):
                found.facts[name.decode("ascii", "replace")] = value
    finally:
        db.execute("rollback")
    found.damaged += abs(found.facts.get("records", 0) - rows)
    found.records.sort(key=lambda row: row.stamp)
    return found


def _no_text(_: bytes) -> None:
    """Rows hold numbers and blobs; what claims to be text was not written by us."""


def _record_values(key: bytes, slot: Slot) -> tuple[Any, ...]:
    slot.stamp = slot.touched
    values = (
        key,
        slot.segment.number,
        slot.number,
        slot.shape.record_bytes,
        slot.shape.head_bytes,
        slot.fingerprint,
        slot.stamp,
    )
    return (*values, crc32(_ROW.pack(*values)))


def _segment_values(segment: Segment) -> tuple[int, ...]:
    values = (segment.number, segment.slot_bytes, segment.slots)
    return (*values, crc32(_SEGMENT.pack(*values)))


def _whole_record(row: tuple[Any, ...]) -> bool:
    """Whether a row is the one that was written: its types, its lengths, its sum."""
    try:
        same = len(row[0]) == RECORD_KEY_BYTES and len(row[5]) == FINGERPRINT_BYTES
        return same and crc32(_ROW.pack(*row[:-1])) == row[-1]
    except (struct.error, TypeError):
        return False


def _whole_segment(row: tuple[Any, ...]) -> bool:
    try:
        return bool(crc32(_SEGMENT.pack(*row[:-1])) == row[-1])
    except (struct.error, TypeError):
        return False
