"""Where fields lie on a device: offsets, strides, spaces.

Pure arithmetic over `KvModel`; nothing here touches memory.  `layout(model, worker, tp)` is what one worker
holds: groups of one reach share a *space*, one range of block ids, and a page-first block is all arenas of
its space side by side.  `kvcontract.contract.wire` says what of it is stored, and under which identity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import TOKEN_AXIS, Arena, Field, Group, KvModel


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies inside a block of its arena.

    Attributes:
        arena: name of the arena.
        name: name of the field.
        dtype: element type; types below one byte are stated as bytes along the last axis.
        axes: axis names in memory order, `token` included (absent in bounded groups).
        shape: elements along each axis.
        strides_bytes: distance between neighbours along each axis.
        offset_bytes: from the start of the block.
    """

    arena: str
    name: str
    dtype: str
    element_bytes: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int

    @property
    def content_bytes(self) -> int:
        """Bytes of the field in one block."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """One block of an arena.

    Attributes:
        rows: rows of a block (tokens, or fewer when a row stands for several).
        offset_bytes: of the block inside the page-first block, or inside the record.
        content_bytes: bytes that are moved.
        stride_bytes: distance between blocks when each arena is bound on its own (layer-first).
    """

    name: str
    group: str
    layer: int | None
    rows: int
    fields: tuple[FieldLayout, ...]
    offset_bytes: int
    content_bytes: int
    stride_bytes: int
    stride_multiple_bytes: int
    align_bytes: int


@dataclass(frozen=True, slots=True)
class Space:
    """One range of block ids: the paged groups of one reach, or one bounded group.

    Attributes:
        content_bytes: bytes of a page-first block that are moved.
        stride_bytes: distance between page-first blocks; the tail is padding, never moved nor trusted (E1).
    """

    key: str
    kind: str
    groups: tuple[str, ...]
    arenas: tuple[ArenaLayout, ...]
    content_bytes: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What one worker of `tp` holds; one `Space` per range of block ids."""

    worker: int
    tp: int
    page_tokens: int
    spaces: tuple[Space, ...]

    @property
    def page_bytes(self) -> int:
        """Content of one page over all paged spaces."""
        return sum(space.content_bytes for space in self.spaces if space.kind == "paged")

    def space(self, key: str) -> Space:
        """The space of that key; KeyError if there is none."""
        return {space.key: space for space in self.spaces}[key]


def space_key(group: Group) -> str:
    """Key of the block-id space a group lives in."""
    return group.reach.key if group.kind == "paged" else f"slots-{group.name}"


def layout(model: KvModel, worker: int = 0, tp: int = 1) -> Layout:
    """What one worker holds.

    Args:
        model: the declaration.
        worker: index of the worker, below `tp`.
        tp: degree of tensor parallelism.

    Raises:
        UsageFault: a sharded axis cannot be cut `tp` ways; every such field is named with the numbers.
    """
    faults = [] if 0 <= worker < tp else [f"worker {worker} of tp {tp}: expected 0 <= worker < tp"]
    faults += tp_faults(model, tp)
    if faults:
        raise UsageFault("; ".join(faults))
    groups = {group.name: group for group in model.groups}
    keys = dict.fromkeys(space_key(group) for group in model.groups)
    spaces = []
    for key in keys:
        members = tuple(group for group in model.groups if space_key(group) == key)
        arenas = [arena for arena in model.arenas if groups[arena.group] in members]
        spaces.append(_space(key, members, arenas, model.page_tokens, tp))
    return Layout(worker, tp, model.page_tokens, tuple(spaces))


def tp_faults(model: KvModel, tp: int) -> list[str]:
    """Why a degree of tensor parallelism does not fit, one line a field; empty if it does."""
    if tp < 1:
        return [f"tp {tp}: expected at least 1"]
    faults = []
    for arena in model.arenas:
        for field in arena.fields:
            size = field.axes.get(field.shard_axis, 0) if field.shard_axis else 0
            if size and size % tp and tp % size:
                faults.append(
                    f"{arena.name}.{field.name}: axis {field.shard_axis} of {size} cannot be cut over tp {tp}"
                    " (neither divides the other)"
                )
    return faults


def held(size: int, worker: int, tp: int) -> tuple[int, int]:
    """Range [first, end) of a global axis that one worker holds; replicas exist when tp exceeds it."""
    if tp <= size:
        each = size // tp
        return worker * each, (worker + 1) * each
    first = worker * size // tp
    return first, first + 1


