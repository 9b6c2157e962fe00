"""Which rows of memory a step may write, and whose a byte is that it should not have touched.

Memory is filled with one byte, run, and dumped; then the same with another byte.  A byte that differs from
its filling in either dump was written; one that differs between the dumps though it was written depends on
what lay there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.layout import ArenaLayout, layout
from kvcontract.contract.model import TOKEN_AXIS, KvModel

Image = NDArray[np.uint8]
Row = tuple[int, int]
"""(block, position in the page)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's requests.

    Attributes:
        sizes: tokens of each.
        context: tokens of each before the step.
        table: int32[b, p], their pages.
    """

    sizes: Sequence[int]
    context: Sequence[int]
    table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arena's blocks lie in the dumped memory."""

    region: int
    offset_bytes: int
    stride_bytes: int
    blocks: int


class Footprint:
    """What the steps up to one of them may have written.

    Args:
        model: the declaration.
        places: by arena.
        batches: the steps so far, the last one judged.
    """

    def __init__(self, model: KvModel, places: Mapping[str, Place], batches: Sequence[Batch]) -> None:
        self._page_tokens = model.page_tokens
        self._places = places
        self._arenas = {arena.name: arena for space in layout(model).spaces for arena in space.arenas}
        self._rows = {name: rows_of_bytes(arena) for name, arena in self._arenas.items()}
        self._last = batches[-1]
        self._owners: dict[int, int] = {}
        self._written: dict[Row, tuple[int, int]] = {}
        names: dict[int, int] = {}  # a request is known by its first page
        for batch in batches:
            for size, context, pages in zip(batch.sizes, batch.context, batch.table.tolist(), strict=True):
                request = names.setdefault(pages[0], len(names))
                used = pages[: -(-(context + size) // self._page_tokens)]
                self._owners |= dict.fromkeys(used, request)
                for position in range(context, context + size):
                    page, row = divmod(position, self._page_tokens)
                    self._written[pages[page], row] = request, position

    @property
    def rows(self) -> int:
        """Rows of one arena that were to be written."""
        return len(self._written)

    def judge(self, images: tuple[Sequence[Image], Sequence[Image]], fills: tuple[int, int]) -> str | None:
        """What is wrong with memory after the last step.

        Args:
            images: uint8[bytes] of each region, after a run over either filling.
            fills: the two bytes.
        """
        allowed = self._allowed([len(image) for image in images[0]])
        for region, (one, two) in enumerate(zip(*images, strict=True)):
            touched = (one != fills[0]) | (two != fills[1])
            stray = np.flatnonzero(touched & ~allowed[region])
            if len(stray):
                return self._stray(region, int(stray[0]), len(stray))
        for region, (one, two) in enumerate(zip(*images, strict=True)):
            touched = (one != fills[0]) | (two != fills[1])
            for what, bytes_ in (
                ("was not written", allowed[region] & ~touched),
                ("depends on what lay in memory before", allowed[region] & touched & (one != two)),
            ):
                if bytes_.any():
                    return self._lacking(region, int(bytes_.argmax()), what)
        return None

    def _allowed(self, sizes: Sequence[int]) -> list[NDArray[np.bool_]]:
        """bool[bytes] of each region: the rows of committed positions."""
        masks = [np.zeros(size, np.bool_) for size in sizes]
        blocks = sorted({block for block, _ in self._written})
        for name, place in self._places.items():
            rows = self._rows[name]
            per_row = self._page_tokens // self._arenas[name].rows
            for block in blocks:
                mine = {row // per_row for at, row in self._written if at == block}
                start = place.offset_bytes + block * place.stride_bytes
                masks[place.region][start : start + len(rows)] |= np.isin(rows, list(mine))
        return masks

    def _find(self, region: int, byte: int) -> tuple[str, int, int] | None:
        """(arena, block, row of a page or -1 for padding) of a byte; None if it is no arena's."""
        for name, place in self._places.items():
            block, inside = divmod(byte - place.offset_bytes, place.stride_bytes)
            if place.region == region and 0 <= block < place.blocks and inside < len(self._rows[name]):
                per_row = self._page_tokens // self._arenas[name].rows
                row = int(self._rows[name][inside])
                return name, block, row if row < 0 else row * per_row
        return None

    def _stray(self, region: int, byte: int, count: int) -> str:
        spot = self._find(region, byte)
        if spot is None or spot[2] < 0:
            what = "padding between rows or blocks, which belongs to no field"
            name, block = (None, 0) if spot is None else spot[:2]
            head = f"byte {byte} of the memory" if name is None else f"arena {name}, page {block}"
        else:
            head = f"arena {spot[0]}, page {spot[1]}, row {spot[2]}"
            what = self._whose(spot[1], spot[2])
        return f"{self._step()} also wrote {head}: {what} ({count:,} B too many in all)"

    def _whose(self, block: int, row: int) -> str:
        if block == 0:
            return "page 0 pads page tables and is nobody's"
        if block not in self._owners:
            return "no request of the step has that page"
        request = self._owners[block]
        last = max(position for who, position in self._written.values() if who == request)
        page = [at for at, who in self._owners.items() if who == request].index(block)
        position = page * self._page_tokens + row
        return f"position {position} of request {request}, of which positions 0..{last} have been run"

    def _lacking(self, region: int, byte: int, what: str) -> str:
        spot = self._find(region, byte)
        if spot is None:  # allowed bytes are an arena's
            raise ValueError(byte)
        name, block, row = spot
        per_row = self._page_tokens // self._arenas[name].rows
        request, position = next(
            found
            for (at, own), found in self._written.items()
            if at == block and own // per_row == row // per_row
        )
        return (
            f"{self._step()}: arena {name}, page {block}, row {row}"
            f" (position {position} of request {request}) {what}"
        )

    def _step(self) -> str:
        parts = [
            f"positions {context}..{context + size - 1}"
            for size, context in zip(self._last.sizes, self._last.context, strict=True)
        ]
        return f"the step that ran {' and '.join(parts)}"


def rows_of_bytes(arena: ArenaLayout) -> NDArray[np.int64]:
    """int64[content bytes]: the row each byte of a block belongs to; -1 for padding."""
    rows = np.full(arena.content_bytes, -1, np.int64)
    for item in arena.fields:
        grid = np.meshgrid(
            *(np.arange(size) for size in item.shape), np.arange(item.element_bytes), indexing="ij"
        )
        steps = (*item.strides_bytes, 1)
        at = item.offset_bytes + sum(index * step for index, step in zip(grid, steps, strict=True))
        rows[at] = grid[item.axes.index(TOKEN_AXIS)] if TOKEN_AXIS in item.axes else 0
    return rows
