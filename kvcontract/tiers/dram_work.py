"""What goes on in a DRAM tier: operations, each with one terminal (R8), and handoffs, each with an end."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as numbers
from typing import Final

import numpy as np

from kvcontract.core.lane import Lane, Urgency
from kvcontract.core.pending import Pending
from kvcontract.tiers.base import RECORD_KEY, Clock, Code, Codes, Op, RecordKeys, guarded
from kvcontract.tiers.slots import Slot, Slots

_KEPT_FAULTS: Final = 16

Hold = str | int | None
"""Under which handoff a record is kept: a name, a number that only time ends, or none."""


@dataclass(slots=True)
class _Handoff:
    """Slots pinned for a decode side that has not fetched them yet."""

    ends: float
    slots: list[Slot]


class DramWork:
    """Operations and handoffs over slots; the lock is for all of them.

    Args:
        slots: where records lie.
        lane: where copies run.
        clock: what handoffs end on.
        handoff_ttl_s: how long one is kept.
    """

    def __init__(self, slots: Slots, lane: Lane, clock: Clock, handoff_ttl_s: float) -> None:
        self.lock = threading.Lock()
        self.faults: deque[Exception] = deque(maxlen=_KEPT_FAULTS)
        self.counts: Counter[str] = Counter()
        self.running: dict[Op, str] = {}
        self.handoffs: dict[str | int, _Handoff] = {}
        self.closed = False
        self._slots, self._lane, self._clock, self._handoff_ttl_s = slots, lane, clock, handoff_ttl_s
        self._unnamed = numbers(1)  # handoffs that only time ends, callbacks
        self._loss_callbacks: dict[int, Callable[[RecordKeys, str], object]] = {}

    # Operations

    def begin(self, verb: str) -> Op | None:
        """An operation that somebody will `finish`; None once the tier is closed."""
        op: Op = Pending()
        with self.lock:
            if self.closed:
                return None
            self.running[op] = verb
        return op

    def start(
        self,
        verb: str,
        count: int,
        body: Callable[[Codes], None],
        urgency: Urgency,
        undo: Callable[[], None] = lambda: None,
    ) -> Op:
        """Run an operation in the lane; `undo` stands in for a body that can not run at all."""
        op = self.begin(verb)
        if op is not None:
            ours = op
            try:
                self._lane.submit(lambda: self.finish(verb, ours, guarded(count, body, self.fault)), urgency)
            except Exception as error:  # noqa: BLE001 - a lane that is closed; kept
                self.fault(error)
            else:
                return op
        undo()
        return self.ended(verb, count, Code.REFUSED, op)

    def ended(self, verb: str, count: int, code: Code, op: Op | None = None) -> Op:
        """An operation that came to nothing."""
        op = op or Pending()
        self.finish(verb, op, np.full(count, code, np.uint8))
        return op

    def finish(self, verb: str, op: Op, codes: Codes) -> None:
        """Give an operation its one terminal, counted (R8)."""
        with self.lock:
            evicted, self._slots.evicted = self._slots.evicted, []
            self.running.pop(op, None)
            for code, count in enumerate(np.bincount(codes).tolist()):
                if count:
                    self.counts[f"{verb}_{Code(code).name.lower()}"] += count
        self.tell(evicted, "evicted")
        op.settle(codes)

    def each(self, one: Callable[[], Code]) -> Code:
        """One record of a batch: what befalls it befalls no other (H1)."""
        try:
            return one()
        except Exception as error:  # noqa: BLE001 - kept; the record's code says it
            self.fault(error)
            return Code.FAILED

    def fault(self, error: Exception) -> None:
        """Keep an unexpected exception."""
        with self.lock:
            self.faults.append(error)
            self.counts["faults"] += 1

    # Losses

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`."""
        number = next(self._unnamed)
        self._loss_callbacks[number] = callback

        def end() -> None:
            self._loss_callbacks.pop(number, None)

        return end

    def tell(self, names: list[bytes], reason: str) -> None:
        """Say what is lost; outside the lock, since whoever hears it may call back."""
        if names:
            keys: RecordKeys = np.frombuffer(b"".join(names), RECORD_KEY)
            for callback in tuple(self._loss_callbacks.values()):
                try:
                    callback(keys, reason)
                except Exception as error:  # noqa: BLE001 - kept; an operation must still settle (R8)
                    self.fault(error)

    # Handoffs, under the lock

    def name(self, handoff: str | None) -> str | int:
        """What a handoff is kept under."""
        return handoff or next(self._unnamed)

    def hold(self, hold: Hold, slot: Slot) -> None:
        """Keep a slot until its handoff ends."""
        if hold is None:
            return
        handoff = self.handoffs.setdefault(hold, _Handoff(self._clock() + self._handoff_ttl_s, []))
        self._slots.pin(slot)
        handoff.slots.append(slot)

    def publish(self, slot: Slot, key: bytes, hold: Hold) -> None:
        """A record is complete; somebody else may have finished the same one meanwhile."""
        other = self._slots.find(key)
        if other is None:
            self._slots.publish(slot, key)
        self.hold(hold, other or slot)

    def end_overdue(self) -> None:
        """End the handoffs whose time is over."""
        now = self._clock() if self.handoffs else 0.0
        for name in [name for name, handoff in self.handoffs.items() if handoff.ends <= now]:
            self.end_handoff(name)

    def end_handoff(self, name: str | int) -> None:
        """Let a handoff's records be evicted; an unknown name does nothing."""
        handoff = self.handoffs.pop(name, None)
        for slot in handoff.slots if handoff else ():
            self._slots.unpin(slot)
