"""Operations of a tier whose every step may wait for a device: run in a lane, settled once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Code, Codes, Op

T = TypeVar("T")

_KEPT_FAULTS: Final = 16
_CLEAN_UP: Final = "clean-up"
_LEAST_ROWS: Final = 16  # worth a job of their own


class Operations:
    """What runs, what came of what ran, and what went wrong.

    Args:
        lane: where work runs.
        ways: into how many jobs one operation is cut at most, so that waits overlap.

    Attributes:
        faults: the latest unexpected exceptions.
    """

    def __init__(self, lane: Lane, ways: int) -> None:
        self.faults: deque[Exception] = deque(maxlen=_KEPT_FAULTS)
        self._counts: Counter[str] = Counter()
        self._lane, self._ways = lane, ways
        self._lock = threading.Lock()
        self._running: dict[Pending[Any], str] = {}
        self._closed = False

    def close(self) -> list[Pending[Any]]:
        """Take nothing new; returns what still runs."""
        with self._lock:
            self._closed = True
            return list(self._running)

    def running(self, verb: str) -> list[Pending[Any]]:
        """What has not settled yet, of one kind."""
        with self._lock:
            return [pending for pending, of in self._running.items() if of == verb]

    @property
    def open(self) -> int:
        """Operations of callers that have not settled yet."""
        with self._lock:
            return sum(verb != _CLEAN_UP for verb in self._running.values())

    def count(self, name: str, by: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += by

    def counted(self) -> dict[str, int]:
        """What was counted, codes by verb among it."""
        with self._lock:
            return dict(self._counts)

    def fault(self, error: Exception) -> None:
        """Keep and count an exception that nobody else will hear of."""
        with self._lock:
            self.faults.append(error)
            self._counts["faults"] += 1

    def start(
        self, verb: str, pending: Pending[Any], work: Callable[[], object], failed: Callable[[], object]
    ) -> bool:
        """Run the beginning of an operation in the lane; if it raises, `failed` ends the operation.

        Returns:
            False if nothing runs, because the tier or its lane takes nothing new: the caller settles.
        """
        with self._lock:
            if self._closed:
                return False
            self._running[pending] = verb

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - kept; the operation still settles (R8)
                self.fault(error)
                failed()

        if self.submit(guarded):
            return True
        with self._lock:
            self._running.pop(pending, None)
        return False

    def background(self, work: Callable[[], object]) -> None:
        """Clean up in the lane: nobody waits for it but `close`; what it cannot do, time does (R5)."""
        done: Pending[None] = Pending()

        def begin() -> None:
            work()
            self.end(done, None)

        self.start(_CLEAN_UP, done, begin, lambda: self.end(done, None))

    def submit(self, work: Callable[[], object]) -> bool:
        """Run something in the lane; False if that takes nothing new."""
        try:
            self._lane.submit(work)
        except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
            self.fault(error)
            return False
        return True

    def spread(self, rows: int, work: Callable[[range], object], then: Callable[[], object]) -> None:
        """Work on rows in several jobs of the lane, this one among them; the last to end goes on with `then`.

        Args:
            rows: how many there are.
            work: of some of them; must not raise.
            then: must not raise.
        """
        parts = max(1, min(self._ways, rows // _LEAST_ROWS))
        cuts = [rows * number // parts for number in range(parts + 1)]
        left = parts

        def one(number: int) -> None:
            nonlocal left
            work(range(cuts[number], cuts[number + 1]))
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                then()

        own = [number for number in range(1, parts) if not self.submit(partial(one, number))]
        for number in (0, *own):
            one(number)

    def each(self, one: Callable[[], Code]) -> Code:
        """One record of a batch: what befalls it befalls no other (H1)."""
        try:
            return one()
        except Exception as error:  # noqa: BLE001 - kept; the record's code says it
            self.fault(error)
            return Code.FAILED

    def end(self, pending: Pending[T], value: T) -> None:
        """Settle an operation."""
        with self._lock:
            self._running.pop(pending, None)
        pending.settle(value)

    def end_records(self, verb: str, op: Op, codes: Codes) -> None:
        """Settle an operation on records, and count their codes."""
        with self._lock:
            for code, count in enumerate(np.bincount(codes).tolist()):
                if count:
                    self._counts[f"{verb}_{Code(code).name.lower()}"] += count
        self.end(op, codes)

    def ended(self, verb: str, count: int, code: Code) -> Op:
        """An operation on records that ends as it begins."""
        op: Op = Pending()
        self.end_records(verb, op, np.full(count, code, np.uint8))
        return op
