"""Bindings: where the blocks of a space lie, and typed views of their fields.

Memory is either allocated here, *page-first* (a block holds all arenas of its space side by side, so that
one page is one run of bytes), or it is an engine's, bound as it is: one tensor an arena, blocks at any
constant distance.  Everything later asks a `Binding` and does not care which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.dtypes import DTYPE_BITS
from kvcontract.contract.errors import EnvironmentFault, UsageFault
from kvcontract.contract.layout import ArenaLayout, FieldLayout, Space
from kvcontract.memory.host import aligned_memory
from kvcontract.memory.slab import PAGE_BYTES
from kvcontract.memory.stream import StreamEvent

CLAUSE: Final = "KVC-LAYOUT-05"
_BYTE_BITS: Final = 8


def torch_dtype(name: str) -> torch.dtype:
    """The element type of views: that of the field, or bytes where it is narrower than one.

    Raises:
        EnvironmentFault: this torch lacks the type.
    """
    if DTYPE_BITS[name] < _BYTE_BITS:
        return torch.uint8
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise EnvironmentFault(f"torch {torch.__version__} has no dtype {name}; install a newer torch")
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor, as uint8[bytes]; shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def typed_view(
    storage: Tensor,
    dtype: torch.dtype,
    offset_bytes: int,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
) -> Tensor:
    """A strided view into a storage given as uint8[bytes].

    Offset and strides must be multiples of the element size.
    """
    view = torch.empty(0, dtype=dtype, device=storage.device)
    size = view.element_size()
    strides = tuple(stride // size for stride in strides_bytes)
    return view.set_(storage.untyped_storage(), offset_bytes // size, shape, strides)


@dataclass(frozen=True, slots=True)
class ArenaBinding:
    """Where one arena's blocks lie.

    Attributes:
        layout: of one block.
        storage: uint8[bytes], the whole storage they lie in.
        offset_bytes: of block 0 in the storage.
        stride_bytes: between blocks.
        blocks: how many there are.
    """

    layout: ArenaLayout
    storage: Tensor
    offset_bytes: int
    stride_bytes: int
    blocks: int

    @property
    def address(self) -> int:
        """Where block 0 begins, in the address space of the device."""
        return self.storage.data_ptr() + self.offset_bytes

    def view(self, field: FieldLayout) -> Tensor:
        """[blocks, *axes] of one field, in its own dtype."""
        return typed_view(
            self.storage,
            torch_dtype(field.dtype),
            self.offset_bytes + field.offset_bytes,
            (self.blocks, *field.shape),
            (self.stride_bytes, *field.strides_bytes),
        )


@dataclass(frozen=True)
class Binding:
    """The memory of one space on one device.

    Attributes:
        space: what is bound.
        arenas: by name, in the order of the space.
        device: where all of it lies.
    """

    space: Space
    arenas: Mapping[str, ArenaBinding]
    device: torch.device

    @classmethod
    def allocate(cls, space: Space, blocks: int, device: str | torch.device = "cpu") -> Binding:
        """Page-first memory for `blocks` blocks, zeroed once.

        Zeros, because block 0 is what padding reads (B21), and NaN there would spread through a masked sum.

        Raises:
            UsageFault: fewer than one block, or elements that would straddle their natural boundaries.
        """
        faults = [] if blocks >= 1 else [f"{blocks} blocks; expected at least 1"]
        for arena in space.arenas:
            faults += _misaligned(arena, arena.offset_bytes, space.stride_bytes)
        if faults:
            lines = "\n  ".join(faults)
            raise UsageFault(f"space {space.key} cannot be allocated [{CLAUSE}]:\n  {lines}")
        align = math.lcm(*(arena.align_bytes for arena in space.arenas))
        size = blocks * space.stride_bytes
        if torch.device(device).type == "cpu":
            # A disk takes what is aligned to pages of the system's memory as it is.
            memory = aligned_memory(size, math.lcm(PAGE_BYTES, align), zeroed=True)
            storage = torch.from_numpy(memory)
        else:
            storage = torch.zeros(size + align - 1, dtype=torch.uint8, device=device)
        start = -storage.data_ptr() % align
        arenas = {
            arena.name: ArenaBinding(arena, storage, start + arena.offset_bytes, space.stride_bytes, blocks)
            for arena in space.arenas
        }
        return cls(space, arenas, storage.device)

    @classmethod
    def of(cls, space: Space, tensors: Mapping[str, Tensor], blocks: int | None = None) -> Binding:
        """Memory that exists: one tensor [blocks, ...] for each arena, contiguous inside a block.

        Args:
            space: what to bind.
            tensors: by arena name; of the fields' dtype, or uint8; blocks at any constant distance.
            blocks: how many are needed; None takes what the smallest tensor has (B22).

        Raises:
            UsageFault: something would be read or written out of bounds, or twice; all faults at once (E8).
        """
        faults = [f"no tensor for arena {arena.name}" for arena in space.arenas if arena.name not in tensors]
        known = {arena.name: arena for arena in space.arenas}
        faults += [
            f"a tensor for {name}, which space {space.key} has not" for name in tensors if name not in known
        ]
        bound: dict[str, ArenaBinding] = {}
        for name, arena in known.items():
            if name in tensors:
                found = _arena_faults(arena, tensors[name], blocks)
                faults += found
                if not found:
                    bound[name] = _bind(arena, tensors[name])
        devices = {str(tensor.device) for tensor in tensors.values()}
        if len(devices) > 1:
            faults.append(f"tensors on several devices: {', '.join(sorted(devices))}")
        faults += _overlaps(list(bound.values()))
        if faults:
            lines = "\n  ".join(faults)
            raise UsageFault(f"space {space.key} cannot be bound [{CLAUSE}]:\n  {lines}")
        device = next(iter(bound.values())).storage.device if bound else torch.device("cpu")
        return cls(space, bound, device)

    @cached_property
    def blocks(self) -> int:
        """Blocks that every arena has; a pool may not be larger (B22)."""
        return min((arena.blocks for arena in self.arenas.values()), default=0)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks of every arena, from source to target, in the order given (E4).

        Raises:
            UsageFault: a block id is out of range; all are named.
        """
        wanted = list(pairs)
        wrong = sorted({block for pair in wanted for block in pair if not 0 <= block < self.blocks})
        if wrong:
            raise UsageFault(f"blocks {wrong} of {self.blocks}: expected 0 <= block < {self.blocks}")
        self._queue(wanted)
        self.touched()

    def _queue(self, pairs: list[tuple[int, int]]) -> None:
        """Have blocks copied."""
        for view in self.views.values():
            for source, target in pairs:
                view[target].copy_(view[source])

    def touched(self) -> None:
        """Copies from or to blocks have been queued on the device by this thread; see `moves`."""
        event = self.event()
        if event is not None:
            self._moves[self._stream()] = event

    def _stream(self) -> int:
        """Names the stream that this thread's work is queued on."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @cached_property
    def _moves(self) -> dict[int, StreamEvent]:
        """By stream, after the last copy on it."""
        return {}

    @property
    def moves(self) -> tuple[StreamEvent, ...]:
        """After which the copies of blocks that are queued by now have been made.

        What a copy reads may be free already, as far as its pool knows, so who fills blocks waits for them.
        """
        return tuple(self._moves.values())

    def event(self) -> StreamEvent | None:
        """After which all that the device's work has queued by now is written; None: nothing ever waits."""
        if self.device.type != "cuda":
            return None
        event: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own stub
        event.record(torch.cuda.current_stream(self.device))  # type: ignore[attr-defined] # see engine/batch
        return event

    @cached_property
    def views(self) -> dict[tuple[str, str], Tensor]:
        """(arena, field) -> [blocks, *axes], for every field; shares the memory."""
        return {
            (arena.layout.name, field.name): arena.view(field)
            for arena in self.arenas.values()
            for field in arena.layout.fields
        }


