"""The kernels that run on a device: pages to payloads and back, summed on the way.

Memory is given by address, so that one launch serves all arenas of a batch, whatever tensors they lie in,
and so that what the host gives and gets is read and written where it lies in pinned memory: a copy of it
would stand in line behind the payloads of others.

Nothing here is imported unless triton is there; what each kernel must do is said, in torch, by
`CopyProgram` and by `LaneSums.reference`.
"""
# ruff: noqa: N803, ANN001, ANN202 - compile-time arguments are written like this; triton reads annotations
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

UNITS: Final = {1: tl.uint8, 4: tl.uint32}
"""Types by size."""


@triton.jit  # type: ignore[untyped-decorator] # triton is not typed
def fetch(source, target, count, BLOCK: tl.constexpr) -> None:
    """Copy int64[count] from an address of the host."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source.to(tl.pointer_type(tl.int64)) + at, inside), inside)


@triton.jit  # type: ignore[untyped-decorator] # triton is not typed
def _sides(
    begin,
    offset,
    ids,
    block,
    payload,
    grains,
    GRAIN: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Where a row of units is read and written, and which of them: (source, whether, target, whether)."""
    at = begin + tl.arange(0, LANES)
    inside = at >= offset
    wire = payload + at
    if WIDE:
        inside = tl.max_constancy(inside, 4)
        wire = tl.max_contiguous(tl.multiple_of(wire, 16), 4)
    pages = wire
    there = inside
    if READ or WRITE:
        if WHOLE:
            where = begin
            known = begin >= offset
        else:
            where = at
            known = inside
        grain = where // GRAIN
        row = grains + grain * 3
        first = tl.load(row, known, 0)
        if PAGES > 1:
            block = tl.load(ids + tl.load(row + 2, known, 0), known, 0)
            first = tl.where(block != 0, first, 0)
        start = first + block * tl.load(row + 1, known, 0)
        pages = start.to(tl.pointer_type(UNIT)) + (at - grain * GRAIN)
        there = inside & (first != 0)
        if WIDE:
            there = tl.max_constancy(there, 4)
            pages = tl.max_contiguous(tl.multiple_of(pages, 16), 4)
    if READ:
        return pages, there, wire, there
    return wire, inside, pages, there


@triton.jit
def _after(state, unit, step):
    """A lane's state, moved over a row of units, and one unit more."""
    low = tl.load(step + (state & 255)) ^ tl.load(step + 256 + ((state >> 8) & 255))
    high = tl.load(step + 512 + ((state >> 16) & 255)) ^ tl.load(step + 768 + (state >> 24))
    return (low ^ high).to(tl.uint32, bitcast=True) ^ unit.to(tl.uint32)


_VARY: Final = ("host_ids", "wire", "wire_stride", "out", "records")  # not worth a kernel each


