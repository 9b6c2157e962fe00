"""SipHash-2-4 with 128 bits of output, over a chain of pages.

Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012), and their reference code for the long
output. `keys.py` says what is hashed and why.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcontract.core.jit import kernel

# Shifts are uint64 because numba would widen uint64 mixed with int to float.
_I0, _I1 = np.uint64(0x736F6D6570736575), np.uint64(0x646F72616E646F6D)
_I2, _I3 = np.uint64(0x6C7967656E657261), np.uint64(0x7465646279746573)
_LONG, _SECOND_HALF = np.uint64(0xEE), np.uint64(0xDD)
_S13, _S16, _S17, _S21, _S32 = (np.uint64(bits) for bits in (13, 16, 17, 21, 32))
_S43, _S47, _S48, _S51, _S56 = (np.uint64(bits) for bits in (43, 47, 48, 51, 56))
_LOW_BYTE = np.uint64(0xFF)


def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> tuple[np.uint64, ...]:
    v0 = v0 + v1
    v1 = (v1 << _S13) | (v1 >> _S51)
    v1 = v1 ^ v0
    v0 = (v0 << _S32) | (v0 >> _S32)
    v2 = v2 + v3
    v3 = (v3 << _S16) | (v3 >> _S48)
    v3 = v3 ^ v2
    v0 = v0 + v3
    v3 = (v3 << _S21) | (v3 >> _S43)
    v3 = v3 ^ v0
    v2 = v2 + v1
    v1 = (v1 << _S17) | (v1 >> _S47)
    v1 = v1 ^ v2
    v2 = (v2 << _S32) | (v2 >> _S32)
    return v0, v1, v2, v3


def _absorb(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, word: np.uint64
) -> tuple[np.uint64, ...]:
    v3 = v3 ^ word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


def _finish(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> tuple[np.uint64, ...]:
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0, v1, v2, v3


def _sample() -> tuple[Any, ...]:
    state, flags, extras = np.zeros(4, np.uint64), np.zeros(0, np.uint8), np.zeros((0, 2), np.uint64)
    return np.zeros(4, np.uint32), 1, 2, 1, state, flags, extras, np.zeros((2, 2), np.uint64)


@kernel(sample=_sample, helpers=(_round, _absorb, _finish))
def hash_pages(
    words: npt.NDArray[np.uint32],
    step: int,
    page_tokens: int,
    kind: int,
    state: npt.NDArray[np.uint64],
    flags: npt.NDArray[np.uint8],
    extras: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint64],
) -> None:
    """Hash a chain of pages, each over its parent's key, in one call.

    Args:
        words: token ids as u32; token i is `words[i * step]`.
        step: words per token: 1 for 32-bit ids, 2 for 64-bit ones.
        page_tokens: tokens of a page.
        kind: kind of name, 1 to 255.
        state: uint64 [4]: SipHash key, then the parent of the first page.
        flags: uint8 [pages], 1 where a page has extra identity; or [0].
        extras: digests of the extra identity, uint64 [pages, 2]; or [0, 2].
        out: keys, uint64 [pages, 2], written.
    """
    parent_0, parent_1 = state[2], state[3]
    at = 0
    for page in range(out.shape[0]):
        extra = 1 if len(flags) and flags[page] else 0
        size = 24 + 4 * page_tokens + 16 * extra
        header = np.uint64(kind) | np.uint64(extra << 8) | (np.uint64(page_tokens) << _S32)
        v0, v1, v2, v3 = state[0] ^ _I0, state[1] ^ _I1 ^ _LONG, state[0] ^ _I2, state[1] ^ _I3
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent_0)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent_1)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, header)
        if extra:
            v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, extras[page, 0])
            v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, extras[page, 1])
        for _ in range(page_tokens // 2):
            word = np.uint64(words[at]) | (np.uint64(words[at + step]) << _S32)
            v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
            at += 2 * step
        last = (np.uint64(size) & _LOW_BYTE) << _S56  # the format's closing word
        if page_tokens % 2:
            last = last | np.uint64(words[at])
            at += step
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last)
        v0, v1, v2, v3 = _finish(v0, v1, v2 ^ _LONG, v3)
        parent_0 = v0 ^ v1 ^ v2 ^ v3
        v0, v1, v2, v3 = _finish(v0, v1 ^ _SECOND_HALF, v2, v3)
        parent_1 = v0 ^ v1 ^ v2 ^ v3
        out[page, 0], out[page, 1] = parent_0, parent_1
