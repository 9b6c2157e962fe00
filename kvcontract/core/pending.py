"""`Pending`: the one terminal of an asynchronous operation (R8).

A cell that is settled exactly once, from any thread, with a value: outcomes that are failures are values
too (codes, smaller hits), so a pending never carries an exception.  Whoever waits may give up; the pending
does not notice, and its value reaches the callbacks whenever it comes (A2, A3).
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from kvcontract.contract.errors import InternalFault, UsageFault

T = TypeVar("T")
U = TypeVar("U")


def report_uncaught(error: BaseException) -> None:
    """Hand an exception that has no caller to `threading.excepthook`: printed, and seen by test runners."""
    # sys.unraisablehook would fit too, but its argument cannot be built from Python.
    args = threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    try:
        threading.excepthook(args)
    except Exception:  # noqa: BLE001 - a hook that fails must not stop what it reports on
        sys.__excepthook__(type(error), error, error.__traceback__)


class Pending(Generic[T]):
    """A value that is not there yet; thread-safe."""

    __slots__ = ("__weakref__", "_callbacks", "_done", "_lock", "_settled", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled: threading.Event | None = None  # made by who blocks: most pendings are never waited for
        self._callbacks: list[Callable[[T], object]] = []
        self._done = False
        self._value: T | None = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """A pending that is settled already."""
        pending: Pending[T] = cls()
        pending.settle(value)
        return pending

    def settle(self, value: T) -> None:
        """Give the one terminal; callbacks run here, in this thread, in the order they were added.

        A callback that raises is reported (`threading.excepthook`) and stops neither the others nor the
        caller.

        Raises:
            InternalFault: it was settled before.
        """
        with self._lock:
            if self._done:
                raise InternalFault(f"settled twice: first {self._value!r}, then {value!r} (R8)")
            self._value, self._done = value, True
            callbacks, self._callbacks = self._callbacks, []
            settled = self._settled
        if settled is not None:
            settled.set()
        for callback in callbacks:
            _call(callback, value)

    @property
    def done(self) -> bool:
        """Whether the value is there."""
        return self._done

    @property
    def value(self) -> T:
        """The value.

        Raises:
            UsageFault: it is not there yet.
        """
        if not self._done:
            raise UsageFault("the operation has not settled yet; wait for it, or ask `done` first")
        return cast("T", self._value)

    def on_done(self, callback: Callable[[T], object]) -> None:
        """Call `callback(value)` exactly once: now if settled, else in the thread that settles."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        _call(callback, self.value)

    def forget(self, callback: Callable[[T], object]) -> bool:
        """Take a callback back; False if it was called, is being called, or was never added."""
        with self._lock:
            if callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def map(self, function: Callable[[T], U]) -> Pending[U]:
        """A pending of `function(value)`; `function` must not raise."""
        mapped: Pending[U] = Pending()
        self.on_done(lambda value: mapped.settle(function(value)))
        return mapped

    def wait(self, timeout_s: float) -> T:
        """Block until the value is there.

        Raises:
            TimeoutError: it did not come in time; the operation goes on.
        """
        with self._lock:
            if self._done:
                return cast("T", self._value)
            settled = self._settled = self._settled or threading.Event()
        # threading refuses waits of more than some centuries
        if not settled.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the operation did not settle within {timeout_s:g} s; it goes on")
        return self.value


def _call(callback: Callable[[T], object], value: T) -> None:
    try:
        callback(value)
    except Exception as error:  # noqa: BLE001 - reported; one callback must not cost another its value
        report_uncaught(error)


def all_of(pendings: Sequence[Pending[T]]) -> Pending[tuple[T, ...]]:
    """Settles with every value, in order, once the last is there; at once for none (C12)."""
    pendings = tuple(pendings)  # those of now: a list may grow meanwhile
    joined: Pending[tuple[T, ...]] = Pending()
    if not pendings:
        joined.settle(())
        return joined
    lock, left = threading.Lock(), len(pendings)

    def one_more(_value: T) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            joined.settle(tuple(pending.value for pending in pendings))

    for pending in pendings:
        pending.on_done(one_more)
    return joined


async def wait_until(pending: Pending[T], deadline: float) -> T:
    """Wait in an event loop, up to a point of its clock.

    Args:
        pending: what to wait for; it is not cancelled by anything that happens here.
        deadline: absolute, on `loop.time()`; infinity waits for ever.

    Raises:
        TimeoutError: the deadline passed first.
    """
    if pending.done:
        return pending.value
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def wake(_value: T) -> None:
        try:
            loop.call_soon_threadsafe(arrived.set)
        except RuntimeError:
            # The waiter's loop ended between its giving up and this call; nobody is left to be told.
            if not loop.is_closed():
                raise

    pending.on_done(wake)
    try:
        async with asyncio.timeout_at(None if math.isinf(deadline) else deadline):
            await arrived.wait()
    finally:
        pending.forget(wake)
    return pending.value


class Once:
    """Calls a function the first time it is called itself; thread-safe."""

    __slots__ = ("_function", "_lock", "_taken")

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._taken = False

    def take(self) -> bool:
        """Whether nobody was here before."""
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    def __call__(self) -> None:
        """Call the function, unless somebody was here before."""
        if self.take():
            self._function()
