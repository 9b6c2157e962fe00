"""Which rows and slots of memory a step may write, and whose a byte is that it should not have touched.

Memory is filled with one byte, run, and dumped; then the same with another byte.  A byte that differs from
what lay there before the step in either dump was written; one that differs between the dumps though it was
written depends on what lay there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.layout import ArenaLayout, layout
from kvcontract.contract.model import TOKEN_AXIS, Full, KvModel

Image = NDArray[np.uint8]
Kind = Literal["paged", "bounded"]
Images = tuple[Sequence[Image], Sequence[Image]]
"""Of each region, over either filling."""

Block = tuple[str, int]
"""(key of a space, block)."""

Written = dict[Block, set[int]]
"""Rows of blocks, by token; of a slot the first."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's requests.

    Attributes:
        sizes: tokens of each.
        context: tokens of each before the step.
        tables: int32[b, p] by paged space, their pages; 0 where they have none.
        slots: int32[b] by bounded group, their live slots.
    """

    sizes: Sequence[int]
    context: Sequence[int]
    tables: Mapping[str, NDArray[np.int32]]
    slots: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arena's blocks lie in the dumped memory."""

    region: int
    offset_bytes: int
    stride_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Spot:
    """Whose byte it is: row of a page, 0 of a slot, or -1 for padding."""

    arena: str
    space: str
    block: int
    row: int


