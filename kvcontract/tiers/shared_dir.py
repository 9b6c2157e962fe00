"""The directory of a shared tier: what lies where, and the steps that put a file there, whole or not at all.

::

    store.json          format, id of the store, what its members agreed on
    secret              the fleet's secret, if its first member had none
    records/7f/7f3a...  one file a record, named by its key: the record's bytes, then a footer
    leases/             who must not lose what (`kvcontract.tiers.shared_leases`)

A record's name may carry an ending: ``.going`` while it is evicted, ``.gone`` once it is forgotten and only
read on by who has a lease, ``.bad`` when its bytes are damaged.  Names that begin with ``.tmp-`` are written
to.  Whatever a process leaves behind when it dies has one of these names, and goes by time alone.

No lock, no index, no comparison of clocks: what time it is says the file system, which dates every file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvcontract.contract.errors import EnvironmentFault, UsageFault
from kvcontract.memory.checksum import crc32c
from kvcontract.pool.keys import FleetSecret
from kvcontract.tiers.base import RECORD_KEY_BYTES, Code
from kvcontract.tiers.shared_io import read_all, views, write_all

KIND: Final = "kvcontract shared tier"
FORMAT: Final = 2
META_FILE: Final = "store.json"
GOING, GONE, BAD, TEMP = ".going", ".gone", ".bad", ".tmp-"

_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
NAME: Final = re.compile(rf"[0-9a-f]{{{2 * RECORD_KEY_BYTES}}}")

_FOOTER: Final = struct.Struct(f"<8s{RECORD_KEY_BYTES}s3xQ")
_SUM: Final = struct.Struct("<I")
_MAGIC: Final = b"kvc-end\n"
FOOTER_BYTES: Final = _FOOTER.size + _SUM.size

_OWN_NAMES: Final = frozenset({META_FILE, "secret", "records", "leases"})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_NOT_THE_FILE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR})
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # nothing that is no file may block
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

Piece = tuple[int, int]  # address, bytes


class Written(NamedTuple):
    """A record that has its bytes and not yet its name; the file system's time when it was written."""

    path: str
    time_ns: int


