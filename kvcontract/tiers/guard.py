"""A tier's answers, held to the rules: whatever a tier does, its caller gets leases, codes and booleans (R4).

Tiers may be anybody's.  One that raises, answers with something else, or invents codes is a tier that failed:
counted here, and a shorter hit or an unsaved page above.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending
from kvcontract.tiers.base import (
    Buffers,
    Capabilities,
    Code,
    Codes,
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
from kvcontract.tiers.lending import Lends, Loan

T = TypeVar("T")

_HIGHEST: Final = max(Code)


class GuardedTier:
    """A `Tier` that keeps the rules for the one inside.

    Args:
        tier: whose answers are checked.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier: Any = tier
        self._lock = threading.Lock()
        self._broken: Counter[str] = Counter()
        self.name: str = tier.name
        self.capabilities: Capabilities = tier.capabilities

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Lease]:
        """See `Tier.lookup`."""
        nothing = Lease.nothing(self.name, len(keys), failed=True)
        return self._answer("lookup", lambda: self._tier.lookup(keys, deadline), self._lease, nothing)

    def load(self, lease: Lease, rows: Rows, buffers: Buffers, deadline: float) -> Op:
        """See `Tier.load`."""
        return self._op("load", len(rows), lambda: self._tier.load(lease, rows, buffers, deadline))

    def save(
        self,
        keys: RecordKeys,
        buffers: Buffers,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Op:
        """See `Tier.save`."""
        count = len(keys)
        return self._op("save", count, lambda: self._tier.save(keys, buffers, cls, deadline, handoff=handoff))

    @property
    def lends(self) -> bool:
        """Whether records are written and read where they lie in the tier."""
        return isinstance(self._tier, Lends)

    def reserve(
        self,
        keys: RecordKeys,
        record_bytes: int,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Loan:
        """See `Lends.reserve`."""
        tier = self._tier
        return self._loan(
            "reserve",
            len(keys),
            lambda: tier.reserve(keys, record_bytes, cls, deadline, handoff=handoff),
        )

    def borrow(self, lease: Lease, rows: Rows, record_bytes: int, deadline: float) -> Loan:
        """See `Lends.borrow`."""
        tier = self._tier
        return self._loan("borrow", len(rows), lambda: tier.borrow(lease, rows, record_bytes, deadline))

    def _loan(self, verb: str, count: int, call: Callable[[], Loan]) -> Loan:
        """A loan of so many records, whose end gives codes; of a tier that breaks the rules, of nothing."""
        failed, raised = Loan.nothing(count, Code.FAILED), object()
        given = self._call(verb, call, raised)
        if given is raised:
            return failed
        whole = (
            isinstance(given, Loan)
            and self._codes(verb, count, given.codes) is not None
            and isinstance(given.address, np.ndarray)
            and given.address.shape == (count,)
        )
        if not whole:
            self._count(verb)
            if isinstance(given, Loan):
                self._call(verb, lambda: given.end(np.zeros(len(given.codes), np.bool_)), None)
            return failed

        def end(done: NDArray[np.bool_]) -> Codes:
            codes = self._codes(verb, count, self._call(verb, lambda: given.end(done), None))
            return failed.codes if codes is None else codes

        return Loan(given.address, given.codes, end)

    def discard(self, lease: Lease, rows: Rows) -> None:
        """See `Tier.discard`."""
        self._call("discard", lambda: self._tier.discard(lease, rows), None)

    @property
    def tells_losses(self) -> bool:
        """Whether the tier says what it no longer has."""
        return isinstance(self._tier, TellsLosses)

    def on_loss(self, callback: Callable[[RecordKeys, str], object]) -> Callable[[], None]:
        """See `TellsLosses.on_loss`; of a tier that tells nothing, nothing comes."""
        tier = self._tier
        ended = self._call("on_loss", lambda: tier.on_loss(callback), None) if self.tells_losses else None
        return (lambda: self._call("on_loss", ended, None)) if callable(ended) else (lambda: None)

    @property
    def resets(self) -> bool:
        """Whether the tier can forget everything."""
        return isinstance(self._tier, Resets)

    def reset(self, deadline: float) -> Pending[bool]:
        """See `Resets.reset`; False from a tier that cannot, or cannot say."""
        return self._answer(
            "reset", lambda: self._tier.reset(deadline), lambda value: value is True, absent=False
        )

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """See `Tier.flush`; a tier that cannot say is not flushed."""
        return self._answer(
            "flush", lambda: self._tier.flush(level, deadline), lambda value: value is True, absent=False
        )

    def release_handoff(self, lease_id: str) -> None:
        """See `Tier.release_handoff`."""
        self._call("release_handoff", lambda: self._tier.release_handoff(lease_id), None)

    def stats(self) -> dict[str, int]:
        """The tier's own, and how often each of its verbs broke the rules."""
        own = self._call("stats", self._tier.stats, {})
        with self._lock:
            broken = {f"broke_rules_{verb}": count for verb, count in self._broken.items()}
        return {**(own if isinstance(own, dict) else {}), **broken}

    def close(self, deadline: float) -> bool:
        """See `Tier.close`; a tier that raises has not ended."""
        return self._call("close", lambda: self._tier.close(deadline), default=False) is True

    def _op(self, verb: str, count: int, call: Callable[[], Op]) -> Op:
        failed = np.full(count, Code.FAILED, np.uint8)
        return self._answer(verb, call, lambda value: self._codes(verb, count, value), failed)

    def _codes(self, verb: str, count: int, value: Any) -> Codes | None:
        """Codes of so many records, with FAILED where one is unknown; None if they are something else."""
        whole = isinstance(value, np.ndarray) and value.shape == (count,) and value.dtype.kind in "iu"
        if not whole:
            return None
        unknown = (value < 0) | (value > _HIGHEST)
        if unknown.any():
            self._count(verb)
        checked: Codes = np.where(unknown, Code.FAILED, value).astype(np.uint8)
        return checked

    def _lease(self, value: Any) -> Lease | None:
        if not isinstance(value, Lease):
            return None
        if isinstance(value.present, np.ndarray) and value.present.dtype == np.bool_:
            return value
        value.present = np.zeros(0, np.bool_)
        value.release()
        return None

    def _answer(
        self, verb: str, call: Callable[[], Pending[Any]], check: Callable[[Any], T | None], absent: T
    ) -> Pending[T]:
        """What a verb promised, checked when it comes; `absent` where it is not what it should be."""
        raised: Pending[T] = Pending.of(absent)
        given = self._call(verb, call, raised)
        if not isinstance(given, Pending):
            self._count(verb)
        if given is raised or not isinstance(given, Pending):
            return raised
        out: Pending[T] = Pending()

        def pass_on(value: Any) -> None:
            checked = check(value)
            if checked is None:
                self._count(verb)
            out.settle(absent if checked is None else checked)

        given.on_done(pass_on)
        return out

    def _call(self, verb: str, call: Callable[[], Any], default: Any) -> Any:
        try:
            return call()
        except (Exception, SystemExit):  # noqa: BLE001 - against the rules of tiers, whatever it is (R4)
            self._count(verb)
            return default

    def _count(self, verb: str) -> None:
        with self._lock:
            self._broken[verb] += 1


def lends(tier: Tier) -> TypeGuard[Lends]:
    """Whether a tier, guarded or not, lends its memory."""
    return tier.lends if isinstance(tier, GuardedTier) else isinstance(tier, Lends)
