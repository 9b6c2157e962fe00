"""The memory of simulated workers, written and judged a block at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_conformance.content import POISON, Content
from kvc_conformance.sim.device import Device, DeviceBinding
from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.layout import held, layout, space_key
from kvcontract.contract.model import TOKEN_AXIS, Arena, Field, KvModel
from kvcontract.memory.binding import Binding
from kvcontract.pool.index import Pages

_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bytes = NDArray[np.uint8]
Rows = NDArray[Any]


class Form:
    """What lies in the blocks of one space of one worker, and where.

    Args:
        model: the declaration.
        key: of the space.
        worker: which.
        tp: of how many.

    Attributes:
        paged: blocks are pages, and not slots.
    """

    def __init__(self, model: KvModel, key: str, worker: int, tp: int) -> None:
        self.space = layout(model, worker, tp).space(key)
        self.paged = self.space.kind == "paged"
        self._model, self._worker, self._tp, self._key = model, worker, tp, key
        self._page = model.page_tokens
        self.bytes_of = functools.cache(self._bytes_of)

    def images(self, content: Bytes) -> Bytes:
        """What the rows of a stream leave: uint8[blocks, bytes], by page, or by token for slots.

        Args:
            content: uint8[tokens, bytes]: after each token its row, then the state that it leaves.
        """
        count = -(-len(content) // self._page) if self.paged else len(content)
        made = Binding.allocate(self.space, count)
        for arena, field, where in self._fields(made):
            rows = self._rows(arena, field, content)
            if not self.paged:
                where[:] = rows
                continue
            flat = np.zeros((count * where.shape[1], *where.shape[2:]), where.dtype)
            flat[: len(rows)] = rows
            where[:] = flat.reshape(where.shape)
        return blocks_of(made).copy()

    def _bytes_of(self, first: int, last: int) -> NDArray[np.intp] | slice:
        """Where in a block the rows of its tokens first .. last lie; of a slot, its whole content."""
        made = Binding.allocate(self.space, 1)
        for arena, _, where in self._fields(made):
            per = arena.tokens_per_row
            where[(0, slice(first // per, last // per)) if self.paged else 0] = (
                -1 if where.itemsize > 1 else 255
            )
        found = np.flatnonzero(blocks_of(made)[0])
        return slice(None) if len(found) == self.space.stride_bytes else found

    def _fields(self, binding: Binding) -> list[tuple[Arena, Field, Rows]]:
        """Every field with what can be written of it: [blocks, rows, *axes], or [blocks, *axes] of slots."""
        groups = {group.name for group in self._model.groups if space_key(group) == self._key}
        found = []
        for arena in self._model.arenas:
            for field in arena.fields if arena.group in groups else ():
                view = binding.views[arena.name, field.name]
                numbers: Rows = view.view(_UNITS[view.element_size()]).numpy()
                if self.paged:
                    laid = next(item for item in self.space.arenas if item.name == arena.name)
                    axes = next(item.axes for item in laid.fields if item.name == field.name)
                    numbers = np.moveaxis(numbers, 1 + axes.index(TOKEN_AXIS), 1)
                found.append((arena, field, numbers))
        return found

    def _rows(self, arena: Arena, field: Field, content: Bytes) -> Rows:
        """What a worker holds of the rows of one field: [rows, *axes], in units of an element."""
        first = 0
        kinds = {group.name: group.kind for group in self._model.groups}
        in_order = sorted(self._model.arenas, key=lambda item: kinds[item.group] == "bounded")
        for other, its in ((item, its) for item in in_order for its in item.fields):
            if (other.name, its.name) == (arena.name, field.name):
                break
            first += _row_bytes(its)
        shape, share = _shape(field, self._worker, self._tp)
        size = max(1, DTYPE_BITS[field.dtype] // 8)
        per = arena.tokens_per_row
        rows = np.ascontiguousarray(content[per - 1 :: per, first : first + math.prod(shape) * size])
        whole = rows.view(f"<i{size}" if size > 1 else np.uint8)
        return whole.reshape(len(rows), *shape)[(slice(None), *share)]


def _row_bytes(field: Field) -> int:
    shape, _ = _shape(field, 0, 1)
    return math.prod(shape) * max(1, DTYPE_BITS[field.dtype] // 8)


def _shape(field: Field, worker: int, tp: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Size of every axis but the token's, in whole elements, and what a worker has of each."""
    axes = [(axis, size) for axis, size in field.axes.items() if axis != TOKEN_AXIS]
    share = tuple(
        slice(*held(size, worker, tp)) if axis == field.shard_axis else slice(0, size) for axis, size in axes
    )
    shape = [size for _, size in axes]
    bits = DTYPE_BITS[field.dtype]
    if bits < 8:  # noqa: PLR2004 - bits of a byte: packed along the last axis
        shape[-1] = shape[-1] * bits // 8
        share = (*share[:-1], slice(0, shape[-1]))
    return tuple(shape), share