class SharedDirectory:
    """One directory, as one process sees it.

    Args:
        path: made if it does not exist.
        meta: what all members must agree on, plain JSON; an existing store must have the same.

    Attributes:
        path: of the directory.
        instance: name of this member among all that ever were.

    Raises:
        UsageFault: it holds something else, another format, or another agreement; both sides are told.
        EnvironmentFault: it cannot be read or written.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self.instance = secrets.token_hex(8)
        self._numbers = count(1)
        self._records = str(path / "records")
        self._meta_file = path / META_FILE
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_other_use()
            self._id = self._join(dict(meta))
            (path / "records").mkdir(mode=0o700, exist_ok=True)
            (path / "leases").mkdir(mode=0o700, exist_ok=True)
            self._identity = _identity(self._meta_file)
        except OSError as error:
            raise EnvironmentFault(f"the directory {str(path)!r} of a shared tier: {error}") from error

    def secret(self, create: bool | FleetSecret) -> FleetSecret | None:
        """The fleet's secret; None: there is none, and none is to be made."""
        path = self.path / "secret"
        return FleetSecret.of_file(path, create=create) if create or path.exists() else None

    @property
    def leases(self) -> str:
        """Where leases lie."""
        return str(self.path / "leases")

    def check(self) -> None:
        """Make sure that the store is there, and is the one that was opened: mounts come and go.

        Raises:
            OSError: it is not.
        """
        found = _identity(self._meta_file)
        if found != self._identity:
            if _read_meta(self._meta_file)["id"] != self._id:
                raise OSError(errno.ESTALE, "another store lies there now", str(self.path))
            self._identity = found

    def temporary(self, folder: str) -> str:
        """A name to write to, in the folder where the file will stay."""
        return f"{folder}/{TEMP}{self.instance}-{next(self._numbers)}"

    def now_ns(self) -> int:
        """The file system's time: that of a file which was touched just now."""
        mark = f"{self.leases}/{TEMP}{self.instance}-now"
        fd = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.utime(fd)
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def leave(self) -> None:
        """Take away what only this member used."""
        remove(f"{self.leases}/{TEMP}{self.instance}-now")

    def file(self, name: str, ending: str = "") -> str:
        """The path of a record."""
        return f"{self._records}/{name[:2]}/{name}{ending}"

    def found(self, name: str) -> os.stat_result | None:
        """What there is of a record; None if it is absent, or no file that could be one."""
        try:
            found = os.lstat(self.file(name))
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) and found.st_size > FOOTER_BYTES else None

    def write(self, name: str, pieces: list[Piece], size: int) -> Written:
        """Write a record where nobody finds it, for `place`.

        Raises:
            OSError: it could not be; nothing is left of it.
        """
        folder = f"{self._records}/{name[:2]}"
        temporary = self.temporary(folder)
        try:
            fd = os.open(temporary, _CREATE, 0o600)
        except FileNotFoundError:
            # Not its parents: where a mount is gone, nothing may grow in its place.
            Path(folder).mkdir(mode=0o700, exist_ok=True)
            fd = os.open(temporary, _CREATE, 0o600)
        try:
            try:
                write_all(fd, [*views(pieces), _footer(bytes.fromhex(name), size)])
                time_ns = os.fstat(fd).st_mtime_ns
            finally:
                os.close(fd)  # on a network mount only this may say that there is no room
        except OSError:
            remove(temporary)
            raise
        return Written(temporary, time_ns)

    def place(self, source: str, name: str) -> bool:
        """Give a file the name of a record, unless that is there; `source` is gone afterwards.

        Returns:
            Whether the name was free.
        """
        target = self.file(name)
        free = _name(source, target)
        if not free and self.found(name) is None:
            self.set_aside(name, None)  # no record, and nothing that could ever be one
            free = _name(source, target)
        remove(source)
        return free

    def read(self, name: str, pieces: list[Piece]) -> Code:
        """Read a record; a damaged one is set aside.

        Returns:
            OK, MISS, SHORT (it is whole, and has another length) or CORRUPT.

        Raises:
            OSError: whatever does not lie in this one file.
        """
        opened = self._open(name)
        if isinstance(opened, Code):
            return opened
        try:
            code = self._read(opened, name, pieces)
            found = os.fstat(opened)
        except OSError as error:
            if error.errno in _NOT_THE_FILE:
                raise
            code = Code.MISS if error.errno == errno.ESTALE else Code.CORRUPT
            found = None
        finally:
            os.close(opened)
        if code is Code.CORRUPT:
            self.set_aside(name, None if found is None else found.st_ino)
        return code

    def _open(self, name: str) -> int | Code:
        # Whoever evicts a record renames it first and looks for leases then: it may be on its way back.
        for ending in ("", GOING, GONE, ""):
            try:
                return os.open(self.file(name, ending), _READ)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.ESTALE:
                    continue
                if error.errno in _NOT_THE_FILE or ending:
                    raise
                self.set_aside(name, None)  # may not be read, or is no file
                return Code.CORRUPT
        return Code.MISS

    def _read(self, fd: int, name: str, pieces: list[Piece]) -> Code:
        found, size = os.fstat(fd), sum(length for _, length in pieces)
        held = found.st_size - FOOTER_BYTES
        if not stat.S_ISREG(found.st_mode) or held < 1:
            return Code.CORRUPT
        footer, expected = bytearray(FOOTER_BYTES), _footer(bytes.fromhex(name), held)
        if held != size:
            os.preadv(fd, [footer], held)
            return Code.SHORT if footer == expected else Code.CORRUPT
        read = read_all(fd, [*views(pieces), memoryview(footer)])
        return Code.OK if read == found.st_size and footer == expected else Code.CORRUPT

    def set_aside(self, name: str, inode: int | None) -> bool:
        """Rename a damaged record, unless it was replaced since; False if it was not there."""
        path = self.file(name)
        if inode is not None and (found := self.found(name)) is not None and found.st_ino != inode:
            return False
        if not rename(path, path + BAD):
            return False
        os.utime(path + BAD, follow_symlinks=False)  # it stays for a while, from now on
        return True

    def files(self) -> Iterator[os.DirEntry[str]]:
        """Every file below ``records``, whatever it is."""
        with os.scandir(self._records) as folders:
            names = sorted(entry.path for entry in folders if _FOLDER.fullmatch(entry.name))
        for folder in names:
            try:
                with os.scandir(folder) as entries:
                    yield from entries
            except (FileNotFoundError, NotADirectoryError):
                continue  # no folder, or gone since

    def sync(self, names: list[str]) -> None:
        """Make records, and the fact that they are there, survive a crash of the machine."""
        for path in map(self.file, names):
            try:
                _fsync(path)
            except FileNotFoundError:
                continue  # evicted since
        for folder in sorted({f"{self._records}/{name[:2]}" for name in names}):
            _fsync(folder)

    def _refuse_other_use(self) -> None:
        names = sorted(entry.name for entry in os.scandir(self.path))
        foreign = [name for name in names if name not in _OWN_NAMES and not name.startswith(TEMP)]
        if META_FILE not in names and foreign:
            raise UsageFault(
                f"the directory {str(self.path)!r} holds {foreign[0]!r} and is no store of ours;"
                " give an empty one"
            )

    def _join(self, meta: dict[str, Any]) -> str:
        """Agree with the members there are, or found the store; returns its id."""
        own = {"kind": KIND, "format": FORMAT, "id": secrets.token_hex(16), "meta": meta}
        file = self._meta_file
        if not file.exists():
            _create(file, self.temporary(str(self.path)), json.dumps(own, indent=2, sort_keys=True).encode())
        found = _read_meta(file)
        stored = found["meta"]
        unlike = [
            f"{key} is {stored.get(key)!r} there and {meta.get(key)!r} here"
            for key in sorted({*stored, *meta})
            if stored.get(key) != meta.get(key)
        ]
        if unlike:
            raise UsageFault(f"the store in {str(self.path)!r} was made for another use: {'; '.join(unlike)}")
        return str(found["id"])


