"""Bytes that follow from a declaration: offsets, strides, spaces, wire order, fingerprints.

Pure arithmetic over `KvModel`; nothing here touches memory.  Three views of the same fields:

* **device**: `layout(model, worker, tp)`, what one worker holds.  Groups of one reach share a *space*, one
  range of block ids; a page-first block is all arenas of its space side by side.
* **wire**: `wire_record(model, part, shard, shards)`, what one stored record holds: dense, in declared order,
  without any padding, independent of page order and of the degree of tensor parallelism.
* **identity**: `fingerprint(model)`, a digest per *part* of everything that changes a stored byte.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import TOKEN_AXIS, Arena, Field, Full, Group, KvModel

SEGMENT_BYTES: Final = 512 * 1024
"""A record's segment is a run of whole layers of about this many bytes."""

_FIRST_NAMED_PART: Final = 64
_NAMED_PARTS: Final = 192


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


@dataclass(frozen=True, slots=True)
class Part:
    """What is saved and restored as one unit.

    The required groups of one reach are one part; an optional or bounded group is its own.

    Attributes:
        id: stable across engines that have other optional groups; stored in every record key.
        space: key of the space whose blocks it copies.
        shard_sizes: global sizes of the axes that tensor parallelism cuts; empty is replicated.
    """

    id: int
    name: str
    space: str
    groups: tuple[str, ...]
    shard_sizes: tuple[int, ...]

    def shards(self, max_tp: int) -> int:
        """Shards that the wire form is cut into, for engines of up to `max_tp` workers."""
        return math.gcd(*self.shard_sizes, max_tp) if self.shard_sizes else 1


@dataclass(frozen=True, slots=True)
class WireRecord:
    """The payload of one stored record: one part, one shard, `record_tokens` tokens.

    Attributes:
        segments: bytes of each checksummed segment, runs of whole layers; they add up to `payload_bytes`.
        cuts: per field (arena, field): (axis, first, end) of the global axis that this shard holds, or None.
    """

    part: Part
    shard: int
    shards: int
    arenas: tuple[ArenaLayout, ...]
    payload_bytes: int
    segments: tuple[int, ...]
    cuts: dict[tuple[str, str], tuple[str, int, int] | None]


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
        sizes = {name: held(size, 0, tp)[1] for name, size in _cut_axes(arena).items()}
        placed.append(arena_layout(arena, tokens=tokens, sizes=sizes, offset_bytes=start))
        end = start + placed[-1].content_bytes
    multiple = math.lcm(1, *(arena.stride_multiple_bytes for arena in arenas))
    multiple = math.lcm(multiple, *(arena.align_bytes for arena in arenas))
    content = sum(arena.content_bytes for arena in placed)
    names = tuple(group.name for group in groups)
    return Space(key, groups[0].kind, names, tuple(placed), content, round_up(end, multiple))


def _cut_axes(arena: Arena) -> dict[tuple[str, str], int]:
    """(field, axis) -> global size of every axis that tensor parallelism cuts."""
    return {
        (field.name, str(field.shard_axis)): field.axes[str(field.shard_axis)]
        for field in arena.fields
        if field.shard_axis in field.axes
    }


def parts(model: KvModel) -> tuple[Part, ...]:
    """The units of saving and restoring, in the order of their ids.

    The required groups of one reach are one part; every optional and every bounded group is its own.
    Groups that are never saved are in none.
    """
    saved = [group for group in model.groups if group.restore == "stored" and group.kind != "static"]
    common = [group for group in saved if group.kind == "paged" and not group.optional]
    named = [group for group in saved if group not in common]
    reaches = sorted({group.reach.key: group.reach for group in common}.items(), key=_reach_order)
    found = [
        _part(model, number, key, [group for group in common if group.reach.key == key])
        for number, (key, _) in enumerate(reaches)
    ]
    found += [_part(model, _named_part_id(group.name), group.name, [group]) for group in named]
    return tuple(sorted(found, key=lambda part: part.id))


def _reach_order(item: tuple[str, Any]) -> tuple[bool, str]:
    return not isinstance(item[1], Full), item[0]


def _named_part_id(name: str) -> int:
    # From the name alone, so that an engine without some other optional group files it the same way.
    return _FIRST_NAMED_PART + hashlib.blake2b(name.encode(), digest_size=8).digest()[0] % _NAMED_PARTS


