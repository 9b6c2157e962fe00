"""An event loop of its own time: it runs until everybody waits, and time moves only when it is told to."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Stuck(RuntimeError):
    """Everybody waits, and no timer is set that could wake anybody."""


class _NoWaiting(selectors.SelectSelector):
    """Never waits: says how long the loop would have slept, and ends its round instead."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: Callable[[float | None], object] = lambda _: None

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now."""
        if timeout == 0:  # callbacks are due: nothing outside this thread ever wakes the loop
            return []
        self.idle(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0 and stands still while it runs.

    Everything happens in one thread, in an order that only depends on what is called.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sleep_s: float | None = None
        self._due = True
        chooser = _NoWaiting()
        super().__init__(chooser)
        chooser.idle = self._fell_idle
        self._running = False

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As ever; there is something to run now."""
        self._due = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As ever; when the next timer is due may have changed."""
        self._due = True
        return super().call_at(when, callback, *args, context=context)

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As `call_soon`: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def _fell_idle(self, timeout: float | None) -> None:
        self._sleep_s = timeout
        self.stop()

    # Steps

    def settle(self) -> None:
        """Run everything that can run now."""
        if self._due:
            self.run_forever()
            self._due = False

    @property
    def next_s(self) -> float:
        """When the next timer is due, as of the last `settle`; infinity if none is set."""
        return math.inf if self._sleep_s is None else self._now_s + self._sleep_s

    def advance(self, to_s: float) -> None:
        """Move time on, stopping at every timer on the way."""
        self.settle()
        while self.next_s <= to_s:
            self._move(self.next_s)
        self._move(to_s)

    def _move(self, to_s: float) -> None:
        self._now_s = max(self._now_s, to_s)
        self._due = True
        self.settle()

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
