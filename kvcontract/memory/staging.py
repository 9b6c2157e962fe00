"""A budget for staging memory: operations that need more than is left wait in line for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvcontract.contract.errors import InternalFault


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
