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
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Line, ThreadLane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.copy import Blocks, Program, checked_blocks, refuse_repeated
from kvcontract.memory.driver import driver
from kvcontract.memory.grains import has_kernels
from kvcontract.memory.pinned import pinned_memory
from kvcontract.memory.plan import Desk, Plan
from kvcontract.memory.slab import Allocate
from kvcontract.memory.stream import StreamEvent

ON_DEVICE: Final = 3
"""Batches of one direction that are on the device at one time: one is copied, one is gathered or summed, and
one waits, which is what there is to do while the host learns that one has landed."""

Sums = NDArray[np.uint32]


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
        self._there = torch.cuda.device(device)  # entered under the lock only: making one costs more
        self._lock = threading.Lock()
        self._line: Line[_Request] = Line()
        with torch.cuda.device(device):
            self._free = [Desk(device, batch_bytes) for _ in range(ON_DEVICE)]

    def prepare(self, plan: Plan) -> None:
        """Take the memory that batches will need: later it would wait for all that the device does."""
        with self._lock, torch.cuda.stream(self.kernels):
            for desk in self._free:
                desk.ids()
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
        with self._lock, self._there:
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
        remote: yes; nobody else reaches the pages.
    """

    allocate: Allocate | None = staticmethod(pinned_memory)
    remote = True

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
        ids = checked_blocks(plan.program, blocks)
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
            blocks: int[n], or [n, pages], none twice, that nothing on the device reads or writes but copies
                from block to block that are queued already, which are waited for.
            address: int64[n], where each payload lies.
            urgency: which of those that wait goes first.

        Returns:
            uint32[n, segments], once the pages are written; None if the device failed.

        Raises:
            UsageFault: a block id is out of range or repeated, or the batch is too large.
        """
        ids = checked_blocks(plan.program, blocks, holes=True)
        refuse_repeated(plan.program, ids)
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
        _prepare(plan, desk, ids, way.kernels)
        target = plan.host_pieces(request.address)
        if request.after is not None:
            request.after.wait(way.kernels)
        if plan.straight:
            if request.after is not None:
                request.after.wait(way.bus)
            self._copy("out", plan, target, plan.program.buffers(ids)[0].ravel(), way.bus)
            plan.carry(desk, count, None, way.kernels, read=True, write=False)
            desk.ready.record(way.kernels)
            way.bus.wait_event(desk.ready)
        else:
            buffer = desk.payloads(count, plan.program.payload_bytes)
            _gather(plan, desk, ids, buffer, way.kernels)
            desk.ready.record(way.kernels)
            way.bus.wait_event(desk.ready)
            self._copy("out", plan, target, _rows(buffer), way.bus)
        desk.done.record(way.bus)

    def _receive(self, way: _Way, desk: Desk, request: _Request) -> None:
        plan, ids, count = request.plan, request.ids, len(request.ids)
        _prepare(plan, desk, ids, way.kernels)
        source = plan.host_pieces(request.address)
        buffer = None if plan.straight else desk.payloads(count, plan.program.payload_bytes)
        target = plan.program.buffers(ids)[0].ravel() if buffer is None else _rows(buffer)
        for event in plan.program.binding.moves:  # of whoever had the blocks before
            event.wait(way.bus if buffer is None else way.kernels)
        self._copy("in", plan, target, source, way.bus)
        desk.ready.record(way.bus)
        way.kernels.wait_event(desk.ready)
        if buffer is None:
            plan.carry(desk, count, None, way.kernels, read=True, write=False)
        else:
            _scatter(plan, desk, ids, buffer, way.kernels)
        desk.done.record(way.kernels)

    def _copy(
        self, way: str, plan: Plan, target: NDArray[np.int64], source: NDArray[np.int64], stream: Any
    ) -> None:
        sizes = plan.sizes(len(target) // len(plan.lengths))
        made = self._driver.copy(target, source, sizes, stream.cuda_stream, batched=self._batched)
        self._counts[f"device_copies_{way}"] += made
        self._counts[f"device_bytes_{way}"] += len(target) // len(plan.lengths) * plan.program.payload_bytes

    def stats(self) -> dict[str, int]:
        """Counters of copies and bytes by direction, and whether kernels of ours run (1) or torch's (0)."""
        zeros = {f"device_{what}_{way}": 0 for what in ("copies", "bytes") for way in ("out", "in")}
        return {"device_kernels": int(has_kernels()), **zeros, **self._counts}

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False if something still does."""
        ended = [way.lane.close(deadline_s) for way in (self._out, self._in)]  # both, whatever the first says
        return all(ended)


def _prepare(plan: Plan, desk: Desk, ids: NDArray[np.int64], stream: Any) -> None:
    """Say which blocks, before anything has to be waited for."""
    desk.prepare(ids, len(ids) * len(plan.sums))
    if plan.program.grains is not None:
        plan.tell(desk, len(ids), stream)


def _gather(plan: Plan, desk: Desk, ids: NDArray[np.int64], buffer: Tensor, stream: Any) -> None:
    """Pages to payloads, and their sums."""
    if plan.program.grains is not None:
        plan.carry(desk, len(ids), buffer, stream, read=True, write=True)
        return
    with torch.cuda.stream(stream):
        plan.program.gather(ids, buffer)
        _sums(plan, desk, buffer, stream)


def _scatter(plan: Plan, desk: Desk, ids: NDArray[np.int64], buffer: Tensor, stream: Any) -> None:
    """Payloads to pages, and their sums."""
    if plan.program.grains is not None:
        plan.carry(desk, len(ids), buffer, stream, read=False, write=True)
        return
    with torch.cuda.stream(stream):
        _sums(plan, desk, buffer, stream)
        plan.program.scatter(ids, buffer)


def _sums(plan: Plan, desk: Desk, buffer: Tensor, stream: Any) -> None:
    if has_kernels():
        plan.carry(desk, len(buffer), buffer, stream, read=False, write=False)
        return
    shares = plan.sums.reference(buffer)
    torch.from_numpy(desk.found[: shares.numel()]).view(shares.shape).copy_(shares, non_blocking=True)


def _rows(buffer: Tensor) -> NDArray[np.int64]:
    """int64[n], where payloads begin."""
    rows: NDArray[np.int64] = buffer.data_ptr() + buffer.shape[1] * np.arange(len(buffer), dtype=np.int64)
    return rows
