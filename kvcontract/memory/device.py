"""Copies between pages on a device and payloads in host memory, on streams of their own.

Each direction has a stream for kernels and one for the bus, so that gathering one batch overlaps the copy of
another; what follows from what is said with events, and the host waits in a thread of its own.  Records of
long runs are copied straight; others are gathered into, or scattered from, a buffer on the device.  Sums are
computed there: before pages leave, and after they returned (E7).

A kernel reads what it is told, and writes the sums, in pinned memory: small copies of either would stand in
line behind the payloads of the other direction.  Few batches are on the device at one time, others wait by
urgency, so that what is urgent finds no queue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Line, ThreadLane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.copy import Blocks, Program, checked_blocks
from kvcontract.memory.driver import driver
from kvcontract.memory.grains import WIDE_BYTES, has_kernels
from kvcontract.memory.lanes import LANES, LaneSums
from kvcontract.memory.pinned import pinned_memory
from kvcontract.memory.slab import Allocate

ON_DEVICE: Final = 2
"""Batches of one direction that are on the device at one time: one is copied, one is gathered or summed."""

PROGRAMS: Final = 24
"""Of a kernel: few enough to leave a device to who computes, enough to keep ahead of the bus."""

_FIRST_WORDS: Final = 4096

Sums = NDArray[np.uint32]


class StreamEvent(Protocol):
    """A point of a device's work, such as `torch.cuda.Event`."""

    def wait(self, stream: Any) -> Any:
        """Let a stream wait for it; the caller goes on."""
        ...

    def synchronize(self) -> Any:
        """Wait for it here."""
        ...


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
        self._grain = 1 if grains is None else grains.grain_bytes // unit
        wide = (grains is None or grains.wide) and program.payload_bytes % WIDE_BYTES == 0
        self._wide = unit > 1 and wide and self.sums.aligned(WIDE_BYTES // unit)
        self._whole = self._grain % LANES == 0 and self.sums.aligned(LANES)

    def warm(self, desk: Desk) -> None:
        """Compile what will be needed."""
        desk.prepare(np.zeros(self.pages, np.int64), 1)
        moves = self.program.grains is not None
        for read in (True, False) if moves and not self.straight else (moves,):
            self.carry(desk, 0, None, read=read, write=moves and not self.straight)

    def carry(self, desk: Desk, count: int, buffer: Tensor | None, *, read: bool, write: bool) -> None:
        """Sum, and gather or scatter, on the current stream.

        Args:
            desk: whose `given` are the blocks, int64[count * pages], and whose `found` is written.
            count: records.
            buffer: payloads side by side; None where only pages are read.
            read: sum pages, not payloads.
            write: write the other side.
        """
        from kvcontract.memory import kernels  # noqa: PLC0415 - only where triton is

        sums, grains = self.sums, self.program.grains
        ids = sums.parts if self.pages == 1 else desk.ids(count * self.pages)
        kernels.carry[(max(1, min(PROGRAMS, count * len(sums))),)](
            sums.parts if grains is None else grains.rows,
            ids,
            sums.parts,
            sums.columns,
            sums.step,
            sums.lanes,
            desk.given.ctypes.data,
            desk.given.ctypes.data if buffer is None else buffer.data_ptr(),
            self.program.payload_bytes,
            desk.found.ctypes.data,
            count,
            len(sums),
            GRAIN=self._grain,
            PAGES=self.pages,
            LANES=LANES,
            UNIT=kernels.UNITS[sums.unit_bytes],
            READ=read,
            WRITE=write,
            WIDE=self._wide,
            WHOLE=self._whole,
            num_warps=8,
        )


class Desk:
    """What one batch needs on the device, and what it is told there.

    Args:
        device: which.
        batch_bytes: of payload.

    Attributes:
        given: int64[...], pinned: the blocks.
        found: int32[...], pinned: the sums' shares.
        ready: when one stream may go on behind the other.
        done: when all has been done.
    """

    def __init__(self, device: torch.device, batch_bytes: int) -> None:
        self._device, self._batch_bytes = device, batch_bytes
        self._memory: Tensor | None = None
        self._ids: Tensor | None = None
        self.given = _pinned(_FIRST_WORDS, np.int64)
        self.found = _pinned(_FIRST_WORDS, np.int32)
        self.ready, self.done = _event(), _event(blocking=True)

    def prepare(self, ids: NDArray[np.int64], shares: int) -> None:
        """Say which blocks, and make room for so many shares."""
        if len(self.given) < ids.size:
            self.given = _pinned(2 * ids.size, np.int64)
        if len(self.found) < shares:
            self.found = _pinned(2 * shares, np.int32)
        self.given[: ids.size] = ids.ravel()

    def ids(self, count: int) -> Tensor:
        """The blocks in memory of the device, copied on the current stream."""
        from kvcontract.memory import kernels  # noqa: PLC0415 - only where triton is

        if self._ids is None or len(self._ids) < count:
            self._ids = torch.empty(len(self.given), dtype=torch.int64, device=self._device)
        kernels.fetch[(max(1, -(-count // 1024)),)](self.given.ctypes.data, self._ids, count, BLOCK=1024)
        return self._ids

    def payloads(self, count: int, size_bytes: int) -> Tensor:
        """uint8[count, size_bytes] on the device; the first call takes the memory."""
        if self._memory is None:
            self._memory = torch.empty(self._batch_bytes, dtype=torch.uint8, device=self._device)
        return self._memory[: count * size_bytes].view(count, size_bytes)


@dataclass(slots=True)
class _Request:
    """A batch that waits for its turn, or is on the device."""

    plan: Plan
    ids: NDArray[np.int64]
    address: NDArray[np.int64]
    after: StreamEvent | None = None
    landed: Pending[Sums | None] = field(default_factory=Pending)


class _Way:
    """One direction: its streams, its desks, who waits for them, and the thread that waits for the device."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        batch_bytes: int,
        issue: Callable[[_Way, Desk, _Request], None],
        fault: Callable[[Exception], object],
    ) -> None:
        self.kernels: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own stub
        self.bus: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own stub
        self.lane = ThreadLane(f"kvc-{name}-{device.index or 0}")
        self._device, self._issue, self._fault = device, issue, fault
        self._lock = threading.Lock()
        self._line: Line[_Request] = Line()
        with torch.cuda.device(device):
            self._free = [Desk(device, batch_bytes) for _ in range(ON_DEVICE)]

    def prepare(self, plan: Plan) -> None:
        """Take the memory that batches will need: later it would wait for all that the device does."""
        with self._lock, torch.cuda.stream(self.kernels):
            for desk in self._free:
                if not plan.straight:
                    desk.payloads(0, 1)
        torch.cuda.synchronize(self._device)

    def put(self, request: _Request, urgency: Urgency) -> None:
        """Let a request take its turn."""
        with self._lock:
            self._line.push(request, urgency)
        self._serve()

    def _serve(self) -> None:
        """Give free desks to whoever is next; whoever comes here first does it."""
        failed: list[_Request] = []
        with self._lock, torch.cuda.device(self._device):
            while self._line and self._free:
                request, desk = self._line.pop(), self._free.pop()
                try:
                    self._issue(self, desk, request)
                    self.lane.submit(partial(self._land, request, desk))
                except Exception as error:  # noqa: BLE001 - kept by the owner; the copy has failed (R4)
                    self._fault(error)
                    self._drain()  # what was queued before must not outlive the operation (R3)
                    self._free.append(desk)
                    failed.append(request)
        for request in failed:
            request.landed.settle(None)

    def _land(self, request: _Request, desk: Desk) -> None:
        """Wait for a batch; its desk goes on before its owner is told, so that the device need not wait."""
        found: Sums | None = None
        try:
            desk.done.synchronize()
            sums, count = request.plan.sums, len(request.ids)
            found = sums.joined(desk.found[: count * len(sums)].reshape(count, len(sums)))
        except Exception as error:  # noqa: BLE001 - kept by the owner; the copy has failed (R4)
            self._fault(error)
        with self._lock:
            self._free.append(desk)
        self._serve()
        request.landed.settle(found)

    def _drain(self) -> None:
        try:
            self.kernels.synchronize()
            self.bus.synchronize()
        except Exception as error:  # noqa: BLE001 - kept by the owner
            self._fault(error)


class DeviceMover:
    """The copies of one worker.

    Args:
        device: where its pages lie.
        batch_bytes: payload of the largest batch.
        fault: told of what went wrong on the device.
        batched_copies: hand many copies to the driver in one call.

    Attributes:
        allocate: where host memory comes from that it is quick with.
    """

    allocate: Allocate | None = staticmethod(pinned_memory)

    def __init__(
        self,
        device: torch.device,
        batch_bytes: int,
        fault: Callable[[Exception], object],
        *,
        batched_copies: bool = True,
    ) -> None:
        self._batch_bytes, self._batched = batch_bytes, batched_copies
        self._driver = driver()
        self._out = _Way("out", device, batch_bytes, self._send, fault)
        self._in = _Way("in", device, batch_bytes, self._receive, fault)
        self._counts: Counter[str] = Counter()

    def plan(self, program: Program, segments: tuple[int, ...]) -> Plan:
        """What `out` and `into` need of a program; made before the first of them, since it takes a while."""
        plan = Plan(program, segments)
        with torch.cuda.device(plan.device):
            if has_kernels():
                plan.warm(Desk(plan.device, 0))
            for way in (self._out, self._in):
                way.prepare(plan)
        return plan

    def out(
        self,
        plan: Plan,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        urgency: Urgency = Urgency.RESTORE,
        after: StreamEvent | None = None,
    ) -> Pending[Sums | None]:
        """Copy pages to host memory.

        Args:
            plan: of their program.
            blocks: int[n], or [n, pages], which must not change until the copy has landed (C1).
            address: int64[n], where each payload is to lie; pinned, or the copy is slow.
            urgency: which of those that wait goes first.
            after: what the pages were written before; the device waits for it, not the caller (C2).

        Returns:
            uint32[n, segments], once all has landed; None if the device failed.

        Raises:
            UsageFault: a block id is out of range, or the batch is too large.
        """
        ids = checked_blocks(plan.program.binding, blocks)
        return self._put(self._out, _Request(plan, ids, address, after), urgency)

    def into(
        self,
        plan: Plan,
        blocks: Blocks,
        address: NDArray[np.int64],
        *,
        urgency: Urgency = Urgency.RESTORE,
    ) -> Pending[Sums | None]:
        """Copy payloads in host memory to pages, and sum them as they lie on the device.

        The pages hold what arrived, whatever its sums are.

        Args:
            plan: of their program.
            blocks: int[n], or [n, pages], none twice, that nothing on the device reads or writes.
            address: int64[n], where each payload lies.
            urgency: which of those that wait goes first.

        Returns:
            uint32[n, segments], once the pages are written; None if the device failed.

        Raises:
            UsageFault: a block id is out of range or repeated, or the batch is too large.
        """
        ids = checked_blocks(plan.program.binding, blocks)
        if len(np.unique(ids)) != len(ids):
            raise UsageFault("a block is written twice by one copy")
        return self._put(self._in, _Request(plan, ids, address), urgency)

    def _put(self, way: _Way, request: _Request, urgency: Urgency) -> Pending[Sums | None]:
        if not len(request.ids):
            request.landed.settle(np.empty((0, request.plan.sums.segments), np.uint32))
            return request.landed
        size = len(request.ids) * request.plan.program.payload_bytes
        if size > self._batch_bytes:
            raise UsageFault(f"a batch of {size:,} B; the buffers have {self._batch_bytes:,} B")
        way.put(request, urgency)
        return request.landed

    def _send(self, way: _Way, desk: Desk, request: _Request) -> None:
        plan, ids, count = request.plan, request.ids, len(request.ids)
        desk.prepare(ids, count * len(plan.sums))
        target = request.address[:, None] + plan.inside
        if request.after is not None:
            request.after.wait(way.kernels)
        with torch.cuda.stream(way.kernels):
            if plan.straight:
                if request.after is not None:
                    request.after.wait(way.bus)
                self._copy("out", target, plan.program.buffers(ids)[0], plan.lengths, way.bus)
                plan.carry(desk, count, None, read=True, write=False)
                desk.ready.record(way.kernels)
                way.bus.wait_event(desk.ready)
            else:
                buffer = desk.payloads(count, plan.program.payload_bytes)
                _gather(plan, desk, ids, buffer)
                desk.ready.record(way.kernels)
                way.bus.wait_event(desk.ready)
                self._copy("out", target, _rows(buffer), plan.lengths, way.bus)
        desk.done.record(way.bus)

    def _receive(self, way: _Way, desk: Desk, request: _Request) -> None:
        plan, ids, count = request.plan, request.ids, len(request.ids)
        desk.prepare(ids, count * len(plan.sums))
        source = request.address[:, None] + plan.inside
        with torch.cuda.stream(way.kernels):
            buffer = None if plan.straight else desk.payloads(count, plan.program.payload_bytes)
            target = plan.program.buffers(ids)[0] if buffer is None else _rows(buffer)
            self._copy("in", target, source, plan.lengths, way.bus)
            desk.ready.record(way.bus)
            way.kernels.wait_event(desk.ready)
            if buffer is None:
                plan.carry(desk, count, None, read=True, write=False)
            else:
                _scatter(plan, desk, ids, buffer)
        desk.done.record(way.kernels)

    def _copy(
        self,
        way: str,
        target: NDArray[np.int64],
        source: NDArray[np.int64],
        size_bytes: NDArray[np.int64],
        stream: Any,
    ) -> None:
        size_bytes = np.broadcast_to(size_bytes, target.shape)
        flat = target.ravel(), source.ravel(), size_bytes.ravel()
        made = self._driver.copy(*flat, stream.cuda_stream, batched=self._batched)
        self._counts[f"device_copies_{way}"] += made
        self._counts[f"device_bytes_{way}"] += int(size_bytes.sum())

    def stats(self) -> dict[str, int]:
        """Counters of copies and bytes by direction, and whether kernels of ours run (1) or torch's (0)."""
        zeros = {f"device_{what}_{way}": 0 for what in ("copies", "bytes") for way in ("out", "in")}
        return {"device_kernels": int(has_kernels()), **zeros, **self._counts}

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False if something still does."""
        ended = [way.lane.close(deadline_s) for way in (self._out, self._in)]  # both, whatever the first says
        return all(ended)


def _gather(plan: Plan, desk: Desk, ids: NDArray[np.int64], buffer: Tensor) -> None:
    """Pages to payloads, and their sums."""
    if plan.program.grains is not None:
        plan.carry(desk, len(ids), buffer, read=True, write=True)
        return
    plan.program.gather(ids, buffer)
    _sums(plan, desk, buffer)


def _scatter(plan: Plan, desk: Desk, ids: NDArray[np.int64], buffer: Tensor) -> None:
    """Payloads to pages, and their sums."""
    if plan.program.grains is not None:
        plan.carry(desk, len(ids), buffer, read=False, write=True)
        return
    _sums(plan, desk, buffer)
    plan.program.scatter(ids, buffer)


def _sums(plan: Plan, desk: Desk, buffer: Tensor) -> None:
    if has_kernels():
        plan.carry(desk, len(buffer), buffer, read=False, write=False)
        return
    shares = plan.sums.reference(buffer)
    torch.from_numpy(desk.found[: shares.numel()]).view(shares.shape).copy_(shares, non_blocking=True)


def _rows(buffer: Tensor) -> NDArray[np.int64]:
    """int64[n, 1], where payloads begin."""
    return (buffer.data_ptr() + buffer.shape[1] * np.arange(len(buffer), dtype=np.int64))[:, None]


def _pinned(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(pinned_memory(count * np.dtype(dtype).itemsize), dtype)


def _event(*, blocking: bool = False) -> Any:
    return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call] # torch's own stub
