"""The engine's own event loop: where resolves and control operations wait, off the scheduler's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvcontract.contract.errors import UsageFault

T = TypeVar("T")


class EngineLoop:
    """An event loop on a thread of its own, which begins with the first use; verbs are for other threads.

    Its clock is `time.monotonic`.  What is handed over runs in the order of the calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def soon(self, function: Callable[[], object]) -> None:
        """Call on the loop; nothing happens once it has ended."""
        with self._lock:
            if not self._closed:
                self._running().call_soon_threadsafe(function)

    def at(self, when: float, function: Callable[[], object]) -> None:
        """Call on the loop at a point of its clock; nothing happens once it has ended."""
        self.soon(lambda: asyncio.get_running_loop().call_at(when, function))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, and block until it has ended.

        Raises:
            UsageFault: called on the loop, which cannot wait for itself, or after its end.
        """
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                work.close()
                raise UsageFault("the engine's loop cannot wait for itself, nor run after its end")
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        return future.result()

    def close(self) -> None:
        """End the thread.  Idempotent."""
        with self._lock:
            self._closed = True
            loop, self._loop, thread = self._loop, None, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop, begun by now; under the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-engine", daemon=True)
            self._thread.start()
        return self._loop
