"""An event loop whose time jumps to the next timer when nothing is left to do: no test sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the loop's time on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now."""
        found = super().select(0)
        if not found:
            if timeout is None:
                raise AssertionError("everybody waits, and nobody is left to wake them")
            self.now_s += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop of its own time, which begins at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now_s

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, then end whatever else is left."""
        try:
            return self.run_until_complete(work)
        finally:
            self.run_until_complete(_end_others())


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
