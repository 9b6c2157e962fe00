"""crc32c as a device computes it: many lanes, each over every n-th unit, joined by linear algebra.

The sum of a segment without the usual inversions is linear over GF(2): it is the exclusive or of what each
unit alone would give.  Advancing a state over zeros is multiplication by a 32 x 32 matrix of bits, kept as
its columns.  So a segment is cut into parts, a part into lanes, and what they find is advanced to the
segment's end and added up.  The inversions add the sum of as many zero bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.memory.checksum import crc32c

LANES: Final = 128
ROWS_BEHIND: Final = 32
"""Rows of zeros that follow a part while it is summed: as many as a state has bits."""

DIGITS: Final = ((0, 31), (5, 31), (10, 31), (15, 31), (20, 15), (24, 15), (28, 15))
"""What a state is cut into to be looked up, shift and mask: as a warp has threads, a digit has values."""

PART_BYTES: Final = 128 * 1024
"""Bytes that are summed in one go: enough parts to share them out evenly, few enough to join cheaply."""

_ORDER: Final = 2**31 - 1
"""Bits of zeros after which every state is what it was."""

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli, reflected
_BITS: Final = 32
_DIGIT_VALUES: Final = 32
_ZEROS: Final = bytes(64 * 1024)
_MASK: Final = 0xFFFFFFFF

Columns = NDArray[np.uint32]
"""uint32[32]: what a matrix makes of each bit of a state."""


def _apply(matrix: Columns, states: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A matrix times states, uint32[...]."""
    found = np.zeros_like(states)
    for bit in range(_BITS):
        found ^= np.where((states >> np.uint32(bit)) & np.uint32(1), matrix[bit], np.uint32(0))
    return found


@cache
def _power(unit_bytes: int, log: int) -> Columns:
    """The matrix that advances a state over 2 ** log units of zeros."""
    if log:
        half = _power(unit_bytes, log - 1)
        return _apply(half, half)
    columns = []
    for bit in range(_BITS):
        state = 1 << bit
        for _ in range(8 * unit_bytes):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
        columns.append(state)
    return np.array(columns, np.uint32)


def advance(unit_bytes: int, units: int) -> Columns:
    """The matrix that advances a state over some units of zeros."""
    found = np.uint32(1) << np.arange(_BITS, dtype=np.uint32)
    log = 0
    while units >> log:
        if units >> log & 1:
            found = _apply(_power(unit_bytes, log), found)
        log += 1
    return found


def _digit_table(unit_bytes: int, units: int) -> NDArray[np.uint32]:
    """uint32[DIGITS, 32]: a state's digits after some units of zeros."""
    values, matrix = np.arange(_DIGIT_VALUES, dtype=np.uint32), advance(unit_bytes, units)
    inside = (values & np.uint32(mask) for _, mask in DIGITS)
    shifted = (digit << np.uint32(shift) for digit, (shift, _) in zip(inside, DIGITS, strict=True))
    return np.stack([_apply(matrix, digit) for digit in shifted])


def _lane_table(unit_bytes: int) -> NDArray[np.uint32]:
    """uint32[32, LANES]: each bit of a lane, after the units that follow it."""
    table = np.empty((LANES, _BITS), np.uint32)
    table[LANES - 1] = np.uint32(1) << np.arange(_BITS, dtype=np.uint32)
    one = advance(unit_bytes, 1)
    for lane in range(LANES - 2, -1, -1):
        table[lane] = _apply(one, table[lane + 1])
    return np.ascontiguousarray(table.T)


@cache
def _of_zeros(size: int) -> int:
    value = 0
    while size:
        step = min(size, len(_ZEROS))
        value = crc32c(memoryview(_ZEROS)[:step], value)
        size -= step
    return value


