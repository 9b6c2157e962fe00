"""crc32c over memory given by address, at the speed of the library and with the GIL released.

A checksummed segment may lie in several pieces (one run an arena when memory is layer-first), so sums are
carried from piece to piece and nothing is gathered to be summed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault, require

_PYBUF_READ: Final = 0x100
_RELEASE_GIL: Final = -1  # the library's default: released above 32 KiB, where it pays

_memory: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object  # type: ignore[attr-defined] # a ctypes function behind the Callable
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)  # type: ignore[attr-defined]


def crc32c(data: bytes | memoryview | NDArray[np.uint8], value: int = 0) -> int:
    """The crc32c (Castagnoli) of a buffer, continuing from `value`."""
    return _library()(data, value, _RELEASE_GIL)


@cache
def _library() -> Callable[..., int]:
    return cast("Callable[..., int]", require("crc32c", "runtime").crc32c)


def crc32c_iov(address: Iterable[int], length_bytes: Iterable[int], value: int = 0) -> int:
    """The crc32c of pieces of memory, as if they were one.

    The caller keeps the memory alive and readable.
    """
    for start, size in zip(address, length_bytes, strict=True):
        value = crc32c(_memory(int(start), int(size), _PYBUF_READ), value)
    return value


Cut = tuple[int, int, int]
"""A piece of a record, where in it, and how many bytes."""


def cuts(length_bytes: Sequence[int], segments: Sequence[int]) -> list[list[Cut]]:
    """Where each segment of a record lies.

    Args:
        length_bytes: of each piece of a record, in order.
        segments: bytes of each segment; they add up to the pieces.
    """
    if sum(length_bytes) != sum(segments):
        raise InternalFault(f"pieces of {sum(length_bytes)} B cannot be segments of {sum(segments)} B")
    ends = list(accumulate(segments))
    found: list[list[Cut]] = [[] for _ in segments]
    at, segment = 0, 0
    for piece, size in enumerate(length_bytes):
        inside = 0
        while inside < size:
            while at == ends[segment]:
                segment += 1
            step = min(size - inside, ends[segment] - at)
            found[segment].append((piece, inside, step))
            inside += step
            at += step
    return found


class SegmentSums:
    """Sums the segments of records whose pieces have the same lengths; of host memory.

    Args:
        length_bytes: of each piece of a record, in order.
        segments: bytes of each segment; they add up to the pieces.
    """

    def __init__(self, length_bytes: Sequence[int], segments: Sequence[int]) -> None:
        self._cuts = cuts(length_bytes, segments)

    def sums(self, address: NDArray[np.int64]) -> NDArray[np.uint32]:
        """crc32c of each segment.

        Args:
            address: int64[n, pieces], where each piece of each record begins.

        Returns:
            uint32[n, segments].
        """
        found = np.empty((len(address), len(self._cuts)), np.uint32)
        for row, starts in enumerate(address.tolist()):
            for column, cuts in enumerate(self._cuts):
                value = 0
                for piece, inside, size in cuts:
                    value = crc32c(_memory(starts[piece] + inside, size, _PYBUF_READ), value)
                found[row, column] = value
        return found