def arena_layout(
    arena: Arena, *, tokens: int | None, sizes: dict[tuple[str, str], int], offset_bytes: int = 0
) -> ArenaLayout:
    """Lay one arena out.

    Args:
        arena: the declaration.
        tokens: tokens of a block; None for a bounded group, which has no token axis.
        sizes: local size of each sharded axis, by (field, axis); others keep their global size.
        offset_bytes: of the block inside what contains it.
    """
    rows = 1 if tokens is None else tokens // arena.tokens_per_row
    shaped = [_field_shape(field, rows if tokens is not None else None, sizes) for field in arena.fields]
    build = _rows if arena.arrangement == "rows" else _planes
    fields, content = build(arena, shaped, rows)
    stride = round_up(content, math.lcm(arena.stride_multiple_bytes, arena.align_bytes))
    return ArenaLayout(
        name=arena.name,
        group=arena.group,
        layer=arena.layer,
        rows=rows,
        fields=fields,
        offset_bytes=offset_bytes,
        content_bytes=content,
        stride_bytes=stride,
        stride_multiple_bytes=arena.stride_multiple_bytes,
        align_bytes=arena.align_bytes,
    )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Shaped:
    """A field's axes with their local sizes, the last one in whole elements of `element_bytes`."""

    field: Field
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    element_bytes: int


def _field_shape(field: Field, rows: int | None, sizes: dict[tuple[str, str], int]) -> _Shaped:
    local = {axis: sizes.get((field.name, axis), size) for axis, size in field.axes.items()}
    if rows is not None:
        local = {**local, TOKEN_AXIS: rows} if TOKEN_AXIS in local else {TOKEN_AXIS: rows, **local}
    bits = DTYPE_BITS[field.dtype]
    shape = list(local.values())
    if bits < 8:  # noqa: PLR2004 - bits of a byte: packed along the last axis, stated as bytes
        shape[-1] = shape[-1] * bits // 8
    return _Shaped(field, tuple(local), tuple(shape), max(1, bits // 8))


def _dense_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=element_bytes))[::-1]


def _planes(arena: Arena, shaped: list[_Shaped], rows: int) -> tuple[tuple[FieldLayout, ...], int]:
    del rows
    fields, offset = [], 0
    for item in shaped:
        strides = _dense_strides(item.shape, item.element_bytes)
        fields.append(_field_layout(arena, item, strides, offset))
        offset += fields[-1].content_bytes
    return tuple(fields), offset


def _rows(arena: Arena, shaped: list[_Shaped], rows: int) -> tuple[tuple[FieldLayout, ...], int]:
    row_bytes = sum(math.prod(item.shape) * item.element_bytes // rows for item in shaped)
    fields, offset = [], 0
    for item in shaped:
        inner = _dense_strides(item.shape, item.element_bytes)
        strides = (row_bytes, *inner[1:]) if item.axes[:1] == (TOKEN_AXIS,) else inner
        fields.append(_field_layout(arena, item, strides, offset))
        offset += fields[-1].content_bytes // rows
    return tuple(fields), row_bytes * rows


def _field_layout(arena: Arena, item: _Shaped, strides: tuple[int, ...], offset: int) -> FieldLayout:
    name, dtype = item.field.name, item.field.dtype
    return FieldLayout(arena.name, name, dtype, item.element_bytes, item.axes, item.shape, strides, offset)


def _space(key: str, groups: tuple[Group, ...], arenas: list[Arena], page_tokens: int, tp: int) -> Space:
    tokens = page_tokens if groups[0].kind == "paged" else None
    placed: list[ArenaLayout] = []
    end = 0
    for arena in arenas:
        start = round_up(end, arena.align_bytes)
        sizes = {name: held(size, 0, tp)[1] for name, size in cut_axes(arena).items()}
        placed.append(arena_layout(arena, tokens=tokens, sizes=sizes, offset_bytes=start))
        end = start + placed[-1].content_bytes
    multiple = math.lcm(1, *(arena.stride_multiple_bytes for arena in arenas))
    multiple = math.lcm(multiple, *(arena.align_bytes for arena in arenas))
    content = sum(arena.content_bytes for arena in placed)
    names = tuple(group.name for group in groups)
    return Space(key, groups[0].kind, names, tuple(placed), content, round_up(end, multiple))


def cut_axes(arena: Arena) -> dict[tuple[str, str], int]:
    """(field, axis) -> global size of every axis that tensor parallelism cuts."""
    return {
        (field.name, str(field.shard_axis)): field.axes[str(field.shard_axis)]
        for field in arena.fields
        if field.shard_axis in field.axes
    }


def with_page_tokens(model: KvModel, page_tokens: int, key_tokens: int | None = None) -> KvModel:
    """The same declaration at other sizes of pages and records; what the suite uses for odd sizes."""
    return model.model_copy(
        update={"page_tokens": page_tokens, "key_tokens": key_tokens, "page_tokens_allowed": ()}
    )
