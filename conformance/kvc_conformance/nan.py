"""Which bits make a NaN."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NAN_BITS: Final = {
    "float64": (0x7FF << 52, (1 << 52) - 1),
    "float32": (0xFF << 23, (1 << 23) - 1),
    "float16": (0x1F << 10, (1 << 10) - 1),
    "bfloat16": (0xFF << 7, (1 << 7) - 1),
    "float8_e5m2": (0x1F << 2, 3),
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
"""Per dtype: the bits that are all set in a NaN, and those of which one at least is set."""


def is_nan(elements: NDArray[np.uint8], nan: tuple[int, int]) -> NDArray[np.bool_]:
    """bool[n] of elements uint8[n, width], little endian."""
    shifts = np.arange(elements.shape[1], dtype=np.uint64) * np.uint64(8)
    codes = (elements.astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)
    full, some = np.uint64(nan[0]), np.uint64(nan[1])
    found: NDArray[np.bool_] = (codes & full == full) & (codes & some != 0)
    return found


def codes_nan(dtype: str, *codes: int) -> list[bool]:
    """Which elements of a dtype, each given as its bits, are NaN."""
    full, some = NAN_BITS.get(dtype, (0, 0))
    return [code & full == full and code & some != 0 for code in codes]
