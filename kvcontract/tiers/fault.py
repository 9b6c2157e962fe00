"""A tier whose every answer somebody else decides: when it comes, and what befalls it on the way.

Calls are kept until `FaultTier.answer` lets one through, whole or with a `Fault`, which is data: a schedule
of faults can be drawn from a seed, written down, and played again.  What lies below is any tier.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending, all_of
from kvcontract.tiers.base import (
    RECORD_KEY,
    Buffers,
    Capabilities,
    Code,
    Lease,
    Level,
    Op,
    RecordKeys,
    Resets,
    Rows,
    SaveClass,
    TellsLosses,
    Tier,
)


class FaultKind(StrEnum):
    """What can befall an answer."""

    FAIL = "fail"
    SHORT = "short"
    FLIP = "flip"
    FULL = "full"
    LIE = "lie"
    REORDER = "reorder"
    DUPLICATE = "duplicate"


FAULTS_OF: Final[dict[str, tuple[FaultKind, ...]]] = {
    "lookup": (FaultKind.FAIL, FaultKind.LIE, FaultKind.REORDER, FaultKind.DUPLICATE),
    "load": (
        FaultKind.FAIL,
        FaultKind.SHORT,
        FaultKind.FLIP,
        FaultKind.LIE,
        FaultKind.REORDER,
        FaultKind.DUPLICATE,
    ),
    "save": (
        FaultKind.FAIL,
        FaultKind.SHORT,
        FaultKind.FLIP,
        FaultKind.FULL,
        FaultKind.LIE,
        FaultKind.DUPLICATE,
    ),
    "flush": (FaultKind.FAIL,),
}
"""What can befall the answer of each verb."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one answer.

    Attributes:
        kind: ``fail``: nothing is done, and it says so.  ``short``, ``full``: records from `at` on are not
            done.  ``flip``: one bit of record `at` changes on the way.  ``lie``: success is told, and nothing
            done; of a look-up, everything is said to be there.  ``reorder``: presence, or records, come in
            the opposite order.  ``duplicate``: an answer for twice as many records; of a save, a second copy
            of it comes later, when nobody waits for it.
        at: which record; taken modulo their number.
    """

    kind: FaultKind
    at: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A call that waits for its answer.

    Attributes:
        number: of the tier's calls, from 0.
        verb: ``lookup``, ``load``, ``save`` or ``flush``.
        keys: [n], of the records it is about; of a flush, none.
        deadline: what the caller gave; on the clock of the tier below.
        cls: of a save.
        level: of a flush.
        ghost: a second copy of a save, which nobody waits for.
    """

    number: int
    verb: str
    keys: RecordKeys
    deadline: float
    out: Pending[Any]
    buffers: Buffers | None = None
    lease: Lease | None = None
    rows: Rows | None = None
    cls: SaveClass = SaveClass.CACHEABLE
    handoff: str | None = None
    level: Level = "landed"
    ghost: bool = False

    def __len__(self) -> int:
        return len(self.keys)