def _part(model: KvModel, number: int, name: str, groups: list[Group]) -> Part:
    names = tuple(group.name for group in groups)
    arenas = [arena for arena in wire_arenas(model) if arena.group in names]
    sizes = tuple(size for arena in arenas for size in _cut_axes(arena).values())
    return Part(number, name, space_key(groups[0]), names, tuple(dict.fromkeys(sizes)))


def wire_arenas(model: KvModel) -> tuple[Arena, ...]:
    """The arenas as they are stored."""
    return model.arenas if model.repack is None else model.repack.arenas


def wire_record(model: KvModel, part: Part, shard: int = 0, shards: int = 1) -> WireRecord:
    """The dense layout of one stored record.

    A field cut by tensor parallelism contributes its slice to every shard; a replicated field beside it
    lies in shard 0 alone.
    """
    groups = {group.name: group for group in model.groups}
    placed: list[ArenaLayout] = []
    cuts: dict[tuple[str, str], tuple[str, int, int] | None] = {}
    end = 0
    for arena in wire_arenas(model):
        if arena.group not in part.groups:
            continue
        fields = tuple(field for field in arena.fields if field.shard_axis is not None or shard == 0)
        if not fields:
            continue
        ranges = {name: held(size, shard, shards) for name, size in _cut_axes(arena).items()}
        for field in fields:
            span = ranges[field.name, field.shard_axis] if field.shard_axis else None
            cuts[arena.name, field.name] = (field.shard_axis, *span) if field.shard_axis and span else None
        tokens = model.record_tokens if groups[arena.group].kind == "paged" else None
        sizes = {name: span[1] - span[0] for name, span in ranges.items()}
        dense = arena.model_copy(update={"fields": fields, "stride_multiple_bytes": 1, "align_bytes": 1})
        placed.append(arena_layout(dense, tokens=tokens, sizes=sizes, offset_bytes=end))
        end += placed[-1].content_bytes
    return WireRecord(part, shard, shards, tuple(placed), end, _segments(placed), cuts)


def _segments(arenas: list[ArenaLayout]) -> tuple[int, ...]:
    """Cut a payload into runs of whole layers of about `SEGMENT_BYTES`."""
    runs = groupby(arenas, key=lambda arena: (arena.layer is None, arena.layer))
    layers = [sum(arena.content_bytes for arena in run) for _, run in runs]
    segments: list[int] = []
    for size in layers:
        if segments and segments[-1] + size <= SEGMENT_BYTES:
            segments[-1] += size
        else:
            segments.append(size)
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of stored bytes.

    Attributes:
        required: 16 bytes over everything that changes a byte of a required group; names pages.
        parts: 16 bytes for each part, by its name; stands in every record's frame.
    """

    required: bytes
    parts: dict[str, bytes]

    def __str__(self) -> str:
        return self.required.hex()


def fingerprint(model: KvModel) -> Fingerprint:
    """Identity of a model's stored bytes; independent of tp, page order, strides and pool size (D6)."""
    required = [group for group in model.groups if not group.optional and group.checkpointable]
    named = parts(model)
    return Fingerprint(
        required=_digest(identity_document(model, tuple(group.name for group in required))),
        parts={part.name: _digest(identity_document(model, part.groups)) for part in named},
    )


def identity_document(model: KvModel, groups: Iterable[str]) -> dict[str, Any]:
    """Everything that changes a stored byte of some groups, as plain JSON; what fingerprints digest."""
    names = set(groups)
    members = [group for group in model.groups if group.name in names]
    inert = {"stride_multiple_bytes", "align_bytes"}
    return {
        "contract": model.contract,
        "model": model.name,
        "weights": model.weights.model_dump(),
        "numerics": model.numerics,
        "record_tokens": model.record_tokens,
        "groups": [group.model_dump(mode="json", exclude={"optional", "restore"}) for group in members],
        "arenas": [
            arena.model_dump(mode="json", exclude=inert)
            for arena in wire_arenas(model)
            if arena.group in names
        ],
        "repack": None if model.repack is None else model.repack.model_dump(mode="json", exclude={"arenas"}),
    }


def _digest(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvc-fingerprint").digest()


def with_page_tokens(model: KvModel, page_tokens: int) -> KvModel:
    """The same declaration at another page size; what the suite uses for odd sizes."""
    return model.model_copy(
        update={"page_tokens": page_tokens, "key_tokens": None, "page_tokens_allowed": ()}
    )
