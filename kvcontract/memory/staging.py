"""Staging: payloads on their way between pages and tiers, and the memory for them, which is bounded."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault
from kvcontract.contract.layout import round_up
from kvcontract.core.lane import Line, Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.copy import Blocks, Program
from kvcontract.memory.host import aligned_memory
from kvcontract.memory.slab import PAGE_BYTES, Allocate, Holes


class Room:
    """Memory of one batch, until it is given back.

    Attributes:
        memory: uint8[bytes], aligned to PAGE_BYTES.
    """

    def __init__(self, staging: Staging, memory: NDArray[np.uint8], start: int | None) -> None:
        self.memory = memory
        self._staging: Staging | None = staging
        self._start = start

    def give_back(self) -> None:
        """Let others have it; doing so again does nothing."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.give_back(len(self.memory), self._start)


class Staging:
    """Memory for batches, given out by urgency, then in the order of asking.

    Args:
        limit_bytes: given out at one time; a single request above it is served when nothing else is.
        allocate: where memory comes from that is taken whole, once, at first use: it is slow to get, being
            pinned.  None: each batch gets its own, of the process.
    """

    def __init__(self, limit_bytes: int, allocate: Allocate | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._line: Line[tuple[int, Pending[Room | Exception]]] = Line()
        self._allocate = allocate
        self._whole: NDArray[np.uint8] | None = None
        self._holes = Holes(round_up(limit_bytes, PAGE_BYTES))

    @property
    def used_bytes(self) -> int:
        """Bytes that are given out now."""
        return self._used_bytes

    def take(self, size_bytes: int, urgency: Urgency) -> Pending[Room | Exception]:
        """Ask for memory, or why there is none; settled at once, or by the thread that gives some back."""
        asked: Pending[Room | Exception] = Pending()
        with self._lock:
            self._line.push((size_bytes, asked), urgency)
        self._serve()
        return asked

    def give_back(self, size_bytes: int, start: int | None) -> None:
        """Take back what a room held; `Room.give_back` calls it."""
        with self._lock:
            if size_bytes > self._used_bytes:
                raise InternalFault(
                    f"{size_bytes} B of staging given back, {self._used_bytes} B were given out"
                )
            self._used_bytes -= size_bytes
            if start is not None:
                self._holes.give(start)
        self._serve()

    def _serve(self) -> None:
        """Give to whoever is next, for as long as there is enough; nobody overtakes."""
        while True:
            with self._lock:
                room = self._next()
                if room is None:
                    return
                _, asked = self._line.pop()
            asked.settle(room)

    def _next(self) -> Room | Exception | None:
        try:
            return self._room(self._line.first()[0]) if self._line else None
        except Exception as error:  # noqa: BLE001 - for who asked: it is an outcome like others
            return error

    def _room(self, size_bytes: int) -> Room | None:
        alone = self._used_bytes == 0
        if not alone and self._used_bytes + size_bytes > self.limit_bytes:
            return None
        start = None
        if self._allocate is None:
            memory = aligned_memory(size_bytes, PAGE_BYTES)
        elif size_bytes > self.limit_bytes:
            memory = _aligned(self._allocate(size_bytes + PAGE_BYTES), size_bytes)
        else:
            if self._whole is None:
                whole = self._allocate(self.limit_bytes + 2 * PAGE_BYTES)
                self._whole = _aligned(whole, self.limit_bytes + PAGE_BYTES)
            start = self._holes.take(size_bytes)
            if start is None:
                return None
            memory = self._whole[start : start + size_bytes]
        self._used_bytes += size_bytes
        return Room(self, memory, start)


class Staged:
    """Payloads of some pages side by side in host memory.

    Args:
        program: between pages and payloads.
        blocks: int[n, ...], where the pages lie.
        memory: uint8[n * payload_bytes] or more.

    Attributes:
        address: int64[n], where each payload begins.
    """

    def __init__(self, program: Program, blocks: Blocks, memory: NDArray[np.uint8]) -> None:
        self._program, self._blocks = program, np.asarray(blocks)
        count, size = len(blocks), program.payload_bytes
        self._memory = torch.from_numpy(memory[: count * size]).view(count, size)
        self.address: NDArray[np.int64] = memory.ctypes.data + size * np.arange(count, dtype=np.int64)

    def gather(self) -> None:
        """Pages to payloads."""
        self._program.gather(self._blocks, self._memory)

    def scatter(self, rows: NDArray[np.integer[Any]]) -> None:
        """Payloads to pages, for some rows (int[k])."""
        whole = len(rows) == len(self._blocks)
        chosen = self._memory if whole else self._memory[torch.from_numpy(np.asarray(rows, np.int64))]
        self._program.scatter(self._blocks[rows], chosen)


def _aligned(buffer: Any, size_bytes: int) -> NDArray[np.uint8]:
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE_BYTES
    return np.frombuffer(buffer, np.uint8, size_bytes, skip)
