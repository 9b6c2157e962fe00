"""The kernels that run on a device: pages to payloads and back, summed on the way.

Memory is given by address, so that one launch serves all arenas of a batch, whatever tensors they lie in,
and so that what the host gives and gets is read and written where it lies in pinned memory: a copy of it
would stand in line behind the payloads of others.

Nothing here is imported unless triton is there; what each kernel must do is said, in torch, by
`CopyProgram` and by `LaneSums.reference`.
"""
# ruff: noqa: N803, ANN001, ANN202 - compile-time arguments are written like this; triton reads annotations
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, attr-defined, misc"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

UNITS: Final = {1: tl.uint8, 4: tl.uint32}
"""Types by size."""


@triton.jit(do_not_specialize=("source", "count"))
def fetch(source, target, count, BLOCK: tl.constexpr) -> None:
    """Copy int64[count] from an address of the host.

    One program waits for the bus, which copies fill, and not all those that need to know a block.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source.to(tl.pointer_type(tl.int64)) + at, inside), inside)


@triton.jit
def _sides(
    begin,
    part,
    MANY: tl.constexpr,
    UNIT: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Where a row of units is read and written, and which of them: (source, whether, target, whether)."""
    offset, end, ids, block, payload, grains, grain_units = part
    at = begin + tl.arange(0, LANES)
    where = at
    if SPAN:
        where = begin
    inside = (where >= offset) & (where < end)
    wire = payload + at
    pages = wire
    there = inside
    if READ or WRITE:
        grain = where // grain_units
        row = grains + grain * 3
        first = tl.load(row, inside, 0)
        if MANY:
            block = tl.load(ids + tl.load(row + 2, inside, 0), inside, 0)
            first = tl.where(block != 0, first, 0)
        start = first + block * tl.load(row + 1, inside, 0)
        pages = start.to(tl.pointer_type(UNIT)) + (at - grain * grain_units)
        there = inside & (first != 0)
    if READ:
        return pages, there, wire, there
    return wire, inside, pages, there


