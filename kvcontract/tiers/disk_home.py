"""The directory of a disk store: whose it is, what is in it, and who has it open.

::

    store.json         format, segment size, and what the store was made for; written once
    lock               locked by the owner; says who that is
    secret             the fleet's secret, mode 0600, once somebody has asked for it
    index.db           which record lies where (and -wal, -shm beside it)
    segments/N.kvseg   the records

Everything else is somebody else's: it is left alone and named.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvcontract.contract.errors import UsageFault
from kvcontract.tiers.disk_files import BLOCK_BYTES, FORMAT, Files
from kvcontract.tiers.disk_index import NAMES

KIND: Final = "kvcontract disk store"
SEGMENTS: Final = "segments"
SECRET: Final = "secret"  # noqa: S105 - the name of a file
LOCK: Final = "lock"
STORE: Final = "store.json"

_SEGMENT: Final = re.compile(r"(\d{8})\.kvseg")
_TEMPORARY: Final = re.compile(r"(probe-\d+|store\.json-\d+|secret-[0-9a-f]+)\.tmp")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_NAMED: Final = 3

Meta = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Label:
    """What `store.json` says.

    Attributes:
        format: version of everything in the directory.
        segment_bytes: of a segment file.
        meta: what the store was made for; a store is reopened with the same.
        created: when, ISO 8601.
    """

    format: int
    segment_bytes: int
    meta: dict[str, int | str]
    created: str


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has, or had, a store open."""

    pid: int
    host: str
    boot_id: str
    since: str

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), _boot_id(), _now())

    @property
    def here(self) -> bool | None:
        """Whether it runs; None if that cannot be told from this machine."""
        if (self.host, self.boot_id) != (socket.gethostname(), _boot_id()):
            return None
        return Path(f"/proc/{self.pid}").exists() if Path("/proc").is_dir() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (boot {self.boot_id[:8]}), since {self.since}"


@dataclass(frozen=True, slots=True)
class Home:
    """A directory that this process owns; `leave` gives it back.

    Attributes:
        path: of the directory.
        label: what it says of itself.
        foreign: names in it that are not ours.
    """

    path: Path
    label: Label
    foreign: tuple[str, ...]
    _lock_fd: int

    @property
    def segments(self) -> Path:
        """Where the segment files are."""
        return self.path / SEGMENTS

    def leave(self) -> None:
        """Let another process open it."""
        os.ftruncate(self._lock_fd, 0)
        os.close(self._lock_fd)


def enter(
    directory: Path, files: Files, *, segment_bytes: int | None, default_bytes: int, meta: Meta, fresh: bool
) -> Home:
    """Own a directory, made if need be.

    Args:
        directory: of the store.
        files: the seam.
        segment_bytes: as `DiskTier` has it.
        default_bytes: of a segment, if a new store is not told.
        meta: as `DiskTier` has it.
        fresh: as `DiskTier` has it.

    Raises:
        UsageFault: it is owned, of another format, made for something else, or not a store; all is named.
    """
    path = _chosen(directory, fresh=fresh)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / SEGMENTS).mkdir(mode=0o700, exist_ok=True)
    lock_fd = _lock(path)
    try:
        label = read_label(path) or _make(path, files, segment_bytes or default_bytes, meta)
        _refuse_other(path, label)
        _refuse_differences(path, label, segment_bytes, meta)
        found = survey(path)
        for name in found.temporary:
            files.remove(path / name)
    except BaseException:
        os.close(lock_fd)
        raise
    return Home(path, label, found.foreign, lock_fd)


def _chosen(directory: Path, *, fresh: bool) -> Path:
    label = read_label(directory)
    if label is None or label.format == FORMAT:
        return directory
    if fresh:
        return directory.with_name(f"{directory.name}.format{FORMAT}")
    _refuse_other(directory, label)  # before anything is made or locked inside
    return directory


def _refuse_other(path: Path, label: Label) -> None:
    if label.format != FORMAT:
        raise UsageFault(
            f"the store in {path} has format {label.format}; this version reads and writes {FORMAT}."
            " Use another directory, or fresh=True for a new store beside it (H6)"
        )


