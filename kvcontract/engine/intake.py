"""Intake: requests that are being resolved, and the inbox they leave through.

Ownership is linear: intake → resolve task → inbox → scheduler.  Where a request lies is its state.  A request
that waits for a slow tier waits here, in a task of its own, and occupies no queue of the scheduler: one that
needs nothing passes it at once (A25).  A preempted request comes by again, with the tokens it has by then.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcontract.engine.active import Active
from kvcontract.engine.loop import EngineLoop
from kvcontract.engine.request import Finish, Request, Result, refusal
from kvcontract.engine.sampling import Sampler
from kvcontract.store.policy import KvPrefix

if TYPE_CHECKING:
    from kvcontract.store.store import KvStore


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request that has left the intake; its prefix is the receiver's to consume or release.

    Attributes:
        request: the request.
        prefix: what it may start from.
        error: what the resolve raised, if it did; a failing tier is a shorter prefix instead (R4).
        sampler: of a branch, which has drawn from it already.
        forced: the token that a branch has sampled after the prompt already.
        item: of a preempted request, what it has done so far.
    """

    request: Request
    prefix: KvPrefix
    error: BaseException | None = None
    sampler: Sampler | None = None
    forced: int | None = None
    item: Active | None = None

    def end(self, finish: Finish, reason: str) -> Result:
        """Give everything back; what became of it."""
        self.prefix.release()
        if self.item is None:
            return refusal(self.request, finish, reason)
        with self.item.kv:  # preempted: it holds nothing, and is never resumed
            return self.item.result(finish, reason)


class Intake:
    """Runs resolves on the engine's loop; every verb may be called from any thread.

    Args:
        store: asked for prefixes; None gives every request the empty one.
        rank: of the requests.
        wake: set whenever something arrives.
        loop: where resolves wait.
    """

    def __init__(self, store: KvStore | None, rank: str, wake: threading.Event, loop: EngineLoop) -> None:
        self._store = store
        self._rank = rank
        self._wake = wake
        self._loop = loop
        self._lock = threading.Lock()
        self._inbox: deque[Arrival] = deque()
        self._resolving: set[int] = set()
        self._tasks: dict[int, asyncio.Task[KvPrefix]] = {}  # the loop's thread alone touches it

    @property
    def resolving(self) -> int:
        """Requests whose prefix is not known yet."""
        with self._lock:
            return len(self._resolving)

    @property
    def arrived(self) -> int:
        """Arrivals that nobody has taken."""
        with self._lock:
            return len(self._inbox)

    def begin(self, request: Request, item: Active | None = None) -> None:
        """Take a request; it arrives in the inbox once its prefix is known.

        Args:
            request: the request.
            item: what it has done so far, if it was preempted.
        """
        store = self._store
        if store is None:
            self._arrive(Arrival(request, KvPrefix.none(self._rank), item=item))
            return
        with self._lock:
            self._resolving.add(request.id)
        self._loop.soon(lambda: self._spawn(store, request, item))

    def cancel(self, request_id: int) -> bool:
        """End a resolve: the request arrives promptly, with the empty prefix (A11); False if not here."""
        with self._lock:
            here = request_id in self._resolving
        if here:
            self._loop.soon(lambda: self._cancel(request_id))
        return here

    def take(self) -> list[Arrival]:
        """Everything that has arrived, in order."""
        with self._lock:
            arrived = list(self._inbox)
            self._inbox.clear()
        return arrived

    def close(self) -> list[Arrival]:
        """Cancel what is being resolved and hand everything over; nothing may begin any more."""
        if self.resolving:
            self._loop.run(self._drain())
        return self.take()

    # On the loop

    def _spawn(self, store: KvStore, request: Request, item: Active | None) -> None:
        tokens, policy = request.prompt, request.policy
        if item is not None:
            # Nobody but itself produces what it looks for now, so there is nothing to park for.
            tokens, policy = item.kv.tokens, replace(policy, full_hit=False, full_pages=False)
        work = store.resolve_prefix(self._rank, tokens, request.scope, policy)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[request.id] = task
        # Not inside the task: one that is cancelled before it began runs none of its own code.
        task.add_done_callback(lambda done: self._end(request, item, done))

    def _end(self, request: Request, item: Active | None, task: asyncio.Task[KvPrefix]) -> None:
        del self._tasks[request.id]
        nothing = KvPrefix.none(self._rank)
        if task.cancelled():
            self._arrive(Arrival(request, nothing, item=item))
        elif (error := task.exception()) is not None:
            self._arrive(Arrival(request, nothing, error, item=item))
        else:
            self._arrive(Arrival(request, task.result(), item=item))

    def _cancel(self, request_id: int) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def _drain(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        # Each task's own callback was added first, so it has filed the arrival before gather returns.
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arrive(self, arrival: Arrival) -> None:
        with self._lock:
            self._resolving.discard(arrival.request.id)
            self._inbox.append(arrival)
        self._wake.set()
