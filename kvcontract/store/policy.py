"""What a caller may ask of a resolve, and what it gets: policy in, prefix out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.pool.handles import Hold

DEVICE: Final = "device"
"""The source of pages that were resident already."""


@dataclass(frozen=True, slots=True)
class ResolvePolicy:
    """How far a resolve goes.

    Attributes:
        deadline_s: longest time the whole resolve may take, waits of every kind included (A1, A20).
        full_hit: a miss or a partial hit means "not landed yet": ask again until the deadline (A7).
        full_pages: a prompt may be covered entirely; otherwise one token stays to compute (A12).
        per_position: outputs of every prompt position are wanted, so all of them are computed (A23).

    Raises:
        UsageFault: a deadline that is no number of seconds.
    """

    deadline_s: float = 15.0
    full_hit: bool = False
    full_pages: bool = False
    per_position: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.deadline_s, int | float) or not self.deadline_s >= 0:
            raise UsageFault(f"deadline_s {self.deadline_s!r}: expected a number of seconds, 0 or more")


PLAIN: Final = ResolvePolicy()


class CancelToken:
    """Ends resolves from anywhere; one token may serve several (A11)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._next = 0

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """End every resolve that has it, now and later, with an empty prefix; from any thread."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = list(self._callbacks.values()), {}
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once, at once if it is too late; returns a function that takes the callback back."""
        with self._lock:
            if not self._cancelled:
                self._next += 1
                number = self._next
                self._callbacks[number] = callback
                return lambda: self._forget(number)
        callback()
        return lambda: None

    def _forget(self, number: int) -> None:
        with self._lock:
            self._callbacks.pop(number, None)


@dataclass(frozen=True, slots=True)
class KvPrefix:
    """A resident prefix, passed by value: `RequestKv.start` or `admit` consumes it.

    Attributes:
        rank: the rank whose pool holds it (A26).
        hit_tokens: its length; the hold pins exactly its pages (A13).
        valid_tokens: per group, the tokens whose state is valid.
        hold: pins the pages; None where there is nothing to pin.
        sources: tokens by where they came from: `device`, or a tier's name (I6).
        degraded: why the hit is shorter than it might be; empty if nothing went wrong.
        id: names the resolve for `KvStore.explain`; 0 if there was none.
        branches: positions where what is known goes on, but no request could: a checkpoint there will be hit.
    """

    rank: str
    hit_tokens: int
    valid_tokens: Mapping[str, int]
    hold: Hold | None
    sources: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    degraded: tuple[str, ...] = ()
    id: int = 0
    branches: tuple[int, ...] = ()

    @classmethod
    def none(cls, rank: str = "", *, degraded: tuple[str, ...] = (), number: int = 0) -> KvPrefix:
        """No prefix: lets an engine without a store run the same code."""
        return cls(rank, 0, MappingProxyType({}), None, degraded=degraded, id=number)

    def release(self) -> None:
        """Give the pages back unconsumed; doing so again does nothing."""
        if self.hold is not None and self.hold.live:
            self.hold.release()
