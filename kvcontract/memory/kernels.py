"""The kernels that run on a device: pages to payloads and back, and the sums of payloads.

Memory is given by address, so that one launch serves all arenas of a batch, whatever tensors they lie in.
Nothing here is imported unless triton is there; what each kernel must do is said, in torch, by
`CopyProgram` and by `LaneSums.reference`.
"""
# ruff: noqa: N803, ANN001 - compile-time arguments are written like this; triton reads annotations itself
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

UNITS: Final = {1: tl.uint8, 2: tl.int16, 4: tl.uint32, 8: tl.int64}
"""Types by size."""


@triton.jit  # type: ignore[untyped-decorator] # triton is not typed
def move(
    grain_address,
    grain_stride,
    grain_page,
    ids,
    wire,
    words,
    GRAIN: tl.constexpr,
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TO_WIRE: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    """Copy one tile of one record; grid (tiles, records).

    Args:
        grain_address: int64[grains], where grain g of block 0 lies in the pages; 0: nowhere, it is skipped.
        grain_stride: int64[grains], bytes from one block to the next.
        grain_page: int64[grains], which page of the record it belongs to.
        ids: int64[records, PAGES], blocks; 0 where a record has several pages: that one is left out.
        wire: int64[records], where each payload lies.
        words: of a payload.
        GRAIN: words of a grain; a multiple of TILE, or below it.
        TILE: words that one program copies.
        WORD: type of a word.
        WORD_BYTES: its size.
        TO_WIRE: the direction.
        PAGES: of a record.
    """
    # long: a kernel is one function
    tile = tl.program_id(0)
    record = tl.program_id(1)
    block = tl.load(ids + record * PAGES)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < words
    payload = tl.load(wire + record).to(tl.pointer_type(WORD)) + at
    if GRAIN % TILE == 0:
        grain = (tile * TILE) // GRAIN
        first = tl.load(grain_address + grain)
        if PAGES > 1:
            block = tl.load(ids + record * PAGES + tl.load(grain_page + grain))
            first = tl.where(block != 0, first, 0)
        start = first + block * tl.load(grain_stride + grain)
        pages = start.to(tl.pointer_type(WORD)) + (at - grain * GRAIN)
    else:
        grain = at // GRAIN
        first = tl.load(grain_address + grain, inside, 0)
        if PAGES > 1:
            block = tl.load(ids + record * PAGES + tl.load(grain_page + grain, inside, 0), inside, 0)
            first = tl.where(block != 0, first, 0)
        start = first + block * tl.load(grain_stride + grain, inside, 0)
        pages = (start + (at - grain * GRAIN) * WORD_BYTES).to(tl.pointer_type(WORD))
    inside = inside & (first != 0)
    if TO_WIRE:
        tl.store(payload, tl.load(pages, inside), inside)
    else:
        tl.store(pages, tl.load(payload, inside), inside)


@triton.jit  # type: ignore[untyped-decorator] # triton is not typed
def sum_parts(
    address,
    parts,
    columns,
    step,
    lanes,
    out,
    pieces,
    segments,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Add one part of one record to its segment's sum; grid (parts, records).

    Lane l reads the units l, l + LANES, ...; units before the part's first count as zeros, which change
    nothing while a state is zero.

    Args:
        address: int64[records, pieces].
        parts: int64[parts, 4]: piece, offset in bytes, units, segment.
        columns: int32[parts, 32], what each bit of a part's state becomes up to the end of its segment.
        step: int32[4, 256], a state's bytes after LANES units of zeros.
        lanes: int32[32, LANES], each bit of a lane's state after the units that follow in its row.
        out: int32[records, segments], to be changed by exclusive or.
        pieces: of a record.
        segments: of a record.
        LANES: units that are read at once, a power of two.
        UNIT: type of a unit.
    """
    # long: a kernel is one function
    part = tl.program_id(0)
    record = tl.program_id(1)
    piece = tl.load(parts + part * 4)
    offset = tl.load(parts + part * 4 + 1)
    units = tl.load(parts + part * 4 + 2)
    segment = tl.load(parts + part * 4 + 3)
    data = (tl.load(address + record * pieces + piece) + offset).to(tl.pointer_type(UNIT))
    rows = tl.cdiv(units, LANES)
    lane = tl.arange(0, LANES)
    at = lane + (units - rows * LANES)  # begins below zero where the rows are not full
    state = tl.load(data + at, at >= 0, 0).to(tl.uint32)
    for _ in range(1, rows):
        at += LANES
        unit = tl.load(data + at).to(tl.uint32)
        low = tl.load(step + (state & 255)) ^ tl.load(step + 256 + ((state >> 8) & 255))
        high = tl.load(step + 512 + ((state >> 16) & 255)) ^ tl.load(step + 768 + (state >> 24))
        state = (low ^ high).to(tl.uint32, bitcast=True) ^ unit
    moved = tl.zeros((LANES,), tl.int32)
    for bit in range(32):
        moved ^= tl.where(((state >> bit) & 1) != 0, tl.load(lanes + bit * LANES + lane), 0)
    root = tl.xor_sum(moved, 0)
    bits = tl.arange(0, 32)
    total = tl.xor_sum(tl.where(((root >> bits) & 1) != 0, tl.load(columns + part * 32 + bits), 0), 0)
    tl.atomic_xor(out + record * segments + segment, total, sem="relaxed")
