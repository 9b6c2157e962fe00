"""Lanes: where work that copies bytes or waits for devices is done, away from the caller's thread.

A lane runs the most urgent of what was submitted, equals in order (with one worker), and never loses an
exception: one that escapes a function is kept and reported.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from typing import Final, Generic, Protocol, TypeVar

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import report_uncaught

Job = Callable[[], object]

T = TypeVar("T")

_KEPT_ERRORS: Final = 16


class Urgency(IntEnum):
    """What goes first where work waits for its turn; the smallest does."""

    RESTORE = 0
    HANDOFF = 1
    CACHEABLE = 2
    WRITE_BACK = 3


class Line(Generic[T]):
    """Who waits: the most urgent first, and of those whoever came first; not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: T, urgency: Urgency) -> None:
        """Wait behind all that are as urgent."""
        heapq.heappush(self._heap, (urgency, next(self._numbers), item))

    def first(self) -> T:
        """The next; IndexError if nobody waits."""
        return self._heap[0][2]

    def pop(self) -> T:
        """Take the next out; IndexError if nobody waits."""
        return heapq.heappop(self._heap)[2]

    def more_urgent(self, than: Urgency) -> bool:
        """Whether somebody waits who goes before that."""
        return bool(self._heap) and self._heap[0][0] < than


class Lane(Protocol):
    """Somewhere to run work."""

    def submit(self, fn: Job, urgency: Urgency = Urgency.RESTORE) -> None:
        """Run `fn` soon; UsageFault after `close`."""
        ...

    def more_urgent(self, than: Urgency) -> bool:
        """Whether something waits that goes before that: who could go on should let it."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Finish what was submitted and take no more; False if it did not end within `deadline_s`."""
        ...


class _Lane:
    """What all lanes share: they close once and keep the errors that escape.

    Attributes:
        errors: the latest exceptions that escaped from submitted functions; each was reported as well.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors: deque[BaseException] = deque(maxlen=_KEPT_ERRORS)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise UsageFault(f"lane {self.name!r} is closed; it takes no new work")

    def _run(self, fn: Job) -> None:
        try:
            fn()
        except Exception as error:  # noqa: BLE001 - kept and reported; the lane goes on
            self.errors.append(error)
            report_uncaught(error)


class InlineLane(_Lane):
    """Runs work at once, in the caller's thread."""

    def __init__(self, name: str = "inline") -> None:
        super().__init__(name)

    def submit(self, fn: Job, urgency: Urgency = Urgency.RESTORE) -> None:
        """Run `fn` now."""
        del urgency
        self._check_open()
        self._run(fn)

    def more_urgent(self, than: Urgency) -> bool:
        """Nothing ever waits."""
        del than
        return False

    def close(self, deadline_s: float) -> bool:
        """Take no more work; nothing is ever outstanding."""
        del deadline_s
        self._closed = True
        return True


class ManualLane(_Lane):
    """Runs work when told to: schedules become choices of the caller, a test or a simulator."""

    def __init__(self, name: str = "manual") -> None:
        super().__init__(name)
        self._jobs: Line[Job] = Line()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, fn: Job, urgency: Urgency = Urgency.RESTORE) -> None:
        """Keep `fn` for a later `step`."""
        self._check_open()
        self._jobs.push(fn, urgency)

    def more_urgent(self, than: Urgency) -> bool:
        """See `Lane.more_urgent`."""
        return self._jobs.more_urgent(than)

    def step(self) -> bool:
        """Run the oldest of the most urgent jobs; False if there is none."""
        if not self._jobs:
            return False
        self._run(self._jobs.pop())
        return True

    def drain(self) -> None:
        """Run jobs, also those that they submit, until none is left."""
        while self.step():
            pass

    def close(self, deadline_s: float) -> bool:
        """Run what is left and take no more."""
        del deadline_s
        self.drain()
        self._closed = True
        return True


class ThreadLane(_Lane):
    """Runs work in threads of its own; with one worker, one after the other.

    Args:
        name: of the threads, for debuggers.
        workers: threads; with several, jobs run concurrently.
    """

    def __init__(self, name: str, workers: int = 1) -> None:
        if workers < 1:
            raise UsageFault(f"lane {name!r}: {workers} workers; expected at least 1")
        super().__init__(name)
        self._gate = threading.Lock()
        self._jobs: Line[Job] = Line()
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: one job more; False: end
        self._threads = [
            # daemon: a device that never answers must not keep the process from ending (R5)
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Job, urgency: Urgency = Urgency.RESTORE) -> None:
        """Queue `fn`."""
        with self._gate:
            self._check_open()
            self._jobs.push(fn, urgency)
            self._signals.put(True)

    def more_urgent(self, than: Urgency) -> bool:
        """See `Lane.more_urgent`."""
        with self._gate:
            return self._jobs.more_urgent(than)

    def close(self, deadline_s: float) -> bool:
        """Finish what was submitted, take no more, and end the threads.

        Jobs that are not done by then still run; False says that some are left.
        """
        with self._gate:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._signals.put(False)
        end = time.monotonic() + deadline_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
        return len(others) == len(self._threads) and not any(thread.is_alive() for thread in others)

    def _loop(self) -> None:
        while self._signals.get():
            with self._gate:
                job = self._jobs.pop()
            self._run(job)
            del job
