"""Tiers that lend the memory that records lie in, so that a device may copy straight to and from it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcontract.tiers.base import Code, Codes, Lease, RecordKeys, Rows, SaveClass


class Loan:
    """Memory of a tier, lent to whoever writes records to it, or reads them, where they lie (R3).

    What is lent is neither reused nor given back before `end`.  A loan that is dropped unended keeps its
    memory for ever, on purpose: a copy may still touch it.

    Attributes:
        address: int64[n], where each record begins; 0: nothing is lent for it.
        codes: u8[n]; OK where something is lent, or nothing is left to do; else why not.
    """

    __slots__ = ("_end", "_lock", "address", "codes")

    def __init__(
        self,
        address: NDArray[np.int64],
        codes: Codes,
        end: Callable[[NDArray[np.bool_]], Codes] | None,
    ) -> None:
        """Make a loan.

        Args:
            address: see the class.
            codes: see the class.
            end: called once, with what was done; says how each record ended.  None: nothing is lent.
        """
        self.address, self.codes = address, codes
        self._end = end
        self._lock = threading.Lock()

    @classmethod
    def nothing(cls, count: int, code: Code) -> Loan:
        """No memory for `count` records, and the same reason for all."""
        return cls(np.zeros(count, np.int64), np.full(count, code, np.uint8), None)

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64[k], for which records something is lent."""
        return np.flatnonzero(self.address)

    def end(self, done: NDArray[np.bool_]) -> Codes:
        """Give everything back; doing so again changes nothing.

        Args:
            done: bool[n], which records are complete in memory, or were read; others are FAILED, and of a
                save, forgotten.

        Returns:
            u8[n], how each record ended.
        """
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            self.codes = end(done)
        return self.codes

    def __del__(self) -> None:
        if getattr(self, "_end", None) is not None:
            warnings.warn(
                f"a loan of {len(self.rows)} records was dropped unended; its memory is leaked",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


@runtime_checkable
class Lends(Protocol):
    """A tier whose records lie in memory that a device may write and read: nothing is copied between.

    A loan is an operation like `Tier.save` and `Tier.load`: counted, waited for by `flush` and `close`, and
    neither of them raises.
    """

    def reserve(
        self,
        keys: RecordKeys,
        record_bytes: int,
        cls: SaveClass,
        deadline: float,
        *,
        handoff: str | None = None,
    ) -> Loan:
        """Room for records, found by nobody before the loan has ended; arguments are those of `save`.

        Args:
            keys: of n records; those that are there already are OK, and nothing is lent for them (H2).
            record_bytes: of each.
            cls: why.
            deadline: EXPIRED after it.
            handoff: see `Tier.save`.
        """
        ...

    def borrow(self, lease: Lease, rows: Rows, record_bytes: int, deadline: float) -> Loan:
        """Records to be read where they lie; nobody may write there.  Arguments are those of `load`.

        Args:
            lease: from `lookup` of this tier; it may end before the loan (A3).
            rows: int[n], which of the lease's keys.
            record_bytes: of each; others are SHORT.
            deadline: EXPIRED after it.
        """
        ...