class Footprint:
    """What the steps up to one of them may have written.

    Args:
        model: the declaration.
        places: by arena.
        batches: the steps so far, the last one judged.
        kind: judge slots, or everything else.
    """

    def __init__(
        self, model: KvModel, places: Mapping[str, Place], batches: Sequence[Batch], kind: Kind = "paged"
    ) -> None:
        self._page_tokens = model.page_tokens
        self._places, self._kind = places, kind
        spaces = layout(model).spaces
        self._arenas = {arena.name: arena for space in spaces for arena in space.arenas}
        self._space = {arena.name: space for space in spaces for arena in space.arenas}
        self._rows = {name: rows_of_bytes(arena) for name, arena in self._arenas.items()}
        self._last = batches[-1]
        self._owners: dict[Block, int] = {}
        self._written: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._slots: dict[Block, tuple[int, int]] = {}
        self._names: dict[int, int] = {}  # a request is known by its first page
        self._now: Written = {}  # by the last step
        self._ever: Written = {}
        for batch in batches:
            self._now = {}
            self._take(batch)
            for block, tokens in self._now.items():
                self._ever.setdefault(block, set()).update(tokens)

    def _take(self, batch: Batch) -> None:
        for row, (size, context) in enumerate(zip(batch.sizes, batch.context, strict=True)):
            first = int(batch.tables[Full().key][row, 0])
            request = self._names.setdefault(first, len(self._names))
            for space, table in batch.tables.items():
                pages = table[row].tolist()
                used = pages[: -(-(context + size) // self._page_tokens)]
                self._owners |= {(space, block): request for block in used if block}
                for position in range(context, context + size):
                    page, at = divmod(position, self._page_tokens)
                    self._written[space, pages[page], at] = request, position
                    self._now.setdefault((space, pages[page]), set()).add(at)
            for group, slots in batch.slots.items():
                self._slots[f"slots-{group}", int(slots[row])] = request, context + size - 1
                self._now[f"slots-{group}", int(slots[row])] = {0}

    @property
    def rows(self) -> int:
        """Rows of one arena of full pages that were to be written."""
        return sum(space == Full().key for space, _, _ in self._written)

    @property
    def slots(self) -> int:
        """Slots that were to be written."""
        return len(self._slots)

    def judge(self, images: Images, fills: tuple[int, int], before: Images | None = None) -> str | None:
        """What is wrong with memory after the last step.

        Args:
            images: uint8[bytes] of each region, after a run over either filling.
            fills: the two bytes.
            before: likewise before the step: no earlier one may have its rows changed; None: not known.
        """
        sizes = [len(image) for image in images[0]]
        allowed, mine = self._allowed(sizes, self._ever), self._judged(sizes)
        last = allowed if before is None else self._allowed(sizes, self._now)
        for region, (one, two) in enumerate(zip(*images, strict=True)):
            earlier = fills if before is None else (before[0][region], before[1][region])
            touched = (one != earlier[0]) | (two != earlier[1])
            stray = np.flatnonzero(touched & ~last[region] & mine[region])
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

    def _judged(self, sizes: Sequence[int]) -> list[NDArray[np.bool_]]:
        """bool[bytes] of each region: what is judged at all."""
        slots = [np.zeros(size, np.bool_) for size in sizes]
        for name, place in self._places.items():
            if self._space[name].kind == "bounded":
                for block in range(place.blocks):
                    start = place.offset_bytes + block * place.stride_bytes
                    slots[place.region][start : start + len(self._rows[name])] = True
        return slots if self._kind == "bounded" else [~mask for mask in slots]

    def _allowed(self, sizes: Sequence[int], written: Written) -> list[NDArray[np.bool_]]:
        """bool[bytes] of each region: rows of some positions, or the slots of who ran."""
        masks = [np.zeros(size, np.bool_) for size in sizes]
        for name, place in self._places.items():
            space, rows = self._space[name], self._rows[name]
            if space.kind != self._kind:
                continue
            per_row = self._page_tokens // self._arenas[name].rows if self._kind == "paged" else 1
            for (key, block), tokens in written.items():
                if key == space.key:
                    start = place.offset_bytes + block * place.stride_bytes
                    mine = np.isin(rows, [at // per_row for at in tokens])
                    masks[place.region][start : start + len(rows)] |= mine
        return masks

    def _find(self, region: int, byte: int) -> _Spot | None:
        """Whose a byte is; None if it is no arena's."""
        for name, place in self._places.items():
            block, inside = divmod(byte - place.offset_bytes, place.stride_bytes)
            if place.region == region and 0 <= block < place.blocks and inside < len(self._rows[name]):
                space, row = self._space[name], int(self._rows[name][inside])
                per_row = self._page_tokens // self._arenas[name].rows if space.kind == "paged" else 1
                return _Spot(name, space.key, block, row if row < 0 else row * per_row)
        return None

    def _stray(self, region: int, byte: int, count: int) -> str:
        spot = self._find(region, byte)
        if spot is None or spot.row < 0:
            what = "padding between rows or blocks, which belongs to no field"
            head = f"byte {byte} of the memory" if spot is None else f"arena {spot.arena}, block {spot.block}"
        elif self._kind == "bounded":
            head, what = f"arena {spot.arena}, slot {spot.block}", self._whose_slot(spot)
        else:
            head = f"arena {spot.arena}, page {spot.block}, row {spot.row}"
            what = self._whose(spot)
        return f"{self._step()} also wrote {head}: {what} ({count:,} B too many in all)"

    def _whose(self, spot: _Spot) -> str:
        if spot.block == 0:
            return "page 0 pads page tables and is nobody's"
        if (spot.space, spot.block) not in self._owners:
            return "no request of the step has that page"
        request = self._owners[spot.space, spot.block]
        last = max(position for who, position in self._written.values() if who == request)
        mine = [at for at, who in self._owners.items() if who == request and at[0] == spot.space]
        position = mine.index((spot.space, spot.block)) * self._page_tokens + spot.row
        if position <= last:
            return f"position {position} of request {request}, which an earlier step has written"
        return f"position {position} of request {request}, of which positions 0..{last} have been run"

    def _whose_slot(self, spot: _Spot) -> str:
        own = ", ".join(str(slot) for space, slot in self._slots if space == spot.space)
        nobody = "slot 0 is padding, and is nobody's" if spot.block == 0 else "no request of the step has it"
        return f"{nobody}; theirs: {own}"

    def _lacking(self, region: int, byte: int, what: str) -> str:
        spot = self._find(region, byte)
        if spot is None:  # allowed bytes are an arena's
            raise ValueError(byte)
        if self._kind == "bounded":
            request, position = self._slots[spot.space, spot.block]
            return (
                f"{self._step()}: arena {spot.arena}, slot {spot.block}"
                f" (of request {request}, after position {position}) {what}"
            )
        per_row = self._page_tokens // self._arenas[spot.arena].rows
        request, position = next(
            found
            for (space, at, own), found in self._written.items()
            if (space, at) == (spot.space, spot.block) and own // per_row == spot.row // per_row
        )
        return (
            f"{self._step()}: arena {spot.arena}, page {spot.block}, row {spot.row}"
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
