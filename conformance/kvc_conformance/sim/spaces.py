"""The block-id spaces of a declaration as it is simulated, and which blocks of each somebody must have.

What must be held at a boundary is worked out here from what the declaration says of the reach, token by
token, and not asked of the pools that are judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvc_conformance.content import Content, trimmed
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import (
    Arena,
    Chunk,
    Field,
    Full,
    Group,
    KvModel,
    Reach,
    WeightIdentity,
    Window,
)
from kvcontract.contract.wire import Part, WireRecord, parts, wire_record

MOST_RECORD_PAGES: Final = 3
"""Of a longer record a stream would have none, or one."""

WINDOW_PAGES: Final = 2
CHUNK_PAGES: Final = 3
BOUNDARY_PAGES: Final = 2
"""Reaches and distances of boundaries are cut to so many pages, or nothing would ever be let go."""

LEAST_ROW_BYTES: Final = 48
MOST_STATE_BYTES: Final = 512
_MOST_AXIS: Final = 2
_MOST_CUT_AXIS: Final = 4

NAMED: Final = WeightIdentity(kind="digest", value="0" * 32)


def simulated(model: KvModel) -> KvModel:
    """A declaration as it is simulated: small pages, reaches and states, few arenas, stored as they are.

    Raises:
        UsageFault: it has groups that no world can serve.
    """
    odd = [
        group.name
        for group in model.groups
        if group.kind == "static" or (_beside(group) and (group.restore != "stored" or group.optional))
    ]
    if odd or all(_beside(group) for group in model.groups):
        names = ", ".join(odd or [group.name for group in model.groups])
        raise UsageFault(
            f"{model.name}: group(s) {names} cannot be simulated: this version does paged groups that reach"
            " every token, and beside them windowed, chunked and bounded ones that are stored as they are"
        )
    rows = math.lcm(*(arena.tokens_per_row for arena in model.arenas))
    named = model.weights if model.weights.resolved else NAMED
    page, step = max(2, rows), min(MOST_RECORD_PAGES, model.record_pages)
    bounded = {group.name for group in model.groups if group.kind == "bounded"}
    plain = model.model_copy(
        update={
            "repack": None,
            "weights": named,
            "arenas": tuple(
                _smaller(model, arena) if arena.group in bounded else arena for arena in model.arenas
            ),
        }
    )
    small = trimmed(plain, page, LEAST_ROW_BYTES, step * page if step > 1 else None)
    near = tuple(_near(group, page, model.page_tokens) for group in model.groups)
    return small.model_copy(update={"groups": near})


def _beside(group: Group) -> bool:
    return group.kind == "bounded" or not isinstance(group.reach, Full)


def _near(group: Group, page: int, was: int) -> Group:
    """A group whose reach, or distance of boundaries, is passed within a stream."""
    if group.kind == "bounded":
        apart = group.boundary_tokens or 1
        pages = 1 if apart <= was else BOUNDARY_PAGES
        return group.model_copy(update={"boundary_tokens": pages * page, "snapshot_dtype": None})
    reach = group.reach
    if isinstance(reach, Window):
        tokens = min(reach.tokens, WINDOW_PAGES * page + 1)
        reach = Window(tokens=tokens, sink_tokens=min(reach.sink_tokens, page))
    elif isinstance(reach, Chunk):
        reach = Chunk(tokens=min(reach.tokens, CHUNK_PAGES * page))
    return group.model_copy(update={"reach": reach})


def _smaller(model: KvModel, arena: Arena) -> Arena:
    """A state of few bytes: it is written at every step of every request."""
    if Content(model.model_copy(update={"arenas": (arena,)})).state_bytes <= MOST_STATE_BYTES:
        return arena
    fields = tuple(
        field.model_copy(update={"axes": {axis: _cut(field, axis) for axis in field.axes}})
        for field in arena.fields
    )
    return arena.model_copy(update={"fields": fields})


def _cut(field: Field, axis: str) -> int:
    size = field.axes[axis]
    if axis != field.shard_axis:
        return min(size, _MOST_AXIS)
    return math.gcd(size, _MOST_CUT_AXIS) if size > _MOST_CUT_AXIS else size


@dataclass(frozen=True, slots=True)
class Space:
    """One block-id space.

    Attributes:
        key: of the space.
        group: that it has the slots of; None: it has pages.
        reach: which past tokens its groups read.
        page: tokens of a page.
        part: of its records.
        records: of one record, by shard.
        record_pages: blocks of a record.
    """

    key: str
    group: str | None
    reach: Reach
    page: int
    part: Part
    records: tuple[WireRecord, ...]
    record_pages: int

    def read(self, tokens: int) -> list[int]:
        """Numbers of the pages that the step after so many tokens reads."""
        found: set[int] = set()
        for first, end in self.reach.needed(tokens):
            found.update(range(first // self.page, -(-end // self.page)))
        return sorted(found)

    def held(self, pages: int) -> list[int]:
        """Numbers of the pages that must be there for somebody to go on after so many."""
        if self.group is not None:
            return [pages - 1] if pages else []
        step = self.record_pages
        whole = {number // step for number in self.read(pages * self.page)}
        return [record * step + page for record in sorted(whole) for page in range(step)]

    def least_blocks(self, step_tokens: int) -> int:
        """Blocks, block 0 included, that one request with steps of so many tokens, and one prefix, need."""
        if isinstance(self.reach, Full):
            return 3
        tokens = self.reach.tokens - 1 + step_tokens
        sink = self.reach.sink_tokens if isinstance(self.reach, Window) else 0
        record = self.page * self.record_pages
        return -(-tokens // self.page) + 1 + self.record_pages + -(-sink // record) * self.record_pages


def spaces_of(model: KvModel, most_tp: int) -> Iterator[Space]:
    """Those of a declaration, the full pages' first."""
    groups = {group.name: group for group in model.groups}
    found: set[str] = set()
    for part in sorted(parts(model), key=lambda part: (part.space != Full().key, part.id)):
        if part.space in found:
            continue
        found.add(part.space)
        group, shards = groups[part.groups[0]], part.shards(most_tp)
        bounded = group.kind == "bounded"
        yield Space(
            part.space,
            group.name if bounded else None,
            group.reach,
            model.page_tokens,
            part,
            tuple(wire_record(model, part, shard, shards) for shard in range(shards)),
            1 if bounded else model.record_pages,
        )


def granule_tokens(model: KvModel) -> int:
    """Somebody can go on from multiples of this alone."""
    return math.lcm(model.record_tokens, *(group.boundary_tokens or 1 for group in model.groups))