def _make(path: Path, files: Files, segment_bytes: int, meta: Meta) -> Label:
    """Label a directory; before anything else is in it, so that without a label nothing in it is ours."""
    claimed = [name for name in NAMES if (path / name).exists()]
    claimed += [f"{SEGMENTS}/{item.name}" for item in sorted((path / SEGMENTS).iterdir())]
    if claimed:
        found = ", ".join(claimed[:_NAMED])
        raise UsageFault(f"{path} holds {found} but no {STORE}: no store of ours. Use another directory")
    if segment_bytes < BLOCK_BYTES:
        raise UsageFault(f"segments of {segment_bytes} B; expected at least {BLOCK_BYTES} B")
    label = Label(FORMAT, segment_bytes, dict(meta), _now())
    document = {"kind": KIND, "format": FORMAT, "segment_bytes": segment_bytes, "meta": label.meta}
    text = json.dumps({**document, "created": label.created}, indent=1) + "\n"
    temporary = path / f"{STORE}-{os.getpid()}.tmp"
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path / STORE)
    files.sync_folder(path)
    files.sync_folder(path.parent)
    return label


def read_label(path: Path) -> Label | None:
    """What a directory says of itself; None if it says nothing.

    Raises:
        UsageFault: it says something that is not ours to read.
    """
    try:
        text = (path / STORE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path / STORE} cannot be read: {error}") from error
    try:
        found: Any = json.loads(text)
        kind, version = found["kind"], int(found["format"])
        if kind == KIND and version == FORMAT:
            return Label(FORMAT, int(found["segment_bytes"]), dict(found["meta"]), str(found["created"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageFault(f"{path / STORE} is not the label of a {KIND}: {error!r}") from error
    if kind != KIND:
        raise UsageFault(f"{path / STORE} is the label of a {kind!r}; expected a {KIND}")
    return Label(version, 0, {}, "")  # nothing else is known of it


def _refuse_differences(path: Path, label: Label, segment_bytes: int | None, meta: Meta) -> None:
    faults = []
    if segment_bytes is not None and segment_bytes != label.segment_bytes:
        faults.append(f"segment_bytes is {label.segment_bytes} there, {segment_bytes} here")
    for name in sorted({*label.meta, *meta}):
        there, here = label.meta.get(name), meta.get(name)
        if there != here:
            faults.append(f"{name} is {there!r} there, {here!r} here")
    if faults:
        raise UsageFault(f"the store in {path} was made otherwise: {'; '.join(faults)}")


def _lock(path: Path) -> int:
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        owner = read_owner(path)
        raise UsageFault(
            f"the store in {path} is open in {owner or 'another process'}; a disk tier has one owner (H6)."
            " Close it there, or use the shared-directory tier"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    me = Owner.me()
    text = json.dumps({"pid": me.pid, "host": me.host, "boot_id": me.boot_id, "since": me.since})
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
    return fd


def read_owner(path: Path) -> Owner | None:
    """Who opened a store last and has not closed it; None if nobody, or it cannot be told."""
    try:
        found = json.loads((path / LOCK).read_text(encoding="utf-8"))
        return Owner(found["pid"], found["host"], found["boot_id"], found["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Survey:
    """Names in a directory.

    Attributes:
        segments: numbers of segment files, with their sizes in bytes.
        temporary: what an interrupted process of ours left.
        foreign: what is not ours.
        other_bytes: of our files that are not segments.
    """

    segments: dict[int, int]
    temporary: tuple[str, ...]
    foreign: tuple[str, ...]
    other_bytes: int


def survey(path: Path) -> Survey:
    """Look through a directory."""
    ours = {STORE, LOCK, SECRET, *NAMES}
    segments: dict[int, int] = {}
    temporary, foreign, other_bytes = [], [], 0
    for item in sorted([*path.iterdir(), *(path / SEGMENTS).iterdir()]):
        name = str(item.relative_to(path))
        number = _SEGMENT.fullmatch(item.name) if item.parent != path else None
        try:
            size = item.stat().st_size
        except FileNotFoundError:
            continue  # its owner has removed it meanwhile
        if number is not None and item.is_file():
            segments[int(number[1])] = size
        elif item.parent == path and item.name in ours:
            other_bytes += size
        elif _TEMPORARY.fullmatch(item.name):
            temporary.append(name)
        elif name != SEGMENTS:
            foreign.append(name)
    return Survey(segments, tuple(temporary), tuple(foreign), other_bytes)


def segment_path(path: Path, number: int) -> Path:
    """Of a segment file, given the directory of the store."""
    return path / SEGMENTS / f"{number:08}.kvseg"


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
