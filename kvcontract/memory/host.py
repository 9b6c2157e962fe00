"""Copies between addresses of host memory."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

Address = NDArray[np.int64]


def aligned_memory(size_bytes: int, align_bytes: int, *, zeroed: bool = False) -> NDArray[np.uint8]:
    """uint8[bytes] that begins at a multiple of something."""
    whole = (np.zeros if zeroed else np.empty)(size_bytes + align_bytes, np.uint8)
    return whole[-whole.ctypes.data % align_bytes :][:size_bytes]


def copy_runs(target: Address, source: Address, size_bytes: Address) -> None:
    """Copy pieces of memory, one after the other; the GIL is released while bytes move.

    Args:
        target: int64[n], where each begins.
        source: int64[n], likewise; no piece overlaps its target.
        size_bytes: int64[n].
    """
    target, source, size_bytes = joined(target, source, size_bytes)
    for to, at, size in zip(target.tolist(), source.tolist(), size_bytes.tolist(), strict=True):
        ctypes.memmove(to, at, size)


def joined(target: Address, source: Address, size_bytes: Address) -> tuple[Address, Address, Address]:
    """The same copies, with those made one that follow each other on both sides.

    Args:
        target: int64[n].
        source: int64[n].
        size_bytes: int64[n].
    """
    if len(target) < 2:  # noqa: PLR2004 - nothing to join
        return target, source, size_bytes
    follows = (target[1:] == target[:-1] + size_bytes[:-1]) & (source[1:] == source[:-1] + size_bytes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return target[first], source[first], np.add.reduceat(size_bytes, first)
