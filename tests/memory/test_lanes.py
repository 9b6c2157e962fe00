"""Sums as a device computes them, in torch on the host, against the checksum library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontract.memory.checksum import SegmentSums, crc32c
from kvcontract.memory.lanes import DIGITS, LANES, ROWS_BEHIND, Columns, LaneSums, advance

CPU = torch.device("cpu")


def moved(state: int, columns: Columns) -> int:
    """A state, times a matrix."""
    found = 0
    for bit, column in enumerate(columns.tolist()):
        found ^= column if state >> bit & 1 else 0
    return found


@settings(max_examples=25, deadline=None)
@given(
    segments=st.lists(st.integers(1, 40 * 4 * LANES), min_size=1, max_size=4),
    unit=st.sampled_from([1, 4, 8]),
    part_bytes=st.sampled_from([64, 4096, 128 * 1024]),
    seed=st.integers(0, 2**32 - 1),
)
def test_e7_lanes_sum_like_the_library(segments: list[int], unit: int, part_bytes: int, seed: int) -> None:
    """E7: segments of any length, in parts and lanes, have the sums that the library gives them."""
    sizes = tuple(max(1, size // unit) * unit for size in segments)
    data = np.random.default_rng(seed).integers(0, 256, (2, sum(sizes)), dtype=np.uint8)
    at = data.ctypes.data + np.array([[0], [sum(sizes)]], np.int64)
    want = SegmentSums((sum(sizes),), sizes).sums(at)
    sums = LaneSums(sizes, CPU, part_bytes=part_bytes)
    assert sums.unit_bytes == (4 if all(size % 4 == 0 for size in sizes) else 1)
    shares = sums.reference(torch.from_numpy(data)).numpy()
    assert shares.shape == (2, len(sums))
    assert np.array_equal(sums.joined(shares), want)
    bytewise = LaneSums(sizes, CPU, 1, part_bytes)
    assert np.array_equal(bytewise.joined(bytewise.reference(torch.from_numpy(data)).numpy()), want)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("units", [0, 1, 2, 1000, 123_457])
def test_advancing_is_appending_zeros(unit: int, units: int) -> None:
    """A state that is advanced is the state after as many zeros."""
    state = 0x12345678
    # The library inverts on its way in and out.
    inverted = 0xFFFFFFFF
    assert crc32c(bytes(unit * units), state ^ inverted) ^ inverted == moved(state, advance(unit, units))


@pytest.mark.parametrize("unit", [1, 4])
def test_e7_a_row_is_worth_the_sum_of_some_of_the_32_that_follow(unit: int) -> None:
    """What a kernel adds rows by: the polynomial of the sum, of the step from row to row, is nothing."""
    bits = [bit for bit in range(ROWS_BEHIND) if 0x1EDC6F41 >> bit & 1]
    for state in (1, 0x80000000, 0x12345678):
        worth = 0
        for bit in bits:
            worth ^= moved(state, advance(unit, bit * LANES))
        assert worth == moved(state, advance(unit, ROWS_BEHIND * LANES))


@pytest.mark.parametrize("unit", [1, 4])
def test_e7_a_digit_of_a_state_moves_as_the_state_does(unit: int) -> None:
    """A state is the sum of its digits, before and after a row of zeros; none has more values than a warp."""
    step = LaneSums((unit * 4096,), CPU, unit).step.numpy().view(np.uint32)
    for state in (1, 0x80000000, 0x12345678, 0xFFFFFFFF):
        digits = [state >> shift & mask for shift, mask in DIGITS]
        assert sum(digit << shift for digit, (shift, _) in zip(digits, DIGITS, strict=True)) == state
        assert max(digits) < step.shape[1] == 32
        found = np.bitwise_xor.reduce([row[digit] for row, digit in zip(step, digits, strict=True)])
        assert found == moved(state, advance(unit, LANES))