def remove(path: str) -> bool:
    """Take a file away; False if it was not there."""
    try:
        os.unlink(path)  # noqa: PTH108 - paths are strings here, thousands of times a second
    except FileNotFoundError:
        return False
    return True


def rename(source: str, target: str) -> bool:
    """Rename a file, over whatever has that name; False if it was not there."""
    try:
        os.rename(source, target)  # noqa: PTH104 - as above
    except FileNotFoundError:
        return False
    return True


def _name(source: str, target: str) -> bool:
    """Give a file one more name, unless that is taken; False if it is.

    Where a file cannot have two names, it is renamed, which replaces what came in the last moment.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            return False
        Path(source).rename(target)
    return True


def _read_meta(file: Path) -> dict[str, Any]:
    """The store's own description.

    Raises:
        UsageFault: it is of another kind or format.
    """
    try:
        found = json.loads(file.read_bytes())
        kind, version = found["kind"], found["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageFault(f"{str(file)!r} describes no store: {error}") from error
    if (kind, version) != (KIND, FORMAT):
        raise UsageFault(
            f"{str(file)!r} describes a {kind!r} of format {version!r}; this version reads a {KIND!r} of"
            f" format {FORMAT}; give another directory"
        )
    if set(found) != {"kind", "format", "id", "meta"} or not isinstance(found["meta"], dict):
        raise UsageFault(f"{str(file)!r} has other fields than kind, format, id and meta")
    return dict(found)


def _create(file: Path, temporary: str, content: bytes) -> None:
    """Make a file with its content; if somebody else was quicker, theirs stays."""
    fd = os.open(temporary, _CREATE, 0o600)
    try:
        write_all(fd, [content])
        os.fsync(fd)
    finally:
        os.close(fd)
    _name(temporary, str(file))
    remove(temporary)
    _fsync(str(file.parent))


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _footer(key: bytes, size: int) -> bytes:
    body = _FOOTER.pack(_MAGIC, key, size)
    return body + _SUM.pack(crc32c(body))


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino
