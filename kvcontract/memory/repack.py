"""Conversions: a plugin's callables between device and wire, where strided copies are not enough.

A callable is named as ``module:name`` in the declaration and called once a record, as ``fn(src, dst)`` with
dicts ``{"arena/field": Tensor[rows, ...]}``.  The wire side is a buffer of our own, so `dst` is never the
memory of `src`; it is zeroed first, so that nothing of another request is stored where a callable leaves a
gap.  Where a record spans several pages, the device side is a buffer too: the pages' rows one after another.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import PluginFault, UsageFault
from kvcontract.contract.model import TOKEN_AXIS, Conversion, KvModel
from kvcontract.contract.wire import WireRecord
from kvcontract.memory.binding import Binding, torch_dtype, typed_view
from kvcontract.memory.copy import (
    Blocks,
    CopyProgram,
    Program,
    check_staged,
    checked_blocks,
    refuse_repeated,
)
from kvcontract.memory.grains import Grains

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Views = dict[str, Tensor]
Convert = Callable[[Views, Views], None]


def compile_program(
    model: KvModel, binding: Binding, record: WireRecord, worker: int = 0, tp: int = 1
) -> Program:
    """The program that a declaration asks for: derived copies, or its callables.

    Raises:
        UsageFault: memory and record do not fit.
        PluginFault: a callable cannot be found.
    """
    pages = model.record_pages if binding.space.kind == "paged" else 1
    if model.repack is None or isinstance(model.repack.conversion, str):
        return CopyProgram.compile(binding, record, worker, tp, pages=pages)
    return ConvertProgram(binding, record, model.repack.conversion, tp, pages=pages)


def resolve(name: str) -> Convert:
    """The callable behind ``module:name``.

    Raises:
        PluginFault: there is none.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PluginFault(f"conversion {name!r} is not of the form 'module:name'")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise PluginFault(f"conversion {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginFault(f"conversion {name!r} is a {type(found).__name__}, not a callable")
    return cast("Convert", found)


class ConvertProgram:
    """A program around a plugin's callables; see `Program`.

    Args:
        binding: of the record's space.
        record: one part; not cut into shards.
        conversion: the names of the callables.
        tp: degree of tensor parallelism.
        pages: that one record spans.

    Raises:
        UsageFault: the part is cut, or a wire field straddles the boundaries of its elements.
        PluginFault: a callable cannot be found.
    """

    direct = False
    complete = True
    grains: Grains | None = None

    def __init__(
        self, binding: Binding, record: WireRecord, conversion: Conversion, tp: int = 1, *, pages: int = 1
    ) -> None:
        faults = []
        if any(cut is not None for cut in record.cuts.values()) and (record.shards > 1 or tp > 1):
            faults.append(
                f"{record.shards} shards at tp {tp}; callables on a part that is cut are not served yet"
            )
        for arena in record.arenas:
            for field in arena.fields:
                steps = (arena.offset_bytes + field.offset_bytes, *field.strides_bytes)
                if any(step % field.element_bytes for step in steps):
                    faults.append(
                        f"{arena.name}.{field.name}: offset and strides {list(steps)} B;"
                        f" expected multiples of its element, {field.element_bytes} B"
                    )
        if faults:
            raise UsageFault(f"part {record.part.name} cannot be converted:\n  " + "\n  ".join(faults))
        self.payload_bytes = record.payload_bytes
        self.binding = binding
        self.pages = pages
        self._conversion = conversion
        self._to_wire, self._from_wire = resolve(conversion.to_wire), resolve(conversion.from_wire)
        groups = set(record.part.groups)
        mine = {arena.name for arena in binding.space.arenas if arena.group in groups}
        self._device = {
            f"{arena}/{name}": view for (arena, name), view in binding.views.items() if arena in mine
        }
        self._tokens = {
            f"{arena.name}/{field.name}": field.axes.index(TOKEN_AXIS)
            for arena in binding.space.arenas
            for field in arena.fields
            if TOKEN_AXIS in field.axes
        }
        self._record = record

    def buffers(self, blocks: Blocks) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Always refused: what is stored lies nowhere on the device.

        Raises:
            UsageFault: always.
        """
        raise UsageFault(f"{len(blocks)} blocks are converted on their way; gather them instead")

    def gather(self, blocks: Blocks, out: Tensor) -> None:
        """See `Program.gather`.

        Raises:
            UsageFault: a block id is out of range, or `out` has another shape.
            PluginFault: the callable raised.
        """
        ids = checked_blocks(self, blocks).reshape(-1, self.pages)
        check_staged(out, len(ids), self.payload_bytes)
        scratch, wire = self._scratch()
        for row, found in enumerate(ids.tolist()):
            scratch.zero_()
            converted(self._to_wire, self._conversion.to_wire, self._read(found), wire, found)
            out[row].copy_(scratch)

    def scatter(self, blocks: Blocks, staged: Tensor) -> None:
        """See `Program.scatter`; what a callable that raised has written stays, and must not be used.

        Raises:
            UsageFault: a block id is out of range, or `staged` has another shape.
            PluginFault: the callable raised.
        """
        ids = checked_blocks(self, blocks, holes=True).reshape(-1, self.pages)
        check_staged(staged, len(ids), self.payload_bytes)
        refuse_repeated(self, ids)
        scratch, wire = self._scratch()
        for row, found in enumerate(ids.tolist()):
            scratch.copy_(staged[row])
            views = self._read(found)
            converted(self._from_wire, self._conversion.from_wire, wire, views, found)
            if self.pages > 1:
                self._write(found, views)

    def _read(self, blocks: list[int]) -> Views:
        """The blocks of one record: in place if it is one, else their rows joined in memory of our own."""
        if self.pages == 1:
            return {name: view[blocks[0]] for name, view in self._device.items()}
        return {
            name: torch.cat([_raw(view[block]) for block in blocks], self._tokens[name]).view(view.dtype)
            for name, view in self._device.items()
        }

    def _write(self, blocks: list[int], views: Views) -> None:
        for name, view in self._device.items():
            for block, rows in zip(blocks, views[name].chunk(self.pages, self._tokens[name]), strict=True):
                if block:
                    _raw(view[block]).copy_(_raw(rows))

    def _scratch(self) -> tuple[Tensor, Views]:
        scratch = torch.empty(self.payload_bytes, dtype=torch.uint8, device=self.binding.device)
        wire = {
            f"{arena.name}/{field.name}": typed_view(
                scratch,
                torch_dtype(field.dtype),
                arena.offset_bytes + field.offset_bytes,
                field.shape,
                field.strides_bytes,
            )
            for arena in self._record.arenas
            for field in arena.fields
        }
        return scratch, wire


def converted(convert: Convert, name: str, src: Views, dst: Views, blocks: list[int]) -> None:
    """Call a callable on the blocks of one record.

    Raises:
        PluginFault: it raised.
    """
    try:
        convert(src, dst)
    except Exception as error:
        where = ", ".join(map(str, blocks))
        raise PluginFault(
            f"conversion {name!r} raised on block {where}: {type(error).__name__}: {error}"
        ) from error


def _raw(tensor: Tensor) -> Tensor:
    """The same elements as integers: NaN payloads survive, and every operation knows the type."""
    return tensor.view(_INTEGERS[tensor.element_size()])
