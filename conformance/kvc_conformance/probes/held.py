"""Reads and writes rows of pages and states of slots through the field views of bound memory.

Rows travel as uint8[n, bytes], the fields of a token side by side in declared order; so does a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvcontract.contract.layout import ArenaLayout, FieldLayout, Layout
from kvcontract.contract.model import TOKEN_AXIS, KvModel
from kvcontract.memory.binding import Binding

_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Image = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Field:
    """One field: a view [blocks, rows, ...] or [slots, ...] of integers, and its bytes among all."""

    space: str
    view: torch.Tensor
    first: int
    end: int
    per: int


class Held:
    """The memory of one worker: pages and slots.

    Args:
        model: the declaration.
        laid: what the worker holds.
        bindings: its memory, by space.
    """

    def __init__(self, model: KvModel, laid: Layout, bindings: Mapping[str, Binding]) -> None:
        self._page = model.page_tokens
        self._rows: list[_Field] = []
        self._slots: list[_Field] = []
        placed = {arena.name: (space, arena) for space in laid.spaces for arena in space.arenas}
        for declared in model.arenas:
            space, arena = placed[declared.name]
            fields = self._rows if space.kind == "paged" else self._slots
            for view, item in _views(bindings[space.key], arena):
                first = fields[-1].end if fields else 0
                end = first + item.content_bytes // arena.rows
                if space.kind == "paged":
                    view = view.movedim(1 + item.axes.index(TOKEN_AXIS), 1)  # noqa: PLW2901 - rows first
                fields.append(_Field(space.key, view, first, end, self._page // arena.rows))
        self._keys = {f"slots-{group.name}": group.name for group in model.groups if group.kind == "bounded"}

    def write(self, tables: Mapping[str, NDArray[np.int32]], first: int, content: Image) -> None:
        """Write the rows of tokens first, first + 1, ... of a request with these page tables, by space."""
        at = np.arange(first, first + len(content))
        for item in self._rows:
            mine = (at + 1) % item.per == 0
            block = torch.from_numpy(tables[item.space][at[mine] // self._page].astype(np.int64))
            row = torch.from_numpy(at[mine] % self._page // item.per)
            given = torch.from_numpy(content[mine, item.first : item.end].copy()).view(item.view.dtype)
            shape = (len(block), *item.view.shape[2:])
            item.view[block, row] = given.reshape(shape).to(item.view.device)

    def read(self, space: str, blocks: Sequence[int]) -> Image:
        """uint8[blocks * page_tokens, bytes of the space]; a row that stands for several tokens is last."""
        mine = [item for item in self._rows if item.space == space]
        pieces = []
        for item in mine:
            out = np.zeros((len(blocks) * self._page, item.end - item.first), np.uint8)
            taken = item.view[torch.tensor(list(blocks), dtype=torch.int64)].contiguous().cpu()
            out[item.per - 1 :: item.per] = taken.numpy().view(np.uint8).reshape(-1, item.end - item.first)
            pieces.append(out)
        return np.concatenate(pieces, axis=1)

    def write_state(self, slots: Mapping[str, int], content: Image) -> None:
        """Write a whole state, into the slot of each bounded group."""
        for item in self._slots:
            given = torch.from_numpy(content[item.first : item.end].copy()).view(item.view.dtype)
            item.view[slots[self._keys[item.space]]] = given.reshape(item.view.shape[1:]).to(item.view.device)

    def read_state(self, slots: Mapping[str, int]) -> Image:
        """uint8[bytes of a state]: what lies in the slot of each bounded group."""
        found = [
            item.view[slots[self._keys[item.space]]].contiguous().cpu().reshape(-1).numpy().view(np.uint8)
            for item in self._slots
        ]
        return np.concatenate(found) if found else np.zeros(0, np.uint8)

    def poison(self, value: int) -> None:
        """Overwrite every field of every block."""
        for item in (*self._rows, *self._slots):
            pattern = torch.full((item.view.element_size(),), value, dtype=torch.uint8).view(item.view.dtype)
            item.view.fill_(pattern.item())


def _views(binding: Binding, arena: ArenaLayout) -> Iterator[tuple[Any, FieldLayout]]:
    for item in arena.fields:
        view = binding.views[arena.name, item.name]
        yield view.view(_UNITS[view.element_size()]), item
