"""Copies between pages on a device and payloads in host memory, on streams of their own.

Each direction has a stream for kernels and one for the bus, so that gathering one batch overlaps the copy of
another; what follows from what is said with events, and the host waits in a thread of its own.  Records of
long runs are copied straight; others are gathered into, or scattered from, a buffer on the device.  Sums are
computed there: before pages leave, and after they returned (E7).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import ThreadLane
from kvcontract.core.pending import Pending
from kvcontract.memory.copy import Blocks, Program, checked_blocks, refuse_repeated
from kvcontract.memory.driver import driver
from kvcontract.memory.grains import has_kernels, on_device
from kvcontract.memory.lanes import LaneSums

BUFFERS: Final = 3
"""Batches of one direction that are on the device at one time: gathered, copied, about to be."""

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
    """

    def __init__(self, program: Program, segments: tuple[int, ...]) -> None:
        self.program, device = program, program.binding.device
        lengths: tuple[int, ...] = (program.payload_bytes,)
        self.straight = False
        if program.direct and program.grains is not None:
            runs = program.buffers(np.empty(0, np.int64))[1]
            self.straight = LaneSums(runs, segments, device).unit_bytes <= program.grains.word_bytes
            lengths = runs if self.straight else lengths
        self.sums = LaneSums(lengths, segments, device)
        self.lengths = np.array(lengths, np.int64)
        self.inside = np.cumsum(self.lengths) - self.lengths


@dataclass(slots=True)
class _Buffer:
    """Payloads of one batch on the device; `free` is when the next may write it."""

    memory: Tensor
    free: Any = None

    def rows(self, count: int, size_bytes: int) -> NDArray[np.int64]:
        """int64[count, 1], where payloads of so many bytes begin."""
        return (self.memory.data_ptr() + size_bytes * np.arange(count, dtype=np.int64))[:, None]

    def payloads(self, count: int, size_bytes: int) -> Tensor:
        """uint8[count, size_bytes], the same as a tensor."""
        return self.memory[: count * size_bytes].view(count, size_bytes)


class _Way:
    """One direction: its streams, its buffers, and the thread that waits for it."""

    def __init__(self, name: str, device: torch.device, buffer_bytes: int) -> None:
        self.lock = threading.Lock()
        self.kernels: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own stub
        self.bus: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own stub
        self.lane = ThreadLane(f"kvc-{name}-{device.index or 0}")
        self._buffer_bytes, self._device = buffer_bytes, device
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def buffer(self, size_bytes: int) -> _Buffer:
        """The next buffer; the stream that writes it must wait for its `free` first."""
        if len(self._buffers) < BUFFERS:
            with torch.cuda.stream(self.kernels):
                size = max(size_bytes, self._buffer_bytes)
                self._buffers.append(_Buffer(torch.empty(size, dtype=torch.uint8, device=self._device)))
            self.bus.wait_stream(self.kernels)  # what had the memory before
        found = self._buffers[self._turn % BUFFERS]
        self._turn += 1
        if len(found.memory) < size_bytes:
            raise UsageFault(f"a batch of {size_bytes:,} B; the buffers have {len(found.memory):,} B")
        return found


