"""Intake: requests that are being resolved, and the inbox they leave through.

Ownership is linear: intake → resolve task → inbox → scheduler.  Where a request lies is its state.  A request
that waits for a slow tier waits here, in a task of its own, and occupies no queue of the scheduler: one that
needs nothing passes it at once (A25).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcontract.engine.request import Request
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
    """

    request: Request
    prefix: KvPrefix
    error: BaseException | None = None
    sampler: Sampler | None = None
    forced: int | None = None


class Intake:
    """Runs resolves on an event loop of its own; every verb may be called from any thread.

    Args:
        store: asked for prefixes; None gives every request the empty one.
        rank: of the requests.
        wake: set whenever something arrives.
    """

    def __init__(self, store: KvStore | None, rank: str, wake: threading.Event) -> None:
        self._store = store
        self._rank = rank
        self._wake = wake
        self._lock = threading.Lock()
        self._inbox: deque[Arrival] = deque()
        self._resolving: set[int] = set()
        self._tasks: dict[int, asyncio.Task[KvPrefix]] = {}  # the loop's thread alone touches it
        self._loop: asyncio.AbstractEventLoop | None = None
        if store is not None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-intake", daemon=True)
            self._thread.start()

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

    def begin(self, request: Request) -> None:
        """Take a request; it arrives in the inbox once its prefix is known."""
        if self._store is None or self._loop is None:
            self._arrive(Arrival(request, KvPrefix.none(self._rank)))
            return
        with self._lock:
            self._resolving.add(request.id)
        self._loop.call_soon_threadsafe(self._spawn, self._store, self._loop, request)

    def cancel(self, request_id: int) -> bool:
        """End a resolve: the request arrives promptly, with the empty prefix (A11); False if not here."""
        with self._lock:
            here = request_id in self._resolving
        if here and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, request_id)
        return here

    def take(self) -> list[Arrival]:
        """Everything that has arrived, in order."""
        with self._lock:
            arrived = list(self._inbox)
            self._inbox.clear()
        return arrived

    def close(self) -> list[Arrival]:
        """Cancel what is being resolved, end the loop, hand everything over; nothing may begin any more."""
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return self.take()

    # On the loop

    def _spawn(self, store: KvStore, loop: asyncio.AbstractEventLoop, request: Request) -> None:
        work = store.resolve_prefix(self._rank, request.prompt, request.scope, request.policy)
        task = loop.create_task(work)
        self._tasks[request.id] = task
        # Not inside the task: one that is cancelled before it began runs none of its own code.
        task.add_done_callback(lambda done: self._end(request, done))

    def _end(self, request: Request, task: asyncio.Task[KvPrefix]) -> None:
        del self._tasks[request.id]
        nothing = KvPrefix.none(self._rank)
        if task.cancelled():
            self._arrive(Arrival(request, nothing))
        elif (error := task.exception()) is not None:
            self._arrive(Arrival(request, nothing, error))
        else:
            self._arrive(Arrival(request, task.result()))

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
