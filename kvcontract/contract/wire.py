"""What is stored: parts, records, and the identity of their bytes.

A *part* is what is saved and restored as one unit.  `wire_record(model, part, shard, shards)` is the payload
of one stored record: dense, in declared order, without any padding, independent of page order and of the
degree of tensor parallelism.  `fingerprint(model)` digests, per part, everything that changes a stored byte.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, ParamSpec, TypeVar

from kvcontract.contract.layout import ArenaLayout, arena_layout, cut_axes, held
from kvcontract.contract.model import Arena, Full, Group, KvModel
from kvcontract.contract.snapshot import as_kept, is_paged, kept, kept_key

SEGMENT_BYTES: Final = 512 * 1024
"""A record's segment is a run of whole layers of about this many bytes."""

_FIRST_NAMED_PART: Final = 64
_NAMED_PARTS: Final = 192


P = ParamSpec("P")
T = TypeVar("T")


def _remembered(made: Callable[P, T]) -> Callable[P, T]:
    """Compute once for each declaration; one that nobody has validated may not be hashable: each time."""
    cached = functools.lru_cache(maxsize=1024)(made)

    @functools.wraps(made)
    def of(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return cached(*args, **kwargs)  # type: ignore[arg-type] # what is not hashable is refused
        except TypeError:
            if _hashable(args, kwargs):
                raise  # it is about something else
            return made(*args, **kwargs)

    return of


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
    cuts: Mapping[tuple[str, str], tuple[str, int, int] | None]


def _hashable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        hash((args, *kwargs.values()))
    except TypeError:
        return False
    return True


@_remembered
def parts(model: KvModel) -> tuple[Part, ...]:
    """The units of saving and restoring, in the order of their ids.

    The required groups of one reach are one part; every optional and every bounded group is its own.
    Groups that are never saved are in none.
    """
    saved = [group for group in model.groups if group.restore == "stored" and group.kind != "static"]
    common = [group for group in saved if is_paged(group) and not group.optional]
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
    sizes = tuple(size for arena in arenas for size in cut_axes(arena).values())
    return Part(number, name, kept_key(groups[0]), names, tuple(dict.fromkeys(sizes)))


def wire_arenas(model: KvModel) -> tuple[Arena, ...]:
    """The arenas as they are stored."""
    if model.repack is not None:
        return model.repack.arenas
    groups = {group.name: group for group in model.groups}
    return tuple(
        kept(arena, groups[arena.group]) if arena.group in groups else arena for arena in model.arenas
    )


@_remembered
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
        ranges = {name: held(size, shard, shards) for name, size in cut_axes(arena).items()}
        for field in fields:
            span = ranges[field.name, field.shard_axis] if field.shard_axis else None
            cuts[arena.name, field.name] = (field.shard_axis, *span) if field.shard_axis and span else None
        tokens = model.record_tokens if is_paged(groups[arena.group]) else None
        sizes = {name: span[1] - span[0] for name, span in ranges.items()}
        dense = arena.model_copy(update={"fields": fields, "stride_multiple_bytes": 1, "align_bytes": 1})
        placed.append(arena_layout(dense, tokens=tokens, sizes=sizes, offset_bytes=end))
        end += placed[-1].content_bytes
    return WireRecord(part, shard, shards, tuple(placed), end, _segments(placed), MappingProxyType(cuts))


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
    parts: Mapping[str, bytes]

    def __str__(self) -> str:
        return self.required.hex()


@_remembered
def fingerprint(model: KvModel) -> Fingerprint:
    """Identity of a model's stored bytes; independent of tp, page order, strides and pool size (D6)."""
    required = [group for group in model.groups if not group.optional and group.checkpointable]
    named = parts(model)
    return Fingerprint(
        required=_digest(identity_document(model, tuple(group.name for group in required))),
        parts=MappingProxyType({part.name: _digest(identity_document(model, part.groups)) for part in named}),
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
        "groups": [
            as_kept(group).model_dump(mode="json", exclude={"optional", "restore", "snapshot_bound"})
            for group in members
        ],
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
