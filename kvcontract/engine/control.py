"""The one door into a running engine: requests and control operations pass it in the order of submission.

An operation changes what all requests share: adapters, what is kept, whether prefixes are looked for.  Most
run only when the engine is idle (C11): nothing resolving, arrived, waiting, active or preempted, and no save
or load unsettled.  So an operation that comes to the head of the line waits until every request that passed
the door before has its result; what was submitted after it stays behind it, not resolved, holding nothing.

No thread waits here.  Whoever ends the last request, or the operation before, lets in what is next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from kvcontract.contract.errors import KvContractError
from kvcontract.core.pending import Pending, report_uncaught
from kvcontract.engine.loop import EngineLoop
from kvcontract.engine.request import Request
from kvcontract.store.control import ResetReport

CONTROL_DEADLINE_S: Final = 60.0
"""How long an operation may take, its waiting included, unless the caller says otherwise."""

CLOSED: Final = "the engine was closed"


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What became of a control operation.

    Attributes:
        done: whether it ran; if not, nothing has changed.
        reason: why not, in words.
        waited_for: what was still going on, if it was given up while it waited.
        revision: of an adapter that was loaded: what stands in the scope of its requests.
        digest: of that adapter's content.
        reset: what a reset has reached.
    """

    done: bool
    reason: str = ""
    waited_for: tuple[str, ...] = ()
    revision: str | None = None
    digest: str | None = None
    reset: ResetReport | None = None


@dataclass(slots=True, eq=False)
class Operation:
    """One control operation.

    Attributes:
        name: for reports.
        deadline: on `time.monotonic`.
        ready: waits for what else must have ended; it may be given up at any moment.
        act: makes the change; it is not interrupted, and keeps the deadline itself.
        idle: whether it runs only when nothing goes on.
        report: settles once.
    """

    name: str
    deadline: float
    ready: Callable[[Operation], Awaitable[object]]
    act: Callable[[Operation], Awaitable[ControlReport]]
    idle: bool
    report: Pending[ControlReport] = field(default_factory=Pending)

    @property
    def left_s(self) -> float:
        """Time that is left, at least 0."""
        return max(0.0, self.deadline - time.monotonic())


class Control:
    """The line in front of the door; every verb may be called from any thread.

    Args:
        loop: where operations run.
        enter: lets a request in, or says why it is refused; called in order, under the lock.
        refused: told of requests that were refused.
        going_on: names what the engine is busy with.
    """

    def __init__(
        self,
        loop: EngineLoop,
        enter: Callable[[Request], str | None],
        refused: Callable[[Request, str], object],
        going_on: Callable[[], tuple[str, ...]],
    ) -> None:
        self._loop = loop
        self._enter = enter
        self._refused = refused
        self._going_on = going_on
        self._lock = threading.Lock()
        self._line: deque[Request | Operation] = deque()
        self._inside: set[int] = set()
        self._current: Operation | None = None  # at the head of the line, and begun
        self._task: asyncio.Task[None] | None = None  # the loop's thread alone touches it
        self._acting = False  # likewise: the current operation has begun to change something
        self._closed = False

    @property
    def waiting(self) -> int:
        """Operations that have not ended."""
        with self._lock:
            return sum(isinstance(item, Operation) for item in self._line)

    @property
    def behind(self) -> int:
        """Requests that wait behind an operation."""
        with self._lock:
            return sum(len(item.ids) for item in self._line if isinstance(item, Request))

    def submit(self, item: Request | Operation) -> bool:
        """Put a request or an operation at the end of the line; False: the door is closed."""
        with self._lock:
            if self._closed:
                return False
            self._line.append(item)
        if isinstance(item, Operation):
            self._loop.at(item.deadline, lambda: self._expire(item))
        self._advance()
        return True

    def left(self, request_id: int) -> None:
        """A request has its result."""
        with self._lock:
            self._inside.discard(request_id)
        self._advance()

    def drop(self, request_id: int) -> Request | None:
        """Take a request out that gives up while it is behind an operation; its branches stay."""
        with self._lock:
            for at, item in enumerate(self._line):
                if isinstance(item, Request) and item.id == request_id:
                    del self._line[at]
                    for branch in reversed(item.branches):
                        self._line.insert(at, branch)
                    return replace(item, branches=())
        return None

    def close(self) -> list[Request]:
        """Let nothing in any more; operations that have not begun to change anything are given up.

        Blocks for one that has, at most until its deadline.

        Returns:
            The requests that were still in line.
        """
        with self._lock:
            self._closed = True
            line = [item for item in self._line if item is not self._current]
            self._line.clear()
            current = self._current
        for item in line:
            if isinstance(item, Operation):
                self._give_up(item, CLOSED)
        if current is not None:
            self._loop.run(self._conclude())
        return [item for item in line if isinstance(item, Request)]

    def _advance(self) -> None:
        """Let in what may come in; begin the operation at the head if nothing is in its way."""
        refused = []
        with self._lock:
            while self._line and self._current is None:
                head = self._line[0]
                if isinstance(head, Operation):
                    if head.idle and self._inside:
                        break
                    self._current = head
                    self._loop.soon(partial(self._begin, head))
                    break
                self._line.popleft()
                self._inside.update(head.ids)
                reason = self._enter(head)
                if reason is not None:
                    refused.append((head, reason))
        for request, reason in refused:
            self._refused(request, reason)

    def _give_up(self, operation: Operation, reason: str) -> None:
        operation.report.settle(ControlReport(done=False, reason=reason, waited_for=self._going_on()))

    # On the loop

    def _expire(self, operation: Operation) -> None:
        with self._lock:
            if operation not in self._line or operation is self._current:
                return
            self._line.remove(operation)
        self._give_up(operation, f"{operation.name}: the deadline passed before its turn")
        self._advance()

    def _begin(self, operation: Operation) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(operation))

    async def _run(self, operation: Operation) -> None:
        report = await self._outcome(operation)
        with self._lock:
            self._current, self._acting = None, False
            if not self._closed:
                self._line.popleft()
        operation.report.settle(report)
        self._advance()

    async def _outcome(self, operation: Operation) -> ControlReport:
        try:
            async with asyncio.timeout_at(operation.deadline):
                await operation.ready(operation)
            self._acting = True
            return await operation.act(operation)
        except TimeoutError:
            why = f"{operation.name}: the deadline passed before all had settled"
            return ControlReport(done=False, reason=why, waited_for=self._going_on())
        except asyncio.CancelledError:
            return ControlReport(done=False, reason=CLOSED, waited_for=self._going_on())
        except KvContractError as fault:
            return ControlReport(done=False, reason=str(fault))
        except Exception as error:  # noqa: BLE001 - reported; whoever waits is told, and the line goes on
            report_uncaught(error)
            return ControlReport(done=False, reason=f"{operation.name}: {error!r}")

    async def _conclude(self) -> None:
        task = self._task
        if task is not None:  # it has taken its first step: what was handed over before runs before
            if not self._acting:
                task.cancel()
            await asyncio.wait([task])
