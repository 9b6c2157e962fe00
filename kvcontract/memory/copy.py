"""Copy programs: how one worker's blocks become the payload of one record, and back.

A program is compiled once from two field lists, that of the device and that of the wire: fields are matched
by (arena, field) and axes by name; a wire shard is a slice of the axis that tensor parallelism cuts; axes in
another order are a permutation.  What follows is a short list of strided copies in which all that touches is
merged.  A record may span several pages: each copy is stated for one page and made for all of them, a fixed
step apart on the wire.  Where nothing but long runs of bytes of one page is left, a record can be moved
straight from and to it (`direct`); otherwise it goes through a contiguous buffer (`gather`, `scatter`).

Elements are moved as integers: NaN payloads and -0.0 survive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.layout import ArenaLayout, FieldLayout, held
from kvcontract.contract.model import TOKEN_AXIS
from kvcontract.contract.wire import WireRecord
from kvcontract.memory.binding import ArenaBinding, Binding, as_bytes, typed_view
from kvcontract.memory.grains import Grains, Runs, has_kernels, on_device
from kvcontract.memory.host import copy_runs

MIN_RUN_BYTES: Final = 4096
"""In host memory, records of several runs are moved run by run only if none is shorter."""

MIN_DEVICE_RUN_BYTES: Final = 512 * 1024
"""The same of a device, where each copy costs more, and of one run, too."""

Blocks = NDArray[np.integer[Any]]

_UNITS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Program(Protocol):
    """Moves blocks to and from the payload of one record.

    Which blocks make up a record is int[n] where a record is one page, else int[n, pages].

    Attributes:
        binding: where the blocks lie.
        pages: of one record.
        grains: a table for our kernel; None where torch moves the blocks.
        payload_bytes: of one record.
        direct: whether `buffers` may be used; `gather` and `scatter` always work.
        complete: whether the worker holds all of the record; if not, `scatter` writes what it holds.
    """

    binding: Binding
    pages: int
    grains: Grains | None
    payload_bytes: int
    direct: bool
    complete: bool

    def buffers(self, blocks: Blocks) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Where the payloads of blocks lie: addresses int64[n, k], and the length of each of k pieces."""
        ...

    def gather(self, blocks: Blocks, out: Tensor) -> None:
        """Write the payloads of blocks into `out`, uint8[n, payload_bytes], contiguous, on any device."""
        ...

    def scatter(self, blocks: Blocks, staged: Tensor) -> None:
        """Write payloads, uint8[n, payload_bytes], into blocks.

        Of a record of several pages, those are left out whose block is 0: they lie elsewhere already.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Strided:
    """One copy of a page: `dims` are (size, device stride, wire stride), the last one a run of bytes.

    The next page of the record is `block_stride` times its block away on the device, `page_step` on the wire.
    """

    storage: Tensor
    device_offset: int
    block_stride: int
    blocks: int
    wire_offset: int
    page_step: int
    dims: tuple[tuple[int, int, int], ...]

    @property
    def run_bytes(self) -> int:
        return self.dims[-1][0]

    @property
    def content_bytes(self) -> int:
        return math.prod(size for size, _, _ in self.dims)


# long: a copy's terms, how they are matched and what is done with them explain one another
class CopyProgram:
    """A program derived from the field lists; see `Program`."""

    def __init__(
        self, binding: Binding, record: WireRecord, copies: list[_Strided], pages: int, *, complete: bool
    ) -> None:
        self.payload_bytes = record.payload_bytes
        self.complete = complete
        self.binding = binding
        self.pages = pages
        self._copies = copies
        runs, shortest = all(len(copy.dims) == 1 for copy in copies), min(copy.run_bytes for copy in copies)
        host = binding.device.type == "cpu"
        long = (host and len(copies) == 1) or shortest >= (MIN_RUN_BYTES if host else MIN_DEVICE_RUN_BYTES)
        self._in_runs = complete and runs and long
        self.direct = self._in_runs and pages == 1
        self.grains = None
        if binding.device.type == "cuda" and has_kernels():
            self.grains = Grains.of(self.runs(), record.payload_bytes, binding.device, pages)
        unit = math.gcd(record.payload_bytes, *(_unit_of(copy) for copy in copies))
        self._unit_bytes, self._unit = next(item for item in _UNITS if unit % item[0] == 0)
        self._views = [self._device_view(copy) for copy in copies]

    @classmethod
    def compile(
        cls, binding: Binding, record: WireRecord, worker: int = 0, tp: int = 1, *, pages: int = 1
    ) -> CopyProgram:
        """Derive the copies between a worker's memory and a record.

        Args:
            binding: of the record's space, laid out for `worker` of `tp`.
            record: one part and shard.
            worker: below `tp`.
            tp: degree of tensor parallelism.
            pages: that one record spans.

        Raises:
            UsageFault: the two do not fit; every field that does not is named with the numbers.
        """
        space = binding.space
        faults = []
        if space.key != record.part.space:
            faults.append(f"part {record.part.name} lies in space {record.part.space}, not in {space.key}")
        copies: list[_Strided] = []
        skipped = 0
        for arena in record.arenas if not faults else ():
            bound = binding.arenas.get(arena.name)
            for field in arena.fields:
                found = _match(bound, arena, field, record, (worker, tp), pages)
                if isinstance(found, str):
                    faults.append(f"{arena.name}.{field.name}: {found}")
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
        total = pages * sum(copy.content_bytes for copy in merged)
        if not skipped and total != record.payload_bytes:
            raise InternalFault(f"copies of {total} B for a payload of {record.payload_bytes} B")
        return cls(binding, record, merged, pages, complete=not skipped)

    def buffers(self, blocks: Blocks) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """See `Program.buffers`.

        Raises:
            UsageFault: the program is not direct, or a block id is out of range.
        """
        if not self.direct:
            raise UsageFault("the payload is not made of long runs of bytes of one page; gather it instead")
        return self._addresses(checked_blocks(self, blocks)), tuple(copy.run_bytes for copy in self._copies)

    def _addresses(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each copy begins in some blocks (int64[...]): int64[..., copies]."""
        bases = np.array([copy.storage.data_ptr() + copy.device_offset for copy in self._copies], np.int64)
        strides = np.array([copy.block_stride for copy in self._copies], np.int64)
        return bases + ids[..., None] * strides

    def gather(self, blocks: Blocks, out: Tensor) -> None:
        """See `Program.gather`.

        Raises:
            UsageFault: the program is not complete, a block id is out of range, or `out` has another shape.
        """
        if not self.complete:
            raise UsageFault("this worker holds only a part of the record; it can be read, not written")
        if self._in_host_runs(out):
            self._move(blocks, out, to_wire=True)
            return
        index = on_device(self._ids(blocks, out).ravel(), self.binding.device)
        staged = out if out.device == self.binding.device else torch.empty_like(out, device=index.device)
        for copy, view in zip(self._copies, self._views, strict=True):
            wire = self._wire_view(copy, staged)
            wire.copy_(view.index_select(0, index).view(wire.shape))
        if staged is not out:
            out.copy_(staged)

    def scatter(self, blocks: Blocks, staged: Tensor) -> None:
        """See `Program.scatter`; no byte outside the worker's fields is touched (E1).

        Raises:
            UsageFault: a block id is out of range or repeated, or `staged` has another shape.
        """
        refuse_repeated(self, blocks)
        if self._in_host_runs(staged):
            self._move(blocks, staged, to_wire=False)
            return
        ids = self._ids(blocks, staged, holes=True).ravel()
        rows = on_device(np.flatnonzero(ids) if self.pages > 1 else np.arange(len(ids)), self.binding.device)
        index = on_device(ids, self.binding.device)[rows]
        source = staged.to(self.binding.device)
        for copy, view in zip(self._copies, self._views, strict=True):
            wire = self._wire_view(copy, source).flatten(0, 1)
            view.index_copy_(0, index, wire if len(rows) == len(ids) else wire[rows])

    def _in_host_runs(self, staged: Tensor) -> bool:
        return self._in_runs and staged.device.type == self.binding.device.type == "cpu"

    def _move(self, blocks: Blocks, staged: Tensor, *, to_wire: bool) -> None:
        """Run by run: no copy between, and neighbours are one run."""
        check_staged(staged, len(blocks), self.payload_bytes)
        ids = checked_blocks(self, blocks, holes=not to_wire).reshape(len(blocks), self.pages)
        pages = self._addresses(ids).swapaxes(1, 2)  # [n, copies, pages]: mostly the order of the wire
        starts = np.array([copy.wire_offset for copy in self._copies], np.int64)
        steps = np.array([copy.page_step for copy in self._copies], np.int64)
        inside = starts[:, None] + steps[:, None] * np.arange(self.pages)
        rows = staged.data_ptr() + self.payload_bytes * np.arange(len(ids), dtype=np.int64)
        wire = rows[:, None, None] + inside
        size = np.array([copy.run_bytes for copy in self._copies], np.int64)[:, None]
        chosen = np.broadcast_to((ids > 0)[:, None] if self.pages > 1 else True, pages.shape)
        sides = (wire, pages) if to_wire else (pages, wire)
        copy_runs(sides[0][chosen], sides[1][chosen], np.broadcast_to(size, pages.shape)[chosen])

    def runs(self) -> Iterator[Runs]:
        """Every contiguous piece that is moved, as addresses of block 0."""
        for copy in self._copies:
            device = np.array([copy.storage.data_ptr() + copy.device_offset], np.int64)
            wire = np.array([copy.wire_offset], np.int64)
            for size, step, wire_step in copy.dims[:-1]:
                at = np.arange(size, dtype=np.int64)
                device = (device[:, None] + at * step).ravel()
                wire = (wire[:, None] + at * wire_step).ravel()
            for page in range(self.pages):
                yield Runs(device, copy.block_stride, wire + page * copy.page_step, copy.run_bytes, page)

    def _ids(self, blocks: Blocks, staged: Tensor, *, holes: bool = False) -> NDArray[np.int64]:
        ids = checked_blocks(self, blocks, holes=holes)
        check_staged(staged, len(ids), self.payload_bytes)
        if staged.storage_offset() % self._unit_bytes:
            raise UsageFault(f"staging begins at byte {staged.storage_offset()}, not on {self._unit_bytes} B")
        return ids

    def _device_view(self, copy: _Strided) -> Tensor:
        sizes, strides = self._shape(copy, 1)
        return typed_view(
            copy.storage, self._unit, copy.device_offset, (copy.blocks, *sizes), (copy.block_stride, *strides)
        )

    def _wire_view(self, copy: _Strided, staged: Tensor) -> Tensor:
        sizes, strides = self._shape(copy, 2)
        offset = int(staged.storage_offset()) + copy.wire_offset
        shape = (len(staged), self.pages, *sizes)
        steps = (self.payload_bytes, copy.page_step, *strides)
        return typed_view(as_bytes(staged), self._unit, offset, shape, steps)

    def _shape(self, copy: _Strided, side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes in units and strides in bytes; side 1 is the device, 2 the wire."""
        sizes = (*(dim[0] for dim in copy.dims[:-1]), copy.run_bytes // self._unit_bytes)
        return sizes, (*(dim[side] for dim in copy.dims[:-1]), self._unit_bytes)


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


def checked_blocks(program: Program, blocks: Blocks, *, holes: bool = False) -> NDArray[np.int64]:
    """Block ids as int64[n], or [n, pages] where a record has several pages.

    Args:
        program: whose blocks.
        blocks: of that shape.
        holes: whether 0 stands for a page of several that is left out.

    Raises:
        UsageFault: an id is beyond the memory (E8), or is the padding block of a paged space (B21).
    """
    binding, pages = program.binding, program.pages
    ids = np.ascontiguousarray(blocks, dtype=np.int64)
    first = 1 if binding.space.kind == "paged" and not (holes and pages > 1) else 0
    wrong = ids[(ids < first) | (ids >= binding.blocks)]
    if ids.shape[1:] != ((pages,) if pages > 1 else ()) or not ids.ndim or wrong.size:
        shape = f"[n, {pages}]" if pages > 1 else "[n]"
        raise UsageFault(
            f"space {binding.space.key}: block ids {wrong[:8].tolist()} of shape {list(ids.shape)};"
            f" expected {shape} from {first} to {binding.blocks - 1}"
        )
    return ids


def refuse_repeated(program: Program, blocks: Blocks) -> None:
    """Refuse to write a block twice by one copy; where a record has several pages, 0 stands for none.

    Raises:
        UsageFault: one is written twice.
    """
    ids = np.asarray(blocks)
    written = ids[ids != 0] if program.pages > 1 else ids
    if len(np.unique(written)) != len(written):
        raise UsageFault("a block is written twice by one copy")


def check_staged(staged: Tensor, count: int, payload_bytes: int) -> None:
    """Refuse a staging buffer that is not contiguous uint8[count, payload_bytes].

    Raises:
        UsageFault: it is something else.
    """
    expected = (count, payload_bytes)
    if tuple(staged.shape) != expected or staged.dtype is not torch.uint8 or not staged.is_contiguous():
        raise UsageFault(
            f"staging of shape {list(staged.shape)} and {staged.dtype};"
            f" expected contiguous uint8{list(expected)}"
        )


def _match(
    bound: ArenaBinding | None,
    arena: ArenaLayout,
    wire: FieldLayout,
    record: WireRecord,
    place: tuple[int, int],
    pages: int,
) -> _Strided | str | None:
    """The copy of one field; None if the worker holds none of it; or what does not fit."""
    fields = {field.name: field for field in bound.layout.fields} if bound else {}
    field = fields.get(wire.name)
    if bound is None or field is None:
        return "the device has no such field"
    fault = _unlike(field, wire, pages)
    if fault:
        return fault
    start = _start(field, wire, record, place)
    if not isinstance(start, tuple):
        return start
    axis, begin = start
    device = dict(zip(field.axes, field.strides_bytes, strict=True))
    rows = dict(zip(field.axes, field.shape, strict=True)).get(TOKEN_AXIS, 1)
    dims = [
        (rows if name == TOKEN_AXIS else size, device[name], stride)
        for name, size, stride in zip(wire.axes, wire.shape, wire.strides_bytes, strict=True)
    ]
    return _Strided(
        bound.storage,
        bound.offset_bytes + field.offset_bytes + (begin * device[axis] if axis else 0),
        bound.stride_bytes,
        bound.blocks,
        arena.offset_bytes + wire.offset_bytes,
        rows * dict(zip(wire.axes, wire.strides_bytes, strict=True))[TOKEN_AXIS] if pages > 1 else 0,
        _merge_dims([*(dim for dim in dims if dim[0] > 1), (wire.element_bytes, 1, 1)]),
    )


def _unlike(field: FieldLayout, wire: FieldLayout, pages: int) -> str | None:
    """A difference that no strided copy can bridge."""
    if field.dtype != wire.dtype:
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


def _start(
    field: FieldLayout, wire: FieldLayout, record: WireRecord, place: tuple[int, int]
) -> tuple[str | None, int] | str | None:
    """Which axis the record cuts and where its slice begins in the worker's field; None if elsewhere."""
    worker, tp = place
    size = dict(zip(field.axes, field.shape, strict=True))
    wanted = dict(zip(wire.axes, wire.shape, strict=True))
    cut = record.cuts[field.arena, field.name]
    fixed = [axis for axis in wanted if axis != TOKEN_AXIS and (cut is None or axis != cut[0])]
    others = [axis for axis in fixed if wanted[axis] != size[axis]]
    if others:
        axis = others[0]
        return f"axis {axis} is {size[axis]} on the device, {wanted[axis]} on the wire"
    if cut is None:
        return None, 0
    axis, first, end = cut
    whole = (end - first) * record.shards
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


def _merge(copies: list[_Strided]) -> list[_Strided]:
    """Join copies that lie side by side on both sides; given and returned in wire order."""
    done: list[_Strided] = []
    for following in copies:
        current = following
        while done and (joined := _joined(done[-1], current)):
            done.pop()
            current = joined
        done.append(current)
    return done


def _joined(left: _Strided, right: _Strided) -> _Strided | None:
    run = left.run_bytes
    if (
        left.storage.data_ptr() != right.storage.data_ptr()
        or (left.block_stride, left.blocks, left.page_step)
        != (right.block_stride, right.blocks, right.page_step)
        or left.dims[:-1] != right.dims[:-1]
        or left.device_offset + run != right.device_offset
        or left.wire_offset + run != right.wire_offset
    ):
        return None
    return replace(left, dims=_merge_dims([*left.dims[:-1], (run + right.run_bytes, 1, 1)]))


def _unit_of(copy: _Strided) -> int:
    """The largest element that every step of a copy is a multiple of."""
    steps = [step for _, device, wire in copy.dims[:-1] for step in (device, wire)]
    stride = copy.block_stride if copy.blocks > 1 else 0
    return math.gcd(copy.run_bytes, copy.device_offset, stride, copy.wire_offset, copy.page_step, *steps)