class DeviceMover:
    """The copies of one worker.

    Args:
        device: where its pages lie.
        batch_bytes: payload of the largest batch.
        fault: told of what went wrong on the device.
        batched_copies: hand many copies to the driver in one call.
    """

    def __init__(
        self,
        device: torch.device,
        batch_bytes: int,
        fault: Callable[[Exception], object],
        *,
        batched_copies: bool = True,
    ) -> None:
        self._device, self._fault, self._batched = device, fault, batched_copies
        self._driver = driver()
        self._out, self._in = _Way("out", device, batch_bytes), _Way("in", device, batch_bytes)
        self._counts: Counter[str] = Counter()

    def after(self, event: StreamEvent) -> None:
        """Let everything that leaves from now on wait for an event, on the device (C2)."""
        with self._out.lock:
            event.wait(self._out.kernels)
            event.wait(self._out.bus)

    def out(self, plan: Plan, blocks: Blocks, address: NDArray[np.int64]) -> Pending[Sums | None]:
        """Copy pages to host memory.

        Args:
            plan: of their program.
            blocks: int[n], or [n, pages], which must not change until the copy has landed (C1).
            address: int64[n], where each payload is to lie; pinned, or the copy is slow.

        Returns:
            uint32[n, segments], once all has landed; None if the device failed.

        Raises:
            UsageFault: a block id is out of range.
        """
        way = self._out
        ids = checked_blocks(plan.program, blocks)
        with way.lock, torch.cuda.device(self._device):
            try:
                return self._send(way, plan, ids, address)
            except Exception:
                _drain(way)  # what was queued before must not outlive the operation (R3)
                raise

    def _send(
        self, way: _Way, plan: Plan, ids: NDArray[np.int64], address: NDArray[np.int64]
    ) -> Pending[Any]:
        ready, buffer, source = _event(), None, self._pages(plan, ids)
        with torch.cuda.stream(way.kernels):
            if source is None:
                buffer = way.buffer(len(ids) * plan.program.payload_bytes)
                if buffer.free is not None:
                    way.kernels.wait_event(buffer.free)
                source = buffer.rows(len(ids), plan.program.payload_bytes)
                given = self._given(ids, source)
                _gather(plan, ids, given, buffer)
                sums = _sums(plan, given[1][:, None], buffer, len(ids))
            else:
                sums = plan.sums.sums(on_device(source, self._device))
            ready.record(way.kernels)
        with torch.cuda.stream(way.bus):
            if buffer is not None:
                way.bus.wait_event(ready)
            self._copy("out", address[:, None] + plan.inside, source, plan.lengths, way.bus)
            way.bus.wait_event(ready)
            host = _to_host(sums)  # behind the payloads: the next batch need not wait for it
        return self._landing(way, way.bus, buffer, host, sums)

    def into(self, plan: Plan, blocks: Blocks, address: NDArray[np.int64]) -> Pending[Sums | None]:
        """Copy payloads in host memory to pages, and sum them as they lie on the device.

        The pages hold what arrived, whatever its sums are.

        Args:
            plan: of their program.
            blocks: int[n], or [n, pages], none twice, that nothing on the device reads or writes.
            address: int64[n], where each payload lies.

        Returns:
            uint32[n, segments], once the pages are written; None if the device failed.

        Raises:
            UsageFault: a block id is out of range or repeated.
        """
        way = self._in
        ids = checked_blocks(plan.program, blocks, holes=True)
        refuse_repeated(plan.program, ids)
        with way.lock, torch.cuda.device(self._device):
            try:
                return self._receive(way, plan, ids, address)
            except Exception:
                _drain(way)
                raise

    def _receive(
        self, way: _Way, plan: Plan, ids: NDArray[np.int64], address: NDArray[np.int64]
    ) -> Pending[Any]:
        arrived, buffer, target = _event(), None, self._pages(plan, ids)
        with torch.cuda.stream(way.kernels):
            if target is None:
                buffer = way.buffer(len(ids) * plan.program.payload_bytes)
                target = buffer.rows(len(ids), plan.program.payload_bytes)
                given = self._given(ids, target)
            else:
                given = (on_device(target, self._device),)
        with torch.cuda.stream(way.bus):
            if buffer is not None and buffer.free is not None:
                way.bus.wait_event(buffer.free)
            self._copy("in", target, address[:, None] + plan.inside, plan.lengths, way.bus)
            arrived.record(way.bus)
        with torch.cuda.stream(way.kernels):
            way.kernels.wait_event(arrived)
            if buffer is None:
                sums = plan.sums.sums(given[0])
            else:
                sums = _sums(plan, given[1][:, None], buffer, len(ids))
                _scatter(plan, ids, given, buffer)
            host = _to_host(sums)
        return self._landing(way, way.kernels, buffer, host, sums)

    def _given(self, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Blocks, flat, and where payloads lie, for a kernel, in one copy."""
        flat = on_device(np.concatenate([ids, rows], axis=None), self._device)
        return flat[: ids.size], flat[ids.size :]

    def _pages(self, plan: Plan, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Where the pieces of pages lie, int64[n, k], if they are copied straight."""
        return plan.program.buffers(ids)[0] if plan.straight else None

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

    def _landing(
        self, way: _Way, stream: Any, buffer: _Buffer | None, host: Tensor, keep: object
    ) -> Pending[Any]:
        done = _event(blocking=True)
        done.record(stream)
        if buffer is not None:
            buffer.free = done
        landed: Pending[Sums | None] = Pending()

        def wait() -> None:
            found: Sums | None = None
            try:
                done.synchronize()
                found = host.numpy().view(np.uint32)
            except Exception as error:  # noqa: BLE001 - kept by the owner; the copy has failed (R4)
                self._fault(error)
            del keep_[:]
            landed.settle(found)

        keep_ = [keep, buffer]
        way.lane.submit(wait)
        return landed

    def stats(self) -> dict[str, int]:
        """Counters of copies and bytes by direction, and whether kernels of ours run (1) or torch's (0)."""
        zeros = {f"device_{what}_{way}": 0 for what in ("copies", "bytes") for way in ("out", "in")}
        return {"device_kernels": int(has_kernels()), **zeros, **self._counts}

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False if something still does."""
        ended = [way.lane.close(deadline_s) for way in (self._out, self._in)]  # both, whatever the first says
        return all(ended)


def _to_host(sums: Tensor) -> Tensor:
    return torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)


def _gather(plan: Plan, ids: NDArray[np.int64], given: tuple[Tensor, ...], buffer: _Buffer) -> None:
    if plan.program.grains is not None:
        plan.program.grains.move(given[0], given[1], to_wire=True)
    else:
        plan.program.gather(ids, buffer.payloads(len(ids), plan.program.payload_bytes))


def _scatter(plan: Plan, ids: NDArray[np.int64], given: tuple[Tensor, ...], buffer: _Buffer) -> None:
    if plan.program.grains is not None:
        plan.program.grains.move(given[0], given[1], to_wire=False)
    else:
        plan.program.scatter(ids, buffer.payloads(len(ids), plan.program.payload_bytes))


def _sums(plan: Plan, address: Tensor, buffer: _Buffer, count: int) -> Tensor:
    if has_kernels():
        return plan.sums.sums(address)
    return plan.sums.reference(buffer.payloads(count, plan.program.payload_bytes))


def _event(*, blocking: bool = False) -> Any:
    return torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call] # torch's own stub


def _drain(way: _Way) -> None:
    way.kernels.synchronize()
    way.bus.synchronize()
