"""The event loop a store runs on, and the way there from other threads and loops.

It is the loop of a thread of the store's own, or one that the caller runs.  Whoever waits from elsewhere may
leave at any moment; what was on its way to them is then undone, so that no result is lost between two loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending

T = TypeVar("T")
Work = Coroutine[Any, Any, T]


class StoreLoop:
    """Where the coroutines of one store run.

    Args:
        given: a loop that the caller runs; None makes one, in a thread of its own.
    """

    def __init__(self, given: asyncio.AbstractEventLoop | None) -> None:
        self.own = given is None
        self._loop = given or asyncio.new_event_loop()
        self._gate = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-store", daemon=True)
        if self.own:
            self._thread.start()

    def time(self) -> float:
        """Now, on the clock of every deadline; from any thread."""
        return self._loop.time()

    def soon(self, function: Callable[[], object]) -> None:
        """Call on the loop, from any thread; nothing happens once the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call on the loop after a while, from any thread; nothing happens once the loop has ended."""
        self.soon(lambda: self._loop.call_later(delay_s, function))

    async def run(self, work: Work[T], undo: Callable[[T], object]) -> T:
        """Await work of the store on any event loop.

        Args:
            work: a coroutine that has not begun.
            undo: given the result if the caller was cancelled while it was on its way.

        Raises:
            UsageFault: the store is closed.
        """
        if asyncio.get_running_loop() is self._loop:
            with _unbegun(work):
                self.refuse_if_closed()
            return await work
        done: Pending[T] = Pending()
        future = self._send(work, done)
        try:
            await asyncio.wrap_future(future)  # cancelling it cancels the work
        except BaseException:
            done.on_done(undo)
            raise
        return done.value

    def wait(self, work: Work[T], undo: Callable[[T], object]) -> T:
        """`run` for threads without an event loop.

        Raises:
            UsageFault: the store is closed, or waiting here would stop the loop that does the work.
        """
        with _unbegun(work):
            self.refuse_to_block()
        done: Pending[T] = Pending()
        return self._result(self._send(work, done), done, undo)

    def finish(self, work: Work[T]) -> T:
        """Take no more work, then run the last and wait for it."""
        self.shut()
        done: Pending[T] = Pending()
        # Sent behind everything that came through the gate: the loop begins nothing after it.
        future = asyncio.run_coroutine_threadsafe(_deliver(work, done), self._loop)
        return self._result(future, done, lambda _: None)

    def refuse_to_block(self) -> None:
        """UsageFault where a thread must not wait: on the loop itself, or for one that the caller runs."""
        if not self.own or threading.current_thread() is self._thread:
            raise UsageFault("this would block the event loop that the store runs on: await it there instead")

    def shut(self) -> None:
        """Take no more work."""
        with self._gate:
            self._closing = True

    def refuse_if_closed(self) -> None:
        """UsageFault after `shut`."""
        if self._closing:
            raise UsageFault("the store is closed: it takes no more work")

    def stop(self) -> None:
        """End the thread, if it is ours."""
        if self.own and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _send(self, work: Work[T], done: Pending[T]) -> Future[None]:
        with self._gate, _unbegun(work):
            self.refuse_if_closed()
            return asyncio.run_coroutine_threadsafe(_deliver(work, done), self._loop)

    def _result(self, future: Future[None], done: Pending[T], undo: Callable[[T], object]) -> T:
        try:
            future.result()
        except BaseException:
            future.cancel()
            done.on_done(undo)
            raise
        return done.value


@contextmanager
def _unbegun(work: Work[Any]) -> Iterator[None]:
    """If this is refused, the coroutine ends without having begun."""
    try:
        yield
    except UsageFault:
        work.close()
        raise


async def _deliver(work: Work[T], done: Pending[T]) -> None:
    # Settled in the very step in which the work ends: a cancellation comes before, or meets a value.
    done.settle(await work)
