"""Bytes between a file and memory given by address: in big pieces, nothing staged, the GIL released."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_PYBUF_WRITE: Final = 0x200
_MOST_VIEWS: Final = 1024  # that one system call takes (IOV_MAX)

_memory: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object  # type: ignore[attr-defined] # a ctypes function behind the Callable
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)  # type: ignore[attr-defined]


def views(pieces: Iterable[tuple[int, int]]) -> list[memoryview]:
    """Views of (address, bytes) pieces, empty ones left out; the caller keeps the memory alive."""
    return [_memory(address, size, _PYBUF_WRITE) for address, size in pieces if size]


def write_all(fd: int, parts: Sequence[memoryview | bytes]) -> None:
    """Write parts from the beginning of a file on.

    Raises:
        OSError: not all of it was written.
    """
    todo = [memoryview(part) for part in parts]
    if _move(os.pwritev, fd, todo) < sum(map(len, todo)):
        raise OSError(errno.EIO, "a write took nothing and gave no reason")


def read_all(fd: int, parts: Sequence[memoryview]) -> int:
    """Fill parts from the beginning of a file; returns how many bytes there were for them."""
    return _move(os.preadv, fd, list(parts))


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, todo: list[memoryview]) -> int:
    """Call until all parts are through or nothing moves; a call may stop in the midst of a part."""
    at, first = 0, 0
    while first < len(todo):
        moved = call(fd, todo[first : first + _MOST_VIEWS], at)
        if not moved:
            break
        at += moved
        while first < len(todo) and moved >= len(todo[first]):
            moved -= len(todo[first])
            first += 1
        if moved:
            todo[first] = todo[first][moved:]
    return at
