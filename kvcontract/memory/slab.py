"""Pieces of one large piece of memory: pinning is slow, so it is done once, and what is pinned is cut up."""

from __future__ import annotations

import ctypes
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvcontract.contract.errors import InternalFault

PAGE_BYTES: Final = 4096
"""What pieces are aligned to: the memory's own pages, and what direct I/O of any device takes."""

Allocate = Callable[[int], Any]
"""Bytes -> a writable buffer of that many; pinned memory for a device, for instance."""


class Holes:
    """Which parts of a range are free, found first fit; not thread-safe.

    Args:
        size_bytes: of the range, all of it free.
    """

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)] if size_bytes else []
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int | None:
        """Where a piece begins, at a multiple of PAGE_BYTES; None if no hole is large enough."""
        size = max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number : number + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = size
                return start
        return None

    def give(self, start: int) -> None:
        """Take a piece back, and join it with the holes beside it."""
        size = self._taken.pop(start, None)
        if size is None:
            raise InternalFault(f"nothing was taken at {start:,}")
        end = start + size
        for hole in [hole for hole in self._free if hole[1] == start or hole[0] == end]:
            self._free.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
        insort(self._free, (start, end))


class Slab:
    """Gives out pieces of memory that is allocated once; callable like `Allocate`, not thread-safe.

    A piece comes back with the last reference to it.  What no hole is large enough for is allocated apart.

    Args:
        size_bytes: of the large piece.
        allocate: where memory comes from.
    """

    def __init__(self, size_bytes: int, allocate: Allocate) -> None:
        self._allocate = allocate
        whole = allocate(size_bytes + PAGE_BYTES)
        self._begin = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % PAGE_BYTES
        self._whole = whole
        self._holes = Holes(size_bytes)
        # The garbage collector may be the one who gives back, in the middle of anything.
        self._returned: deque[int] = deque()

    def __call__(self, size_bytes: int) -> Any:
        """Memory of that many bytes."""
        while self._returned:
            self._holes.give(self._returned.popleft())
        start = self._holes.take(size_bytes)
        if start is None:
            return self._allocate(size_bytes)
        piece = (ctypes.c_ubyte * size_bytes).from_buffer(self._whole, self._begin + start)
        weakref.finalize(piece, self._returned.append, start).atexit = False
        return piece
