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
from kvcontract.store.policy import KvPrefix

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvcontract.store.store import KvStore


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request that has left the intake; its prefix is the receiver's to consume or release.

    Attributes:
        request: the request.
        prefix: what it may start from.
        error: what the resolve raised, if it did; a failing tier is a shorter prefix instead (R4).
    """

    request: Request
    prefix: KvPrefix
    error: BaseException | None = None


class Intake:
    """Runs resolves on an event loop of its own.

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
        self._resolving: dict[int, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-intake", daemon=True)
        if store is not None:
            self._thread.start()

    @property
    def resolving(self) -> int:
        """Requests whose prefix is not known yet."""
        with self._lock:
            return len(self._resolving)

    @property
    def waiting(self) -> int:
        """Arrivals that nobody has taken."""
        with self._lock:
            return len(self._inbox)

    def begin(self, request: Request) -> None:
        """Take a request; it arrives in the inbox once its prefix is known.  Callable from any thread."""
        if self._store is None:
            self._arrive(Arrival(request, KvPrefix.none(self._rank)))
            return
        with self._lock:
            work = self._resolve(self._store, request)
            self._resolving[request.id] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self, request_id: int) -> bool:
        """End a resolve: the request arrives promptly with the empty prefix (A11); False if it is not here."""
        with self._lock:
            future = self._resolving.get(request_id)
        return future is not None and future.cancel()

    def take(self) -> list[Arrival]:
        """Everything that has arrived, in order."""
        with self._lock:
            arrived = list(self._inbox)
            self._inbox.clear()
        return arrived

    def close(self) -> list[Arrival]:
        """Cancel what is being resolved, end the loop, hand everything over."""
        with self._lock:
            futures = list(self._resolving.values())
        for future in futures:
            future.cancel()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        return self.take()

    async def _resolve(self, store: KvStore, request: Request) -> None:
        prefix, error = KvPrefix.none(self._rank), None
        try:
            prefix = await store.resolve_prefix(self._rank, request.prompt, request.scope, request.policy)
        except asyncio.CancelledError as cancelled:
            error = cancelled
        except Exception as fault:  # noqa: BLE001 - carried to the request's result, which reports it
            error = fault
        self._arrive(Arrival(request, prefix, error))

    def _arrive(self, arrival: Arrival) -> None:
        with self._lock:
            self._resolving.pop(arrival.request.id, None)
            self._inbox.append(arrival)
        self._wake.set()

    async def _drain(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
