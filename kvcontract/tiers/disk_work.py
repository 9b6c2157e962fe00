"""Operations of the disk tier: records done one by one in lanes, each operation with one terminal (R8)."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal

import numpy as np

from kvcontract.core.lane import Job, Lane, ThreadLane
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Buffers, Code, Codes, Op

JOB_BYTES: Final = 2**20
"""Records of an operation are done together up to this: small ones do not pay for a turn in the lane each."""

_KEPT_FAULTS: Final = 16

Verb = Literal["load", "save", "commit"]
One = Callable[[int], Code]
"""Does the record of a row."""


class _Operation:
    """Records of one operation, done in jobs; the last of them ends it, and the hold on its memory."""

    def __init__(self, verb: Verb, codes: Codes, jobs: int, buffers: Buffers | None = None) -> None:
        self.op: Op = Pending()
        self.verb, self.codes, self.buffers = verb, codes, buffers
        self._left = jobs
        self._lock = threading.Lock()

    def ended(self, jobs: int) -> bool:
        """So many jobs more have ended; True for the last."""
        with self._lock:
            self._left -= jobs
            return self._left == 0


class Work:
    """Runs operations and counts how they end; thread-safe.

    Args:
        name: of the tier.
        lane: for all of it; None makes one for loads, one for saves, and one that commits; `close` ends them.
        workers: of the own lanes for loads and saves, each.

    Attributes:
        faults: the latest unexpected exceptions.
        closed: nothing new is taken.
    """

    def __init__(self, name: str, lane: Lane | None, workers: int) -> None:
        self.faults: deque[Exception] = deque(maxlen=_KEPT_FAULTS)
        self.closed = False
        threads: dict[Verb, int] = {"load": workers, "save": workers, "commit": 1}
        self._own: dict[Verb, Lane] = {}
        if lane is None:
            self._own = {verb: ThreadLane(f"kvc-{name}-{verb}", count) for verb, count in threads.items()}
        self._lanes = self._own if lane is None else dict.fromkeys(threads, lane)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._running: dict[Op, Verb] = {}

    def start(
        self,
        verb: Verb,
        one: One,
        buffers: Buffers,
        *,
        undo: Callable[[], object],
        before: Callable[[], object],
        after: Callable[[], object],
    ) -> Op:
        """Do each record of an operation as if it were alone (H1).

        Args:
            verb: whose lane.
            one: does a row's record; what it raises is kept, and the record FAILED.
            buffers: of the records.
            undo: called when no record is being done any more.
            before: called then, before the operation settles.
            after: called when it has.
        """
        jobs = _jobs(buffers)
        running = _Operation(verb, np.full(len(buffers), Code.REFUSED, np.uint8), len(jobs), buffers)

        def end(count: int) -> None:
            if running.ended(count):
                undo()
                self._finish(running, before)
                after()

        def run(rows: range) -> None:
            for row in rows:
                running.codes[row] = self._each(one, row)
            end(1)

        with self._lock:
            if not self.closed:
                self._running[running.op] = verb
        if self.closed or not jobs:
            end(len(jobs))
            return running.op
        for done, rows in enumerate(jobs):
            if not self.submit(verb, partial(run, rows)):
                end(len(jobs) - done)
                break
        return running.op

    def submit(self, verb: Verb, job: Job) -> bool:
        """Run something in a lane; False if it takes no more work."""
        try:
            self._lanes[verb].submit(job)
        except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
            self.fault(error)
            return False
        return True

    def ended(self, verb: Verb, count: int, code: Code) -> Op:
        """An operation that ends before it begins."""
        ended = _Operation(verb, np.full(count, code, np.uint8), 0)
        self._finish(ended, lambda: None)
        return ended.op

    def running(self, verb: Verb | None = None) -> list[Op]:
        """Operations that have not settled, of one verb or of both."""
        with self._lock:
            return [op for op, its in self._running.items() if verb in (None, its)]

    def saving(self) -> bool:
        """Whether a save has not settled."""
        with self._lock:
            return "save" in self._running.values()

    def shut(self) -> list[Op]:
        """Take nothing new; returns what still runs."""
        with self._lock:
            self.closed = True
            return list(self._running)

    def close(self, deadline_s: float) -> bool:
        """End the own lanes; False if one did not end in time."""
        ended = [lane.close(max(0.0, deadline_s)) for lane in self._own.values()]
        return all(ended)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += by

    def fault(self, error: Exception) -> None:
        """Keep an unexpected exception."""
        with self._lock:
            self.faults.append(error)
            self._counts["faults"] += 1

    def figures(self) -> dict[str, int]:
        """Gauges and counters."""
        with self._lock:
            counters = dict.fromkeys(("hits", "misses", "save_ok", "load_ok", "faults"), 0)
            return {"operations": len(self._running), **counters, **self._counts}

    def _each(self, one: One, row: int) -> Code:
        """One record of a batch: what befalls it befalls no other."""
        try:
            return one(row)
        except Exception as error:  # noqa: BLE001 - kept; the record's code says it
            self.fault(error)
            return Code.FAILED

    def _finish(self, running: _Operation, before: Callable[[], object]) -> None:
        with self._lock:
            self._running.pop(running.op, None)
            for code, count in enumerate(np.bincount(running.codes).tolist()):
                if count:
                    self._counts[f"{running.verb}_{Code(code).name.lower()}"] += count
        before()
        running.op.settle(running.codes)


def _jobs(buffers: Buffers) -> Sequence[range]:
    """Rows that are done in one turn: records one after the other up to JOB_BYTES, at least one."""
    jobs, first, size = [], 0, 0
    for row, length in enumerate(buffers.record_bytes().tolist()):
        if row > first and size + length > JOB_BYTES:
            jobs.append(range(first, row))
            first, size = row, 0
        size += length
    if first < len(buffers):
        jobs.append(range(first, len(buffers)))
    return jobs
