"""Staging: payloads on their way between pages and tiers, and the budget that bounds their memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcontract.contract.errors import InternalFault
from kvcontract.memory.copy import Blocks, Program


class Staged:
    """Payloads of some pages in one contiguous buffer of host memory.

    Args:
        program: between pages and payloads.
        blocks: int[n], where the pages lie.

    Attributes:
        address: int64[n], where each payload begins.
    """

    def __init__(self, program: Program, blocks: Blocks) -> None:
        self._program, self._blocks = program, np.asarray(blocks)
        size = program.payload_bytes
        self._memory = torch.empty(len(blocks), size, dtype=torch.uint8)
        self.address: NDArray[np.int64] = self._memory.data_ptr() + size * np.arange(
            len(blocks), dtype=np.int64
        )

    def gather(self) -> None:
        """Pages to payloads."""
        self._program.gather(self._blocks, self._memory)

    def scatter(self, rows: NDArray[np.integer[Any]]) -> None:
        """Payloads to pages, for some rows (int[k])."""
        whole = len(rows) == len(self._blocks)
        chosen = self._memory if whole else self._memory[torch.from_numpy(np.asarray(rows, np.int64))]
        self._program.scatter(self._blocks[rows], chosen)


class StagingBudget:
    """Counts bytes; the memory itself is allocated by whoever was granted it.

    Args:
        limit_bytes: granted at one time; a single request above it is granted when nothing else is.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes that are granted now."""
        return self._used_bytes

    def take(self, size_bytes: int, granted: Callable[[], object]) -> bool:
        """Ask for bytes.

        Returns:
            True if they are granted now; else `granted` is called once they are, in the order of asking, by
            the thread that gives some back.
        """
        with self._lock:
            if not self._waiting and self._fits(size_bytes):
                self._used_bytes += size_bytes
                return True
            self._waiting.append((size_bytes, granted))
            return False

    def give_back(self, size_bytes: int) -> None:
        """Return what was granted."""
        ready = []
        with self._lock:
            if size_bytes > self._used_bytes:
                raise InternalFault(
                    f"{size_bytes} B of staging given back, {self._used_bytes} B were granted"
                )
            self._used_bytes -= size_bytes
            while self._waiting and self._fits(self._waiting[0][0]):
                size, granted = self._waiting.popleft()
                self._used_bytes += size
                ready.append(granted)
        for granted in ready:
            granted()

    def _fits(self, size_bytes: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + size_bytes <= self.limit_bytes
