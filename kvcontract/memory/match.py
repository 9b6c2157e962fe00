"""Which copies follow from two field lists, that of the device and that of the wire.

Fields are matched by name, axes by theirs: a wire shard is a slice of the axis that tensor parallelism cuts,
axes in another order are a permutation, a joined field is its members.  What follows is a short list of
strided copies in which all that touches is merged.  A record may span several pages: each copy is stated for
one page and made for all of them, a fixed step apart on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from kvcontract.contract.dtypes import DTYPE_BITS, WIDER
from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.layout import ArenaLayout, FieldLayout, held
from kvcontract.contract.members import split
from kvcontract.contract.model import TOKEN_AXIS
from kvcontract.contract.wire import WireRecord
from kvcontract.memory.binding import ArenaBinding, Binding


@dataclass(frozen=True, slots=True)
class Strided:
    """One copy of a page: `dims` are (size, device stride, wire stride), strides in bytes.

    The last one is a run of bytes, or, where elements are widened, of elements.  The next page of the record
    is `block_stride` times its block away on the device, `page_step` on the wire.

    Attributes:
        types: dtypes on the device and on the wire, where they differ.
    """

    storage: Tensor
    device_offset: int
    block_stride: int
    blocks: int
    wire_offset: int
    page_step: int
    dims: tuple[tuple[int, int, int], ...]
    types: tuple[str, str] | None = None

    @property
    def run_bytes(self) -> int:
        """Bytes of each run, where nothing is widened."""
        return self.dims[-1][0]

    @property
    def wire_bytes(self) -> int:
        """Bytes of a page on the wire."""
        count = math.prod(size for size, _, _ in self.dims)
        return count * DTYPE_BITS[self.types[1]] // 8 if self.types else count


@dataclass(frozen=True, slots=True)
class _Mine:
    """A member of a field on the device."""

    bound: ArenaBinding
    field: FieldLayout


class _Device:
    """The members of a binding, by arena, or by group and layer where the wire has them in another arena."""

    def __init__(self, binding: Binding) -> None:
        self._here: dict[tuple[str, str], _Mine] = {}
        self._near: dict[tuple[str, int, str], list[_Mine]] = {}
        for bound in binding.arenas.values():
            for field in bound.layout.fields:
                for member in split(field):
                    mine = _Mine(bound, member)
                    self._here[bound.layout.name, member.name] = mine
                    if bound.layout.layer is not None:
                        where = bound.layout.group, bound.layout.layer, member.name
                        self._near.setdefault(where, []).append(mine)

    def find(self, arena: ArenaLayout, name: str) -> _Mine | str:
        """The member that one on the wire stands for, or why there is none."""
        found = self._here.get((arena.name, name))
        if found is not None:
            return found
        near = [] if arena.layer is None else self._near.get((arena.group, arena.layer, name), [])
        if len(near) == 1:
            return near[0]
        return f"the device has {len(near) or 'no'} such field{'s' * (len(near) > 1)}"


def match(
    binding: Binding, record: WireRecord, worker: int, tp: int, pages: int
) -> tuple[list[Strided], bool]:
    """The copies between a worker's memory and a record, in wire order, and whether they are all of it.

    Raises:
        UsageFault: the two do not fit; every field that does not is named with the numbers.
    """
    space, device = binding.space, _Device(binding)
    faults = []
    if space.key != record.part.space:
        faults.append(f"part {record.part.name} lies in space {record.part.space}, not in {space.key}")
    copies: list[Strided] = []
    skipped = 0
    for arena in record.arenas if not faults else ():
        for field in arena.fields:
            cut = record.cuts[arena.name, field.name]
            for member in split(field):
                found = _copy(
                    device.find(arena, member.name), arena, member, (cut, record.shards, worker, tp), pages
                )
                if isinstance(found, str):
                    faults.append(f"{arena.name}.{member.name}: {found}")
                elif found is None:
                    skipped += 1
                else:
                    copies.append(found)
    if not faults and not copies:
        faults.append(f"worker {worker} of tp {tp} holds nothing of it")
    if faults:
        where = f"part {record.part.name}, shard {record.shard} of {record.shards}, cannot be copied"
        raise UsageFault(f"{where}:\n  " + "\n  ".join(faults))
    merged = _merge(sorted(copies, key=lambda copy: copy.wire_offset))
    total = pages * sum(copy.wire_bytes for copy in merged)
    if not skipped and total != record.payload_bytes:
        raise InternalFault(f"copies of {total} B for a payload of {record.payload_bytes} B")
    return merged, not skipped


def holds(record: WireRecord, worker: int, tp: int, *, whole: bool = False) -> bool:
    """Whether a worker holds any field of a record, or, with `whole`, all of them.

    A record without a cut field is replicated: every worker holds it whole.
    """
    found = []
    for cut in record.cuts.values():
        if cut is not None:
            _, first, end = cut
            mine_first, mine_end = held((end - first) * record.shards, worker, tp)
            inside = mine_first <= first and end <= mine_end
            found.append(inside if whole else (first < mine_end and mine_first < end))
        else:
            found.append(True)
    return all(found) if whole else any(found)


Cut = tuple[tuple[str, int, int] | None, int, int, int]
"""What a record cuts, into how many shards; worker, tp."""


def _copy(
    mine: _Mine | str, arena: ArenaLayout, wire: FieldLayout, cut: Cut, pages: int
) -> Strided | str | None:
    """The copy of one member; None if the worker holds none of it; or what does not fit."""
    if isinstance(mine, str):
        return mine
    bound, field = mine.bound, mine.field
    fault = _unlike(field, wire, pages)
    if fault:
        return fault
    start = _start(field, wire, cut)
    if not isinstance(start, tuple):
        return start
    axis, begin = start
    device = dict(zip(field.axes, field.strides_bytes, strict=True))
    rows = dict(zip(field.axes, field.shape, strict=True)).get(TOKEN_AXIS, 1)
    dims = [
        (rows if name == TOKEN_AXIS else size, device[name], stride)
        for name, size, stride in zip(wire.axes, wire.shape, wire.strides_bytes, strict=True)
    ]
    dims = [dim for dim in dims if dim[0] > 1]
    wider = field.dtype != wire.dtype
    made = Strided(
        bound.storage,
        bound.offset_bytes + field.offset_bytes + (begin * device[axis] if axis else 0),
        bound.stride_bytes,
        bound.blocks,
        arena.offset_bytes + wire.offset_bytes,
        rows * dict(zip(wire.axes, wire.strides_bytes, strict=True))[TOKEN_AXIS] if pages > 1 else 0,
        tuple(dims) or ((1, field.element_bytes, wire.element_bytes),)
        if wider
        else _merge_dims([*dims, (wire.element_bytes, 1, 1)]),
        (field.dtype, wire.dtype) if wider else None,
    )
    steps = (made.wire_offset, made.page_step, *(step for _, _, step in made.dims))
    if wider and any(step % wire.element_bytes for step in steps):
        return (
            f"lies at {list(steps)} B on the wire; expected multiples of its element, {wire.element_bytes} B"
        )
    return made


def _unlike(field: FieldLayout, wire: FieldLayout, pages: int) -> str | None:
    """A difference that no strided copy can bridge."""
    if field.dtype != wire.dtype and wire.dtype not in WIDER.get(field.dtype, ()):
        return f"dtype {field.dtype} on the device, {wire.dtype} on the wire; only a conversion can change it"
    if sorted(field.axes) != sorted(wire.axes):
        return f"axes {list(field.axes)} on the device, {list(wire.axes)} on the wire"
    rows = dict(zip(field.axes, field.shape, strict=True)).get(TOKEN_AXIS, 0)
    stored = dict(zip(wire.axes, wire.shape, strict=True)).get(TOKEN_AXIS, 0)
    if stored != rows * pages:
        return f"{rows} rows a page on the device, {stored} a record of {pages} page(s) on the wire"
    if DTYPE_BITS[field.dtype] < 8 and field.axes[-1] != wire.axes[-1]:  # noqa: PLR2004 - bits of a byte
        return f"elements packed along {field.axes[-1]} on the device, along {wire.axes[-1]} on the wire"
    return None


def _start(field: FieldLayout, wire: FieldLayout, cutting: Cut) -> tuple[str | None, int] | str | None:
    """Which axis the record cuts and where its slice begins in the worker's field; None if elsewhere."""
    cut, shards, worker, tp = cutting
    size = dict(zip(field.axes, field.shape, strict=True))
    wanted = dict(zip(wire.axes, wire.shape, strict=True))
    fixed = [axis for axis in wanted if axis != TOKEN_AXIS and (cut is None or axis != cut[0])]
    others = [axis for axis in fixed if wanted[axis] != size[axis]]
    if others:
        axis = others[0]
        return f"axis {axis} is {size[axis]} on the device, {wanted[axis]} on the wire"
    if cut is None:
        return None, 0
    axis, first, end = cut
    whole = (end - first) * shards
    mine_first, mine_end = held(whole, worker, tp)
    if size[axis] * (end - first) != wanted[axis] * (mine_end - mine_first):
        return (
            f"axis {axis} is {size[axis]} on the device;"
            f" worker {worker} of tp {tp} should hold {mine_first} to {mine_end} of {whole}"
        )
    if end <= mine_first or mine_end <= first:
        return None
    begin, rest = divmod((first - mine_first) * wanted[axis], end - first)
    if first < mine_first or mine_end < end or rest:
        return (
            f"the shard is {first} to {end} of axis {axis}, worker {worker} of tp {tp} holds {mine_first} to"
            f" {mine_end}; raise max_tp to at least {tp}"
        )
    return axis, begin


def _merge_dims(dims: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Join neighbouring dimensions that are one on both sides."""
    done: list[tuple[int, int, int]] = []
    for size, device, wire in dims:
        if done and done[-1][1:] == (size * device, size * wire):
            done[-1] = (done[-1][0] * size, device, wire)
        else:
            done.append((size, device, wire))
    return tuple(done)


def _merge(copies: list[Strided]) -> list[Strided]:
    """Join copies that lie side by side on both sides; given and returned in wire order."""
    done: list[Strided] = []
    for following in copies:
        current = following
        while done and (joined := _joined(done[-1], current)):
            done.pop()
            current = joined
        done.append(current)
    return done


def _joined(left: Strided, right: Strided) -> Strided | None:
    run = left.run_bytes
    if (
        left.types is not None
        or right.types is not None
        or left.storage.data_ptr() != right.storage.data_ptr()
        or (left.block_stride, left.blocks, left.page_step)
        != (right.block_stride, right.blocks, right.page_step)
        or left.dims[:-1] != right.dims[:-1]
        or left.device_offset + run != right.device_offset
        or left.wire_offset + run != right.wire_offset
    ):
        return None
    return replace(left, dims=_merge_dims([*left.dims[:-1], (run + right.run_bytes, 1, 1)]))