def _on(device: torch.device, array: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int32)).to(device)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of one unit, on one device."""

    step: Tensor
    lanes: Tensor


@cache
def _tables(unit_bytes: int, device: torch.device) -> _Tables:
    step, lanes = _digit_table(unit_bytes, LANES), _lane_table(unit_bytes)
    return _Tables(_on(device, step), _on(device, lanes))


class LaneSums:
    """Sums the segments of payloads on a device, part by part.

    Args:
        segments: bytes of each segment; they add up to the payload.
        device: where payloads lie.
        word_bytes: what their pieces are aligned to; 4 is enough.
        part_bytes: what is summed in one go.

    Attributes:
        unit_bytes: 4, or 1 where something lies between.
        segments: how many.
        parts: int32[parts, 2], the first unit of each, and how many.
        columns: int32[parts, 32], from the state of each, ROWS_BEHIND rows further, to its share of the
            segment's sum.
        step: int32[DIGITS, 32], a state's digits after LANES units of zeros.
        lanes: int32[32, LANES], each bit of a lane, after the units that follow it.
    """

    def __init__(
        self,
        segments: Sequence[int],
        device: torch.device,
        word_bytes: int = 4,
        part_bytes: int = PART_BYTES,
    ) -> None:
        whole = word_bytes % 4 == 0 and not any(size % 4 for size in segments)
        self.unit_bytes = 4 if whole else 1
        parts: list[tuple[int, int]] = []
        columns, self._first = [], np.zeros(len(segments), np.int64)
        begin = 0
        for number, size in enumerate(segments):
            self._first[number] = len(parts)
            for at in range(0, size, part_bytes):
                step = min(part_bytes, size - at)
                parts.append(((begin + at) // self.unit_bytes, step // self.unit_bytes))
                behind = (size - at - step) // self.unit_bytes + 1 - ROWS_BEHIND * LANES
                columns.append(advance(self.unit_bytes, behind % _ORDER))
            begin += size
        self._parts, self.segments = parts, len(segments)
        self._of_zeros = np.array([_of_zeros(size) for size in segments], np.uint32)
        self.parts = torch.tensor(parts, dtype=torch.int32).to(device)
        self.columns = _on(device, np.stack(columns))
        tables = _tables(self.unit_bytes, device)
        self.step, self.lanes = tables.step, tables.lanes

    def __len__(self) -> int:
        return len(self._parts)

    def aligned(self, units: int) -> bool:
        """Whether every part begins and ends between groups of so many units."""
        return all(first % units == 0 and size % units == 0 for first, size in self._parts)

    def joined(self, shares: NDArray[np.int32]) -> NDArray[np.uint32]:
        """crc32c of each segment, uint32[n, segments], from what the parts give, int32[n, parts]."""
        found: NDArray[np.uint32] = np.bitwise_xor.reduceat(shares.view(np.uint32), self._first, axis=1)
        return found ^ self._of_zeros

    def reference(self, payloads: Tensor) -> Tensor:
        """What the parts of uint8[n, payload_bytes] give, in torch: for devices without triton."""
        step, lanes = self.step.long() & _MASK, self.lanes.long() & _MASK
        shares = torch.empty(len(payloads), len(self), dtype=torch.int32, device=payloads.device)
        for number, ((offset, units), columns) in enumerate(zip(self._parts, self.columns, strict=True)):
            rows = -(-units // LANES)
            data = payloads[:, offset * self.unit_bytes : (offset + units) * self.unit_bytes]
            padded = torch.zeros(
                len(data), rows * LANES * self.unit_bytes, dtype=torch.uint8, device=data.device
            )
            padded[:, padded.shape[1] - data.shape[1] :] = data
            words = padded if self.unit_bytes == 1 else padded.view(torch.int32)
            words = words.view(len(data), rows, LANES)
            state = words[:, 0].long() & _MASK
            for row in range(1, rows):
                state = _moved(state, step) ^ (words[:, row].long() & _MASK)
            for _ in range(ROWS_BEHIND):
                state = _moved(state, step)
            root = _folded(state, lanes)
            share = _folded(root[:, None].expand(-1, 1), (columns.long() & _MASK)[:, None])
            shares[:, number] = share.to(torch.int32)
        return shares


def _moved(state: Tensor, step: Tensor) -> Tensor:
    """States, int64[...], after the zeros of a step, int64[DIGITS, 32]."""
    moved = torch.zeros_like(state)
    for digit, (shift, mask) in zip(step, DIGITS, strict=True):
        moved ^= digit[state >> shift & mask]
    return moved


def _folded(states: Tensor, columns: Tensor) -> Tensor:
    """Multiply int64[n, lanes] by lanes' matrices [32, lanes] and add up: int64[n]."""
    moved = torch.zeros_like(states)
    for bit in range(_BITS):
        moved ^= torch.where((states >> bit & 1) != 0, columns[bit], 0)
    while moved.shape[1] > 1:
        half = moved.shape[1] // 2
        moved = moved[:, :half] ^ moved[:, half:]
    return moved[:, 0]