@triton.jit(do_not_specialize=_VARY)  # type: ignore[untyped-decorator] # triton is not typed
def carry(
    grains,
    ids,
    parts,
    columns,
    step,
    joins,
    lanes,
    host_ids,
    wire,
    wire_stride,
    out,
    records,
    part_count,
    GRAIN: tl.constexpr,
    PAGES: tl.constexpr,
    LANES: tl.constexpr,
    JOINS: tl.constexpr,
    UNIT: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Sum parts of records, and copy them where that is asked for; any number of programs.

    Lane l reads the units l, l + LANES, ...; units before the part's first count as zeros, which change
    nothing while a state is zero.

    Args:
        grains: int64[grains, 3]: where grain g of block 0 lies in the pages, or 0, and it is skipped; bytes
            from one block to the next; which page of the record it belongs to.
        ids: int64[records, PAGES], blocks, where a record has several pages; 0: that page is left out.
        parts: int32[parts, 2], units of a payload: the first, and how many.
        columns: int32[parts, 32], what each bit of a part's state becomes up to the end of its segment.
        step: int32[4, 256], a state's bytes after LANES units of zeros.
        joins: int32[JOINS, 4, 256], likewise after 1, 2, 4, ... units.
        lanes: int32[32, LANES >> JOINS], each bit of what is left, after the units that follow in its row.
        host_ids: address of int64[records], blocks, where a record has one page.
        wire: address of the first payload.
        wire_stride: bytes from one to the next.
        out: address of int32[records, parts], each part's share of its segment's sum.
        records: how many.
        part_count: parts of a record.
        GRAIN: units of a grain.
        PAGES: of a record.
        LANES: units that are read at once, a power of two.
        JOINS: how often neighbouring lanes are joined.
        UNIT: type of a unit.
        READ: pages are summed, not payloads.
        WRITE: what is summed is written to the other side.
        WIDE: four units always lie together, aligned.
        WHOLE: LANES units do, and parts begin and end between them.
    """
    # long: a kernel is one function
    stores = WRITE or records < 0
    for item in range(tl.program_id(0), records * part_count, tl.num_programs(0)):
        record = (item // part_count).to(tl.int64)
        part = item % part_count
        offset = tl.load(parts + part * 2)
        units = tl.load(parts + part * 2 + 1)
        payload = (wire + record * wire_stride).to(tl.pointer_type(UNIT))
        chosen = ids + record * PAGES
        block = record * 0
        if PAGES == 1 and (READ or WRITE):
            block = tl.load((host_ids + record * 8).to(tl.pointer_type(tl.int64)))
        rows = tl.cdiv(units, 4 * LANES) * 4
        begin = offset + units - rows * LANES
        state = tl.zeros((LANES,), tl.uint32)
        for _ in range(0, rows, 4):
            # Four rows are on their way at once: one alone would be waited for.
            s0, i0, t0, o0 = _sides(
                begin,
                offset,
                chosen,
                block,
                payload,
                grains,
                GRAIN,
                PAGES,
                UNIT,
                READ,
                WRITE,
                LANES,
                WIDE,
                WHOLE,
            )
            u0 = tl.load(s0, i0, 0, eviction_policy="evict_first")
            s1, i1, t1, o1 = _sides(
                begin + LANES,
                offset,
                chosen,
                block,
                payload,
                grains,
                GRAIN,
                PAGES,
                UNIT,
                READ,
                WRITE,
                LANES,
                WIDE,
                WHOLE,
            )
            u1 = tl.load(s1, i1, 0, eviction_policy="evict_first")
            s2, i2, t2, o2 = _sides(
                begin + 2 * LANES,
                offset,
                chosen,
                block,
                payload,
                grains,
                GRAIN,
                PAGES,
                UNIT,
                READ,
                WRITE,
                LANES,
                WIDE,
                WHOLE,
            )
            u2 = tl.load(s2, i2, 0, eviction_policy="evict_first")
            s3, i3, t3, o3 = _sides(
                begin + 3 * LANES,
                offset,
                chosen,
                block,
                payload,
                grains,
                GRAIN,
                PAGES,
                UNIT,
                READ,
                WRITE,
                LANES,
                WIDE,
                WHOLE,
            )
            u3 = tl.load(s3, i3, 0, eviction_policy="evict_first")
            # Where nothing is written, too: stores keep the compiler from putting off the loads.
            tl.store(t0, u0, o0 & stores)
            tl.store(t1, u1, o1 & stores)
            tl.store(t2, u2, o2 & stores)
            tl.store(t3, u3, o3 & stores)
            state = _after(state, u0, step)
            state = _after(state, u1, step)
            state = _after(state, u2, step)
            state = _after(state, u3, step)
            begin += 4 * LANES
        # Neighbours are joined until few are left, whose way to the end of the row a table knows.
        for level in tl.static_range(JOINS):
            early, late = tl.split(tl.reshape(state, (LANES >> (level + 1), 2)))
            state = _after(early, late, joins + level * 1024)
        bits = tl.arange(0, 32)
        left = tl.arange(0, LANES >> JOINS)
        table = tl.load(lanes + bits[:, None] * (LANES >> JOINS) + left[None, :])
        moved = tl.where(((state[None, :] >> bits[:, None]) & 1) != 0, table, 0)
        root = tl.xor_sum(tl.xor_sum(moved, 0), 0)
        total = tl.xor_sum(tl.where(((root >> bits) & 1) != 0, tl.load(columns + part * 32 + bits), 0), 0)
        tl.store((out + (record * part_count + part) * 4).to(tl.pointer_type(tl.int32)), total)
