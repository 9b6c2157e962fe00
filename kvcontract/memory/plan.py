"""What a mover works out once for a program, and what a batch needs while it is on the device."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.memory.copy import Program
from kvcontract.memory.lanes import LANES, ROWS_BEHIND, LaneSums
from kvcontract.memory.pinned import pinned_memory

PROGRAMS_PER_CORE: Final = 2
"""Of a kernel, so that one adds while the other waits.  All multiprocessors for a short while: whoever
computes beside it runs on all of them, and waits for the slowest, so that a few slow ones for a long while
cost more."""

_SPANS: Final = (ROWS_BEHIND, 8, 1, 0)
"""Rows of a kernel that lie in one grain, of which it is told once; 0: not even all of one row."""

_FIRST_WORDS: Final = 4096
_FETCHED: Final = 1024
"""Blocks that one program of a kernel reads from the host."""


class Plan:
    """What is worked out once for a program.

    Args:
        program: between pages and payloads.
        segments: bytes of each segment of a payload.

    Attributes:
        straight: whether pages are copied where they lie.
        sums: of payloads as they lie on the device.
        lengths: int64[k], bytes of each piece that is copied.
        inside: int64[k], where each begins in a payload.
        pages: of a record.
    """

    def __init__(self, program: Program, segments: tuple[int, ...]) -> None:
        self.program, self.device = program, program.binding.device
        grains = program.grains
        self.sums = LaneSums(segments, self.device, grains.word_bytes if grains is not None else 1)
        self.pages = grains.pages if grains is not None else 1
        self.straight = program.direct and grains is not None
        runs = program.buffers(np.empty(0, np.int64))[1] if self.straight else (program.payload_bytes,)
        self.lengths = np.array(runs, np.int64)
        self.inside = np.cumsum(self.lengths) - self.lengths
        unit = self.sums.unit_bytes
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._programs = PROGRAMS_PER_CORE * cores
        self._grain = 0 if grains is None else grains.grain_bytes // unit
        self._span = next(rows for rows in _SPANS if self._aligned(rows * LANES))
        self._sizes = np.empty(0, np.int64)
        self._fetch: Any = None
        self._kernels: dict[tuple[bool, bool], tuple[Any, list[int], tuple[Any, ...]]] = {}

    def _aligned(self, units: int) -> bool:
        """Whether grains and parts begin and end between groups of so many units."""
        return units == 0 or (self._grain % units == 0 and self.sums.aligned(units))

    def sizes(self, count: int) -> NDArray[np.int64]:
        """int64[count * k], bytes of each piece of so many records."""
        if len(self._sizes) < count * len(self.lengths):
            self._sizes = np.tile(self.lengths, count)
        return self._sizes[: count * len(self.lengths)]

    def host_pieces(self, address: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n * k], where the pieces of payloads lie."""
        return address if len(self.lengths) == 1 else (address[:, None] + self.inside).ravel()

    def warm(self, desk: Desk) -> None:
        """Compile what will be needed, so that a launch need not ask whether it has been."""
        desk.prepare(np.zeros(self.pages, np.int64), 1)
        moves = self.program.grains is not None
        for read in (True, False) if moves and not self.straight else (moves,):
            self._kernel(desk, read=read, write=moves and not self.straight)

    def tell(self, desk: Desk, count: int, stream: Any) -> None:
        """Let `carry`, on the same stream, find the blocks of so many records, which are those `given`."""
        blocks = count * self.pages
        _launch(self._fetch, -(-blocks // _FETCHED), stream, (desk.given_at, desk.ids_at(), blocks, _FETCHED))

    def carry(
        self, desk: Desk, count: int, buffer: Tensor | None, stream: Any, *, read: bool, write: bool
    ) -> None:
        """Sum, and gather or scatter.

        Args:
            desk: told of the blocks; its `found` is written.
            count: records.
            buffer: payloads side by side; None where only pages are read.
            stream: where.
            read: sum pages, not payloads.
            write: write the other side.
        """
        compiled, static, options = self._kernels[read, write]
        wire = desk.given_at if buffer is None else buffer.data_ptr()
        moving = (wire, self.program.payload_bytes, desk.found_at, count, len(self.sums))
        programs = min(self._programs, count * len(self.sums))
        _launch(compiled, programs, stream, (static[0], desk.ids_at(), *static[1:], *moving, *options))

    def _kernel(self, desk: Desk, *, read: bool, write: bool) -> None:
        """Compile one way."""
        from kvcontract.memory import kernels  # noqa: PLC0415 - only where triton is

        sums, grains = self.sums, self.program.grains
        tables = (
            sums.parts if grains is None else grains.rows,
            sums.parts,
            sums.columns,
            sums.step,
            sums.lanes,
        )
        unit = kernels.UNITS[sums.unit_bytes]
        options = (max(1, self._grain), self.pages, self.pages > 1, unit, read, write, LANES, self._span)
        ids = desk.ids()
        self._fetch = kernels.fetch[(1,)](desk.given_at, ids, 0, _FETCHED)
        moving = (desk.given_at, self.program.payload_bytes, desk.found_at, 0, len(sums))
        compiled = kernels.carry[(1,)](tables[0], ids, *tables[1:], *moving, *options, num_warps=LANES // 32)
        self._kernels[read, write] = compiled, [table.data_ptr() for table in tables], options


class Desk:
    """What one batch needs on the device, and what it is told there.

    Args:
        device: which.
        batch_bytes: of payload.

    Attributes:
        given: int64[...], pinned: the blocks; they begin at `given_at`.
        found: int32[...], pinned: the sums' shares; they begin at `found_at`.
        ready: when one stream may go on behind the other.
        done: when all has been done.
    """

    def __init__(self, device: torch.device, batch_bytes: int) -> None:
        self._device, self._batch_bytes = device, batch_bytes
        self._memory: Tensor | None = None
        self._ids: Tensor | None = None
        self._ids_at = self._ids_count = 0
        self.given = _pinned(_FIRST_WORDS, np.int64)
        self.found = _pinned(_FIRST_WORDS, np.int32)
        self.given_at, self.found_at = int(self.given.ctypes.data), int(self.found.ctypes.data)
        self.ready, self.done = _event(), _event(blocking=True)

    def prepare(self, ids: NDArray[np.int64], shares: int) -> None:
        """Say which blocks, and make room for so many shares."""
        if len(self.given) < ids.size:
            self.given = _pinned(2 * ids.size, np.int64)
            self.given_at = int(self.given.ctypes.data)
        if len(self.found) < shares:
            self.found = _pinned(2 * shares, np.int32)
            self.found_at = int(self.found.ctypes.data)
        self.given[: ids.size] = ids.ravel()

    def ids(self) -> Tensor:
        """int64[...] on the device, as long as `given`, for a copy of it."""
        if self._ids is None or len(self._ids) < len(self.given):
            self._ids = torch.empty(len(self.given), dtype=torch.int64, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # whose memory it may have been until now
        return self._ids

    def ids_at(self) -> int:
        """Where they lie."""
        if len(self.given) != self._ids_count:
            self._ids_at, self._ids_count = int(self.ids().data_ptr()), len(self.given)
        return self._ids_at

    def payloads(self, count: int, size_bytes: int) -> Tensor:
        """uint8[count, size_bytes] on the device; the first call takes the memory."""
        if self._memory is None:
            self._memory = torch.empty(self._batch_bytes, dtype=torch.uint8, device=self._device)
        return self._memory[: count * size_bytes].view(count, size_bytes)


def _launch(compiled: Any, programs: int, stream: Any, args: tuple[Any, ...]) -> None:
    """What `compiled[programs, 1, 1](*args)` does, but for its hooks, which cost more than the launch."""
    handles = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(programs, 1, 1, stream.cuda_stream, *handles, *args)


def _pinned(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(pinned_memory(count * np.dtype(dtype).itemsize), dtype)


def _event(*, blocking: bool = False) -> Any:
    return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call] # torch's own stub