@triton.jit
def _rows(
    begin,
    part,
    MANY: tl.constexpr,
    UNIT: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """32 rows: of each what `_sides` says."""
    found = ()
    for row in tl.static_range(32):
        if SPAN == 0 or row % max(SPAN, 1) == 0:
            first = begin + row * LANES
            source, known, target, there = _sides(first, part, MANY, UNIT, READ, WRITE, LANES, SPAN)
            inner = 0
        found = found + ((source + inner, known, target + inner, there),)  # noqa: RUF005 - what triton knows
        inner += LANES
    return found


@triton.jit
def _digits(table, LANES: tl.constexpr):
    """A table, in registers, an entry a thread of a warp."""
    found = ()
    for digit in tl.static_range(7):
        row = tl.load(table + digit * 32 + tl.arange(0, 32))
        found = found + (tl.broadcast_to(row[None, :], (LANES // 32, 32)),)  # noqa: RUF005 - what triton knows
    return found


@triton.jit
def _found(digit, chosen):
    """Look up; threads of a warp ask each other, which is quicker than memory and leaves it to others."""
    return tl.gather(digit, chosen.to(tl.int32), 1)


@triton.jit
def _after(state, unit, digits, LANES: tl.constexpr):
    """A lane's state, moved over a row of units, and one unit more; a group is what a warp has."""
    at = tl.reshape(state, (LANES // 32, 32))
    low = _found(digits[0], at & 31) ^ _found(digits[1], (at >> 5) & 31) ^ _found(digits[2], (at >> 10) & 31)
    high = (
        _found(digits[4], (at >> 20) & 15) ^ _found(digits[5], (at >> 24) & 15) ^ _found(digits[6], at >> 28)
    )
    moved = tl.reshape(low ^ high ^ _found(digits[3], (at >> 15) & 31), (LANES,))
    return moved.to(tl.uint32, bitcast=True) ^ unit


_BACK: Final = tl.constexpr(tuple(32 - bit for bit in range(31, -1, -1) if 0x1EDC6F41 >> bit & 1))
"""Castagnoli's polynomial P: how far its other bits are from the highest.

A sum is what a polynomial leaves when P(x) divides it.  P(x) leaves nothing, nor does its square, P(x^2),
nor, as a row has 2^n bits, P of the step from row to row: a row that 32 others follow is worth the sum of 17
of them, to which it is added instead.  Nothing is looked up before 32 rows are left.
"""


@triton.jit
def _added(unit, gone, row: tl.constexpr):
    """A row of a block, and those that are added to it, as far as they are among the gone."""
    for tap in tl.static_range(17):
        if 32 + row - _BACK[tap] < len(gone):
            unit ^= gone[32 + row - _BACK[tap]]
    return unit


@triton.jit
def _behind(gone, digits, LANES: tl.constexpr):
    """The lanes' states, 32 rows of zeros behind their last: of those rows, which hold all that is left."""
    left = ()
    for row in tl.static_range(32):
        left = left + (_added(tl.zeros((LANES,), tl.uint32), gone, row),)  # noqa: RUF005
    state = tl.zeros((LANES,), tl.uint32)
    for _ in range(0, 32, 4):
        state = _after(state, left[0], digits, LANES)
        state = _after(state, left[1], digits, LANES)
        state = _after(state, left[2], digits, LANES)
        state = _after(state, left[3], digits, LANES)
        left = left[4:] + left[:4]
    return state


_VARY: Final = ("wire", "wire_stride", "out", "records", "part_count", "grain_units", "pages_each")
"""Arguments that are not worth a kernel each."""


@triton.jit(do_not_specialize=_VARY)
def carry(
    grains,
    ids,
    parts,
    columns,
    step,
    lanes,
    wire,
    wire_stride,
    out,
    records,
    part_count,
    grain_units,
    pages_each,
    MANY: tl.constexpr,
    UNIT: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Sum parts of records, and copy them where that is asked for; any number of programs.

    Lane l reads the units l, l + LANES, ..., in blocks of 32 rows; units before the part's first count as
    zeros, which change nothing while a state is zero.

    Args:
        grains: int64[grains, 3]: where grain g of block 0 lies in the pages, or 0, and it is skipped; bytes
            from one block to the next; which page of the record it belongs to.
        ids: int64[records, pages_each], blocks; 0: that page of several is left out.
        parts: int32[parts, 2], units of a payload: the first, and how many.
        columns: int32[parts, 32], what each bit of a part's state, 32 rows further, becomes up to the end of
            its segment.
        step: int32[7, 32], a state's digits after LANES units of zeros.
        lanes: int32[32, LANES], each bit of a lane, after the units that follow in its row.
        wire: address of the first payload.
        wire_stride: bytes from one to the next.
        out: address of int32[records, parts], each part's share of its segment's sum.
        records: how many.
        part_count: parts of a record.
        grain_units: units of a grain.
        pages_each: pages of a record.
        MANY: whether that is more than one.
        UNIT: type of a unit.
        READ: pages are summed, not payloads.
        WRITE: what is summed is written to the other side.
        LANES: units of a row, one a thread; a power of two.
        SPAN: rows that always lie in one grain, parts beginning and ending between them; 0: not even one.
    """
    # long: a kernel is one function
    stores = WRITE or records < 0
    digits = _digits(step, LANES)
    for item in range(tl.program_id(0), records * part_count, tl.num_programs(0)):
        record = (item // part_count).to(tl.int64)
        part = item % part_count
        offset = tl.load(parts + part * 2)
        units = tl.load(parts + part * 2 + 1)
        payload = (wire + record * wire_stride).to(tl.pointer_type(UNIT))
        chosen = ids + record * pages_each
        block = record * 0
        if not MANY and (READ or WRITE):
            block = tl.load(chosen)
        end = offset + units
        blocks = tl.cdiv(units, 32 * LANES)
        begin = end - (blocks + 1) * 32 * LANES
        place = (offset, end, chosen, block, payload, grains, grain_units)
        came = ()
        gone = ()
        for _row in tl.static_range(32):
            came = came + (tl.zeros((LANES,), UNIT),)  # noqa: RUF005
            gone = gone + (tl.zeros((LANES,), tl.uint32),)  # noqa: RUF005
        for _ in range(blocks + 1):
            # Each row makes way for one of the next 32, which is on its way while these are added up.
            here = _rows(begin, place, MANY, UNIT, READ, WRITE, LANES, SPAN)
            begin += 32 * LANES
            ahead = _rows(begin, place, MANY, UNIT, READ, WRITE, LANES, SPAN)
            coming = ()
            for row in tl.static_range(32):
                unit = came[row]
                source, known, target, there = ahead[row][0], ahead[row][1], here[row][2], here[row][3]
                # Where nothing is written, too: stores keep the compiler from putting off the loads.
                tl.store(target, unit, there & stores)
                coming = coming + (tl.load(source, known, 0, eviction_policy="evict_first"),)  # noqa: RUF005
                unit = unit.to(tl.uint32)
                unit = _added(unit, gone, row)
                gone = gone + (unit,)  # noqa: RUF005
            came = coming
            gone = gone[32:]
        state = _behind(gone, digits, LANES)
        bits = tl.arange(0, 32)
        table = tl.load(lanes + bits[:, None] * LANES + tl.arange(0, LANES)[None, :])
        column = tl.load(columns + part * 32 + bits)
        moved = tl.where(((state[None, :] >> bits[:, None]) & 1) != 0, table, 0)
        root = tl.xor_sum(tl.xor_sum(moved, 0), 0)
        total = tl.xor_sum(tl.where(((root >> bits) & 1) != 0, column, 0), 0)
        tl.store((out + (record * part_count + part) * 4).to(tl.pointer_type(tl.int32)), total)