def _bind(arena: ArenaLayout, tensor: Tensor) -> ArenaBinding:
    size = tensor.element_size()
    stride, begin = int(tensor.stride(0)) * size, int(tensor.storage_offset()) * size
    return ArenaBinding(arena, as_bytes(tensor), begin, stride, len(tensor))


def _arena_faults(arena: ArenaLayout, tensor: Tensor, blocks: int | None) -> list[str]:
    """What is wrong with one arena's tensor, with the arithmetic."""
    where = f"arena {arena.name}"
    if tensor.ndim < 2 or len(tensor) < 1:  # noqa: PLR2004 - blocks, and something in each
        return [f"{where}: a tensor of shape {list(tensor.shape)}; expected [blocks, ...] with blocks >= 1"]
    size, faults = tensor.element_size(), []
    wanted = {torch_dtype(field.dtype) for field in arena.fields}
    if tensor.dtype is not torch.uint8 and wanted != {tensor.dtype}:
        names = sorted(str(dtype) for dtype in wanted)
        faults.append(f"{where}: dtype {tensor.dtype}; expected torch.uint8, or {', '.join(names)} alone")
    if not tensor[0].is_contiguous():
        faults.append(f"{where}: strides {list(tensor.stride())} are not contiguous inside a block")
    needed, held, content = len(tensor) if blocks is None else blocks, len(tensor), arena.content_bytes
    stride, inner = tensor.stride(0) * size, tensor[0].numel() * size
    if inner < content:
        faults.append(f"{where} needs {content:,} B a block, its tensor has {inner:,} B a block")
    if held < needed:
        faults.append(
            f"{where} needs {needed:,} blocks x {inner:,} B = {needed * inner:,} B,"
            f" its tensor holds {held:,} blocks = {held * inner:,} B"
        )
    if held > 1 and stride < max(content, inner):
        faults.append(
            f"{where}: blocks of {max(content, inner):,} B lie only {stride:,} B apart: they overlap"
        )
    return faults + _placement_faults(arena, tensor, stride)


