"""An event loop of its own time: it runs until everybody waits, and time moves only when it is told to."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Stuck(RuntimeError):
    """Everybody waits, and no timer is set that could wake anybody."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose time begins at 0 and stands still while it runs; it has no files, sockets or threads.

    Everything happens in one thread, in an order that only depends on what is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._due: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0

    def __del__(self, _warn: object = None) -> None:
        """Nothing is left open: there is nothing to close."""

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    # What runs, and when

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call at the next `settle`, after what was asked for before."""
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As `call_soon`: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call once that time has come; of equal times the one that was asked for first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As `call_at`, from now."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they come to the front."""

    # Steps

    def settle(self) -> None:
        """Run everything that can run now."""
        self._ring()
        if not self._due:
            return
        asyncio._set_running_loop(self)  # noqa: SLF001 - meant for loops
        try:
            while self._due:
                handle = self._due.popleft()
                if not handle.cancelled():
                    handle._run()  # noqa: SLF001 - what loops do with handles; exceptions go to the handler
                if not self._due:
                    self._ring()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _ring(self) -> None:
        """Put the timers that are due among what runs."""
        timers = self._timers
        while timers and (timers[0][0] <= self._now_s or timers[0][2].cancelled()):
            _, _, timer = heapq.heappop(timers)
            self._due.append(timer)

    @property
    def next_s(self) -> float:
        """When the next timer is due; infinity if none is set."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf

    def advance(self, to_s: float) -> None:
        """Move time on, stopping at every timer on the way."""
        self.settle()
        while self.next_s <= to_s:
            self._now_s = max(self._now_s, self.next_s)
            self.settle()
        self._now_s = max(self._now_s, to_s)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, moving time on as needed, then end whatever else is left.

        Raises:
            Stuck: it waits for what nobody will bring.
        """
        task = self.create_task(work)
        try:
            self.settle()
            while not task.done():
                if math.isinf(self.next_s):
                    raise Stuck("everybody waits, and nobody is left to wake them")
                self.advance(self.next_s)
            return task.result()
        finally:
            self.end()

    def end(self) -> None:
        """Cancel every task, and let them go."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.settle()
