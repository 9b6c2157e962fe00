"""Copy programs: how one worker's blocks become the payload of one record, and back.

A program is compiled once, from the copies that `match` derives.  Where nothing but long runs of bytes of one
page is left, a record can be moved straight from and to it (`direct`); otherwise it goes through a contiguous
buffer (`gather`, `scatter`).

Elements are moved as integers: NaN payloads and -0.0 survive.  Those that are widened keep their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import round_up
from kvcontract.contract.wire import WireRecord
from kvcontract.memory.binding import Binding, as_bytes, torch_dtype, typed_view
from kvcontract.memory.grains import Grains, Runs, has_kernels, on_device
from kvcontract.memory.host import copy_runs
from kvcontract.memory.match import Strided, match

MIN_RUN_BYTES: Final = 4096
"""In host memory, records of several runs are moved run by run only if none is shorter."""

MIN_DEVICE_RUN_BYTES: Final = 512 * 1024
"""The same of a device, where each copy costs more, and of one run, too."""

Blocks = NDArray[np.integer[Any]]

_UNITS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_BITS: Final = dict(_UNITS)


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


class CopyProgram:
    """A program derived from the field lists; see `Program`."""

    def __init__(
        self, binding: Binding, record: WireRecord, copies: list[Strided], pages: int, *, complete: bool
    ) -> None:
        self.payload_bytes = record.payload_bytes
        self.complete = complete
        self.binding = binding
        self.pages = pages
        self._copies = copies
        plain = all(copy.types is None for copy in copies)
        runs, shortest = all(len(copy.dims) == 1 for copy in copies), min(copy.run_bytes for copy in copies)
        host = binding.device.type == "cpu"
        long = (host and len(copies) == 1) or shortest >= (MIN_RUN_BYTES if host else MIN_DEVICE_RUN_BYTES)
        self._in_runs = complete and plain and runs and long
        self.direct = self._in_runs and pages == 1
        self.grains = None
        if plain and binding.device.type == "cuda" and has_kernels():
            self.grains = Grains.of(self.runs(), record.payload_bytes, binding.device, pages)
        wide = [torch_dtype(copy.types[1]).itemsize for copy in copies if copy.types is not None]
        self._row_bytes = round_up(record.payload_bytes, max(wide, default=1))  # where elements are aligned
        unit = math.gcd(self._row_bytes, *(_unit_of(copy) for copy in copies))
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
        copies, complete = match(binding, record, worker, tp, pages)
        return cls(binding, record, copies, pages, complete=complete)

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
        here = out.device == self.binding.device and self._row_bytes == self.payload_bytes
        staged = out if here else self._rows(len(out))
        for copy, view in zip(self._copies, self._views, strict=True):
            wire, found = self._wire_view(copy, staged), view.index_select(0, index)
            if copy.types is not None:
                found = found.view(torch_dtype(copy.types[0]))
            wire.copy_(found.view(wire.shape))
        if staged is not out:
            out.copy_(staged[:, : self.payload_bytes])

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
        if self._row_bytes != self.payload_bytes:
            source = self._rows(len(staged))
            source[:, : self.payload_bytes] = staged
        for copy, view in zip(self._copies, self._views, strict=True):
            wire = self._wire_view(copy, source).flatten(0, 1)
            wire = wire if len(rows) == len(ids) else wire[rows]
            if copy.types is not None:
                wire = wire.to(torch_dtype(copy.types[0])).view(view.dtype)
            view.index_copy_(0, index, wire)

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

    def _rows(self, count: int) -> Tensor:
        """Memory for payloads on the device, each where its elements are aligned."""
        return torch.empty(count, self._row_bytes, dtype=torch.uint8, device=self.binding.device)

    def _device_view(self, copy: Strided) -> Tensor:
        unit, sizes, strides = self._shape(copy, 1)
        return typed_view(
            copy.storage, unit, copy.device_offset, (copy.blocks, *sizes), (copy.block_stride, *strides)
        )

    def _wire_view(self, copy: Strided, staged: Tensor) -> Tensor:
        unit, sizes, strides = self._shape(copy, 2)
        offset = int(staged.storage_offset()) + copy.wire_offset
        shape = (len(staged), self.pages, *sizes)
        return typed_view(as_bytes(staged), unit, offset, shape, (self._row_bytes, copy.page_step, *strides))

    def _shape(self, copy: Strided, side: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Elements, sizes in them and strides in bytes; side 1 is the device, 2 the wire."""
        sizes, strides = tuple(dim[0] for dim in copy.dims), tuple(dim[side] for dim in copy.dims)
        if copy.types is not None:  # values on the wire; on the device their bits, which torch can index
            dtype = torch_dtype(copy.types[side - 1])
            return dtype if side == 2 else _BITS[dtype.itemsize], sizes, strides  # noqa: PLR2004
        return (
            self._unit,
            (*sizes[:-1], copy.run_bytes // self._unit_bytes),
            (*strides[:-1], self._unit_bytes),
        )


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
    written = ids[ids != 0] if program.pages > 1 else ids.ravel()
    if len(set(written.tolist())) != len(written):  # a batch is short: quicker than sorting it
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


def _unit_of(copy: Strided) -> int:
    """The largest element that every step of a copy is a multiple of."""
    if copy.types is not None:
        return math.gcd(copy.wire_offset, torch_dtype(copy.types[1]).itemsize)  # where its staging may begin
    steps = [step for _, device, wire in copy.dims[:-1] for step in (device, wire)]
    stride = copy.block_stride if copy.blocks > 1 else 0
    return math.gcd(copy.run_bytes, copy.device_offset, stride, copy.wire_offset, copy.page_step, *steps)