def _placement_faults(arena: ArenaLayout, tensor: Tensor, stride: int) -> list[str]:
    """Alignment, and the end of the storage."""
    where = f"arena {arena.name}"
    faults = _misaligned(arena, tensor.data_ptr(), stride if len(tensor) > 1 else 0)
    begin = tensor.storage_offset() * tensor.element_size()
    end = begin + (len(tensor) - 1) * stride + arena.content_bytes
    room = tensor.untyped_storage().nbytes()
    if end > room:
        faults.append(
            f"{where}: {begin:,} B + {len(tensor) - 1:,} x {stride:,} B + {arena.content_bytes:,} B"
            f" = {end:,} B, its storage ends at {room:,} B"
        )
    return faults


def _misaligned(arena: ArenaLayout, begin: int, stride: int) -> list[str]:
    """Offsets and strides that are no multiples of an element, or of the arena's own alignment."""
    where, faults = f"arena {arena.name}", []
    if begin % arena.align_bytes or stride % arena.align_bytes:
        faults.append(
            f"{where}: block 0 at {begin:#x}, blocks {stride:,} B apart;"
            f" expected multiples of align_bytes, {arena.align_bytes} B"
        )
    if stride % arena.stride_multiple_bytes:
        faults.append(
            f"{where}: blocks {stride:,} B apart;"
            f" expected a multiple of stride_multiple_bytes, {arena.stride_multiple_bytes} B"
        )
    for field in arena.fields:
        steps = (begin + field.offset_bytes, stride, *field.strides_bytes)
        if any(step % field.element_bytes for step in steps):
            faults.append(
                f"{where}: field {field.name} at {begin:#x} + {field.offset_bytes}, strides"
                f" {[stride, *field.strides_bytes]} B;"
                f" expected multiples of its element, {field.element_bytes} B"
            )
    return faults


def _overlaps(bound: list[ArenaBinding]) -> list[str]:
    """Pairs of arenas that share bytes; only tensors whose whole ranges meet are looked at block by block."""
    ordered = sorted(bound, key=lambda item: item.address)
    clusters: list[list[ArenaBinding]] = []
    reach = -1
    for item in ordered:
        if item.address >= reach:
            clusters.append([])
        clusters[-1].append(item)
        reach = max(reach, item.address + (item.blocks - 1) * item.stride_bytes + item.layout.content_bytes)
    pairs = {pair for cluster in clusters if len(cluster) > 1 for pair in _shared(cluster)}
    return [f"arenas {first} and {second} share memory" for first, second in sorted(pairs)]


def _shared(cluster: list[ArenaBinding]) -> set[tuple[str, str]]:
    starts = [item.address + item.stride_bytes * np.arange(item.blocks, dtype=np.int64) for item in cluster]
    start: NDArray[np.int64] = np.concatenate(starts)
    owner = np.repeat(np.arange(len(cluster)), [item.blocks for item in cluster])
    order = np.argsort(start, kind="stable")
    start, owner = start[order], owner[order]
    end = start + np.array([item.layout.content_bytes for item in cluster])[owner]
    names = [item.layout.name for item in cluster]
    return {
        (min(names[a], names[b]), max(names[a], names[b]))
        for at in np.flatnonzero(end[:-1] > start[1:]).tolist()
        for a, b in pairwise(owner[at : at + 2].tolist())
    }
