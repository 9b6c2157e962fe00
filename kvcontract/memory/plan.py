"""What a mover works out once for a program, and what a batch needs while it is on the device."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.memory.copy import Program
from kvcontract.memory.grains import WIDE_BYTES
from kvcontract.memory.lanes import JOINS, LANES, LaneSums
from kvcontract.memory.pinned import pinned_memory

PROGRAMS_PER_CORE: Final = 1
"""Of a kernel.  All multiprocessors for a short while: whoever computes beside it runs on all of them, and
waits for the slowest, so that a few slow ones for a long while cost more."""

_FIRST_WORDS: Final = 4096


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
        self._grain = 1 if grains is None else grains.grain_bytes // unit
        wide = (grains is None or grains.wide) and program.payload_bytes % WIDE_BYTES == 0
        self._wide = unit > 1 and wide and self.sums.aligned(WIDE_BYTES // unit)
        self._whole = self._grain % LANES == 0 and self.sums.aligned(LANES)
        self._sizes = np.empty(0, np.int64)
        self._kernels: dict[tuple[bool, bool], tuple[Any, list[int], tuple[Any, ...]]] = {}

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

    def carry(
        self, desk: Desk, count: int, buffer: Tensor | None, stream: Any, *, read: bool, write: bool
    ) -> None:
        """Sum, and gather or scatter.

        Args:
            desk: whose `given` are the blocks, int64[count * pages], and whose `found` is written.
            count: records.
            buffer: payloads side by side; None where only pages are read.
            stream: where.
            read: sum pages, not payloads.
            write: write the other side.
        """
        compiled, static, options = self._kernels[read, write]
        ids = self.sums.parts.data_ptr() if self.pages == 1 else desk.ids(count * self.pages, stream)
        wire = desk.given_at if buffer is None else buffer.data_ptr()
        moving = (desk.given_at, wire, self.program.payload_bytes, desk.found_at, count, len(self.sums))
        grid = (min(self._programs, count * len(self.sums)), 1, 1)
        compiled[grid](static[0], ids, *static[1:], *moving, *options, stream=stream.cuda_stream)

    def _kernel(self, desk: Desk, *, read: bool, write: bool) -> None:
        """Compile one way."""
        from kvcontract.memory import kernels  # noqa: PLC0415 - only where triton is

        sums, grains = self.sums, self.program.grains
        tables = (
            sums.parts if grains is None else grains.rows,
            sums.parts,
            sums.columns,
            sums.step,
            sums.joins,
            sums.lanes,
        )
        unit = kernels.UNITS[sums.unit_bytes]
        options = (self._grain, self.pages, LANES, JOINS, unit, read, write, self._wide, self._whole)
        ids = desk.ids_tensor() if self.pages > 1 else sums.parts.view(torch.int64)
        moving = (desk.given_at, desk.given_at, self.program.payload_bytes, desk.found_at, 0, len(sums))
        compiled = kernels.carry[(1,)](tables[0], ids, *tables[1:], *moving, *options, num_warps=8)
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

    def ids_tensor(self) -> Tensor:
        """int64[...] on the device, as long as `given`."""
        if self._ids is None or len(self._ids) < len(self.given):
            self._ids = torch.empty(len(self.given), dtype=torch.int64, device=self._device)
        return self._ids

    def ids(self, count: int, stream: Any) -> int:
        """Where the blocks lie in memory of the device, copied on a stream."""
        from kvcontract.memory import kernels  # noqa: PLC0415 - only where triton is

        target = self.ids_tensor()
        with torch.cuda.stream(stream):
            kernels.fetch[(-(-count // 1024),)](self.given_at, target, count, BLOCK=1024)
        return target.data_ptr()

    def payloads(self, count: int, size_bytes: int) -> Tensor:
        """uint8[count, size_bytes] on the device; the first call takes the memory."""
        if self._memory is None:
            self._memory = torch.empty(self._batch_bytes, dtype=torch.uint8, device=self._device)
        return self._memory[: count * size_bytes].view(count, size_bytes)


def _pinned(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(pinned_memory(count * np.dtype(dtype).itemsize), dtype)


def _event(*, blocking: bool = False) -> Any:
    return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call] # torch's own stub