def blocks_of(binding: Binding) -> Bytes:
    """The memory of a page-first binding as it lies: uint8[blocks, bytes]."""
    arena, size = next(iter(binding.arenas.values())), binding.space.stride_bytes
    start = arena.offset_bytes - arena.layout.offset_bytes
    return arena.storage.numpy()[start : start + arena.blocks * size].reshape(arena.blocks, size)


class Images:
    """What streams leave, in every space of every worker; made once.

    Args:
        model: the declaration.
        streams: tokens of each.
        scopes: tags of those that they run in.

    Attributes:
        page: tokens of a page.
    """

    def __init__(self, model: KvModel, streams: Sequence[Sequence[int]], scopes: Sequence[str]) -> None:
        self.page = model.page_tokens
        self._content = Content(model)
        self._streams, self._scopes = streams, scopes
        self.form = functools.cache(functools.partial(Form, model))
        self.of = functools.cache(self._of)
        self._all = functools.cache(self._everything)

    def _of(self, stream: int, scope: int, key: str, worker: int, tp: int) -> Bytes:
        """See `Form.images`."""
        return self.form(key, worker, tp).images(self._all(stream, scope))

    def _everything(self, stream: int, scope: int) -> Bytes:
        """uint8[tokens, bytes]: after each token its row, then the state that it leaves."""
        tokens, whose = self._streams[stream], self._scopes[scope]
        rows = self._content.rows(tokens, whose=whose)
        if not self._content.state_bytes:
            return rows
        states = [self._content.state(tokens, end, whose) for end in range(1, len(tokens) + 1)]
        return np.concatenate([rows, np.stack(states)], axis=1)


class Memory:
    """One space of one worker.

    Args:
        images: what is computed.
        key: of the space.
        worker: which.
        tp: of how many.
        blocks: of the pool.
        device: that it is the memory of.

    Attributes:
        worker: which.
        binding: what the store copies from and to.
    """

    def __init__(self, images: Images, key: str, worker: int, tp: int, blocks: int, device: Device) -> None:
        self.worker = worker
        self._images, self._where = images, (key, worker, tp)
        self._form = images.form(key, worker, tp)
        self._page = images.page
        made = Binding.allocate(self._form.space, blocks)
        self.binding = DeviceBinding(made.space, made.arenas, made.device, device)
        self._blocks = blocks_of(self.binding)

    def write(self, pages: Pages, stream: int, scope: int, start: int, end: int) -> None:
        """Write the rows of tokens start .. end of a stream; `pages` are the request's, from its first."""
        size, image = self._page, self._images.of(stream, scope, *self._where)
        for page in range(start // size, -(-end // size)):
            first = page * size
            where = self._form.bytes_of(max(start - first, 0), min(end - first, size))
            self._blocks[pages[page], where] = image[page, where]

    def spoil(self, pages: Pages, start: int, end: int) -> None:
        """Write rows that are nobody's where tokens start .. end would be: a step that came to nothing."""
        size = self._page
        for page in range(start // size, -(-end // size)):
            first = page * size
            where = self._form.bytes_of(max(start - first, 0), min(end - first, size))
            self._blocks[pages[page], where] = POISON

    def right(
        self, blocks: Sequence[int], numbers: Sequence[int], stream: int, scope: int, tokens: int
    ) -> bool:
        """Whether pages of a stream, of which these are the numbers, lie on blocks, up to so many tokens."""
        if not len(blocks):
            return True
        size, image = self._page, self._images.of(stream, scope, *self._where)
        whole = len(blocks) - (numbers[-1] * size + size > tokens)
        if whole:
            where = self._form.bytes_of(0, size)
            mine, theirs = self._blocks[blocks[:whole]], image[numbers[:whole]]
            if not isinstance(where, slice):
                mine, theirs = mine[:, where], theirs[:, where]
            if not (mine == theirs).all():
                return False
        if whole == len(blocks):
            return True
        where = self._form.bytes_of(0, tokens - numbers[-1] * size)
        return bool((self._blocks[blocks[-1], where] == image[numbers[-1], where]).all())

    def rights(self, blocks: Pages, contents: Bytes) -> NDArray[np.bool_]:
        """Which of some blocks, int32[n], hold what they should, uint8[n, bytes]: bool[n]."""
        where = self._form.bytes_of(0, self._page)
        found: NDArray[np.bool_] = (self._blocks[blocks][:, where] == contents[:, where]).all(axis=1)
        return found

    # Slots

    def put(self, slot: int, stream: int, scope: int, tokens: int) -> None:
        """Leave the state after so many tokens of a stream."""
        self._blocks[slot] = self._images.of(stream, scope, *self._where)[tokens - 1]

    def lose(self, slot: int) -> None:
        """Leave a state that is nobody's."""
        self._blocks[slot] = POISON

    def has(self, slot: int, stream: int, scope: int, tokens: int) -> bool:
        """Whether a slot has the state after so many tokens of a stream."""
        where = self._form.bytes_of(0, self._page)
        right = self._images.of(stream, scope, *self._where)[tokens - 1, where]
        return bool((self._blocks[slot, where] == right).all())
