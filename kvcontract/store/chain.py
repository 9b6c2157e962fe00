"""One copy operation: a chain of batches, so that the memory it moves through is bounded.

What befalls a batch is a generator, which yields what it waits for and returns codes.  No step waits for a
tier, a device or memory: it leaves itself behind as a callback, and goes on in the lane.  Between batches
whatever is more urgent goes first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import Lane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.store.landing import Shard
from kvcontract.tiers.base import Clock, Code, Codes, Op

Steps = Generator[Pending[Any], Any, Codes]
"""Yields what is waited for, is sent its value, and returns a code for each record."""


class Host(Protocol):
    """What a chain needs of the worker it runs for."""

    lane: Lane
    clock: Clock
    depth: int

    def fault(self, error: Exception) -> None:
        """Keep an unexpected exception."""
        ...

    def settle(self, verb: str, op: Op, codes: Codes) -> None:
        """Give an operation its terminal."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a chain is to do.

    Attributes:
        verb: names counters.
        shards: the columns of its work.
        pages: the rows of its work.
        deadline: no batch is begun after it (A9).
        urgency: what its batches go before, and what before them.
        steps: what befalls a batch, given its shard, pages and column.
        after: called first, in the lane.
    """

    verb: str
    shards: list[Shard]
    pages: int
    deadline: float
    urgency: Urgency
    steps: Callable[[Shard, slice, int], Steps]
    after: Callable[[], object] = lambda: None


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch that has begun."""

    column: int
    pages: slice
    steps: Steps


class Chain:
    """Runs a job; `op` settles with u8[n], the worst code of each page over its shards (E3).

    One thread at a time works on it, whoever comes first; what has arrived meanwhile is left in `_arrived`.
    """

    def __init__(self, host: Host, job: Job) -> None:
        self.op: Op = Pending()
        self._host, self._job = host, job
        # What nobody decides otherwise has failed; no column at all means that others do the work.
        self._codes = np.full((job.pages, len(job.shards)), Code.FAILED, np.uint8)
        self._batches = deque(
            (column, pages) for column, shard in enumerate(job.shards) for pages in shard.batches(job.pages)
        )
        self._flying: set[_Flight] = set()
        self._lock = threading.Lock()
        self._working = True
        self._arrived: deque[tuple[_Flight, Any]] = deque()

    def start(self) -> None:
        """Begin, in the lane."""
        self._submit(self._first)

    def _submit(self, step: Callable[[], None]) -> None:
        """Do some of the work in the lane; whoever calls this may not work on it any more."""
        try:
            self._host.lane.submit(step, self._job.urgency)
        except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
            self._host.fault(error)
            self._batches.clear()
            self._go_on(closed=True)

    def _first(self) -> None:
        try:
            self._job.after()
        except Exception as error:  # noqa: BLE001 - kept; pages that were not written are not saved (C2)
            self._host.fault(error)
            self._batches.clear()
        self._go_on()

    def _resume(self, flight: _Flight, value: object) -> None:
        """What a batch waited for is there; called by whoever brought it."""
        with self._lock:
            self._arrived.append((flight, value))
            idle, self._working = not self._working, True
        if idle:
            self._submit(self._go_on)

    def _go_on(self, *, closed: bool = False) -> None:
        """Work until everything has to be waited for, which resumes, or nothing is left."""
        lane, urgency = self._host.lane, self._job.urgency
        while True:
            while self._arrived:
                flight, value = self._arrived.popleft()
                if closed:
                    flight.steps.close()
                    self._flying.discard(flight)
                else:
                    self._advance(flight, value)
            if self._batches and len(self._flying) < self._host.depth:
                if lane.more_urgent(urgency):
                    self._submit(self._go_on)  # another thread may be here already: touch nothing
                    return
                self._begin()
            elif not self._flying:
                break
            else:
                with self._lock:
                    if not self._arrived:
                        self._working = False
                        return
        worst = self._codes.max(axis=1, initial=Code.OK).astype(np.uint8)
        self._host.settle(self._job.verb, self.op, worst)

    def _begin(self) -> None:
        if self._host.clock() > self._job.deadline:
            for column, pages in self._batches:
                self._codes[pages, column] = Code.EXPIRED
            self._batches.clear()
            return
        column, pages = self._batches.popleft()
        flight = _Flight(column, pages, self._job.steps(self._job.shards[column], pages, column))
        self._flying.add(flight)
        self._advance(flight, None)

    def _advance(self, flight: _Flight, value: Any) -> None:
        """Let a batch go on until it has to wait; what befalls it befalls no other (H1)."""
        codes: Codes | Code
        try:
            while True:
                waited = flight.steps.send(value)
                if not waited.done:
                    waited.on_done(lambda found: self._resume(flight, found))
                    return
                value = waited.value
        except StopIteration as end:
            codes = end.value
        except Exception as error:  # noqa: BLE001 - kept; the batch's codes say it
            self._host.fault(error)
            codes = Code.REFUSED if isinstance(error, UsageFault) else Code.FAILED
        self._flying.discard(flight)
        self._codes[flight.pages, flight.column] = codes