class FaultTier:
    """Holds calls back until they are answered; what lies below is never asked before.

    Deadlines are for the caller to keep: what is answered after one is done all the same, as by a tier that
    did not notice.

    Args:
        inner: where records are.
        claims: capabilities that are stated instead of those below.

    Attributes:
        inner: the tier below, which is not closed with this one.
        calls: those that wait, oldest first.
        leases: those that were given and still live.
    """

    def __init__(self, inner: Tier, **claims: Any) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self.leases: WeakSet[Lease] = WeakSet()
        self.capabilities: Capabilities = replace(inner.capabilities, **claims)
        self._numbers = count()
        self._asked: WeakKeyDictionary[Lease, RecordKeys] = WeakKeyDictionary()
        self._listeners: list[Callable[[Call], object]] = []

    @property
    def name(self) -> str:
        """That of the tier below."""
        return self.inner.name

    def on_call(self, callback: Callable[[Call], object]) -> None:
        """Tell of every call as it is made."""
        self._listeners.append(callback)

    # Calls

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """Kept until it is answered."""
        return self._keep(Call(next(self._numbers), "lookup", keys, deadline, Pending()))

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """Kept until it is answered; the lease is not released before, whatever its owner does (A3)."""
        asked = self._asked.get(lease)
        if asked is None:
            raise UsageFault("load with a lease that another tier gave")
        call = Call(next(self._numbers), "load", asked[rows], deadline, Pending(), buffers, lease, rows)
        return self._keep(call)

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """Kept until it is answered."""
        call = Call(next(self._numbers), "save", keys, deadline, Pending(), buffers, cls=cls, handoff=handoff)
        return self._keep(call)

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Kept until it is answered, and every save that was made before it."""
        nothing = np.zeros(0, RECORD_KEY)
        return self._keep(Call(next(self._numbers), "flush", nothing, deadline, Pending(), level=level))

    def _keep(self, call: Call) -> Pending[Any]:
        self.calls.append(call)
        for tell in self._listeners:
            tell(call)
        return call.out

    # Answers

    def answer(self, call: Call, fault: Fault | None = None) -> None:
        """Let a call through.

        Raises:
            UsageFault: it does not wait here, or the fault cannot befall its verb.
        """
        if call not in self.calls or (fault is not None and fault.kind not in FAULTS_OF[call.verb]):
            raise UsageFault(f"no answer: call {call.number} ({call.verb}) with {fault}")
        self.calls.remove(call)
        if call.verb == "lookup":
            self._look(call, fault)
        elif call.verb == "load":
            self._load(call, fault)
        elif call.verb == "save":
            self._save(call, fault)
        else:
            self._flush(call, fault)

    def lose(self) -> None:
        """Forget every record and fail whatever waits: the place behind the tier died, and is back, empty."""
        if isinstance(self.inner, Resets):
            self.inner.reset(math.inf)
        calls, self.calls = self.calls, []
        for call in calls:
            if call.verb == "lookup":
                call.out.settle(Lease.nothing(self.name, len(call), failed=True))
            elif call.verb == "flush":
                call.out.settle(False)
            else:
                call.out.settle(_codes(call, Code.FAILED))

    def _look(self, call: Call, fault: Fault | None) -> None:
        kind = None if fault is None else fault.kind
        if kind is FaultKind.FAIL:
            call.out.settle(Lease.nothing(self.name, len(call), failed=True))
            return

        def pass_on(lease: Lease) -> None:
            if kind is FaultKind.LIE:
                lease.present = np.ones(len(call), np.bool_)
            elif kind is FaultKind.REORDER:
                lease.present = lease.present[::-1].copy()
            elif kind is FaultKind.DUPLICATE:
                lease.present = np.concatenate([lease.present, lease.present])
            self._asked[lease] = call.keys
            self.leases.add(lease)
            call.out.settle(lease)

        self.inner.lookup(call.keys, math.inf).on_done(pass_on)

    def _load(self, call: Call, fault: Fault | None) -> None:
        kind = None if fault is None else fault.kind
        if call.buffers is None or call.lease is None or call.rows is None:
            raise UsageFault("a load without a lease")
        if kind in (FaultKind.FAIL, FaultKind.LIE):
            call.out.settle(_codes(call, Code.FAILED if kind is FaultKind.FAIL else Code.OK))
            return
        at = 0 if fault is None else fault.at % max(1, len(call))
        done = np.arange(at if kind is FaultKind.SHORT else len(call))
        buffers = call.buffers.take(done[::-1] if kind is FaultKind.REORDER else done)
        op = self.inner.load(call.lease, call.rows[done], buffers, math.inf)

        def pass_on(found: Any) -> None:
            codes = _codes(call, Code.SHORT)
            codes[done] = found
            if kind is FaultKind.FLIP and codes[at] == Code.OK:
                address, size = buffers.pieces()[at][-1]
                (ctypes.c_uint8 * size).from_address(address)[-1] ^= 1
            call.out.settle(np.concatenate([codes, codes]) if kind is FaultKind.DUPLICATE else codes)

        op.on_done(pass_on)

    def _save(self, call: Call, fault: Fault | None) -> None:
        kind = None if fault is None else fault.kind
        if call.buffers is None:
            raise UsageFault("a save without bytes")
        if kind in (FaultKind.FAIL, FaultKind.LIE):
            call.out.settle(_codes(call, Code.FAILED if kind is FaultKind.FAIL else Code.OK))
            return
        at = 0 if fault is None else fault.at % max(1, len(call))
        some = kind in (FaultKind.SHORT, FaultKind.FULL)
        done = np.arange(at if some else len(call))
        buffers = call.buffers.take(done)
        if kind in (FaultKind.FLIP, FaultKind.DUPLICATE):
            buffers = _copied(buffers, at if kind is FaultKind.FLIP else None)
        if kind is FaultKind.DUPLICATE:
            again = replace(call, number=next(self._numbers), buffers=buffers, out=Pending(), ghost=True)
            self.calls.append(again)
        op = self.inner.save(call.keys[done], buffers, call.cls, math.inf, handoff=call.handoff)

        def pass_on(found: Any) -> None:
            codes = _codes(call, Code.FULL if kind is FaultKind.FULL else Code.SHORT)
            codes[done] = found
            call.out.settle(codes)

        op.on_done(pass_on)

    def _flush(self, call: Call, fault: Fault | None) -> None:
        if fault is not None:
            call.out.settle(False)
            return
        before = [
            item.out
            for item in self.calls
            if item.verb == "save" and not item.ghost and item.number < call.number
        ]

        def ask(_: object) -> None:
            self.inner.flush(call.level, math.inf).on_done(call.out.settle)

        all_of(before).on_done(ask)

    # Straight through

    def discard(self, lease: Lease, rows: Rows) -> None:
        """Straight through."""
        self.inner.discard(lease, rows)

    def release_handoff(self, lease_id: str) -> None:
        """Straight through."""
        self.inner.release_handoff(lease_id)

    def stats(self) -> dict[str, int]:
        """Those of the tier below."""
        return self.inner.stats()

    def close(self, deadline: float) -> bool:
        """Whether nothing waits; the tier below stays open."""
        del deadline
        return not any(call.verb != "flush" and not call.ghost for call in self.calls)


class TellingFaultTier(FaultTier):
    """A `FaultTier` that says what it loses, and can forget, over a tier that can."""

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`.

        Raises:
            UsageFault: the tier below cannot.
        """
        if not isinstance(self.inner, TellsLosses):
            raise UsageFault(f"tier {self.name!r} cannot tell what it loses")
        return self.inner.on_loss(callback)

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; late copies of saves are forgotten with the rest.

        Raises:
            UsageFault: the tier below cannot.
        """
        if not isinstance(self.inner, Resets):
            raise UsageFault(f"tier {self.name!r} cannot forget")
        self.calls = [call for call in self.calls if not call.ghost]
        return self.inner.reset(deadline)


def _codes(call: Call, code: Code) -> Any:
    return np.full(len(call), code, np.uint8)


def _copied(buffers: Buffers, flipped: int | None) -> Buffers:
    """The same bytes in memory of their own, maybe with one bit of a record changed."""
    records = []
    for number, pieces in enumerate(buffers.pieces()):
        joined = np.frombuffer(b"".join(ctypes.string_at(*piece) for piece in pieces), np.uint8).copy()
        if number == flipped:
            joined[-1] ^= 1
        records.append(joined)
    return Buffers.of(records)
