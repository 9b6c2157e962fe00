"""Handoffs: which pages of one request another engine can count on (C7).

A handoff is named by its caller.  Every page of the request goes to every tier that others can see, even if
it is stored there already: the tier must keep it until the handoff ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending
from kvcontract.pool.index import Keys
from kvcontract.tiers.base import Code, Codes

KEPT: Final = 4096
_UNTRIED: Final = 255


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What became of a handoff's saves.

    Attributes:
        id: the caller's name for it.
        pages: of the request's complete records when it was last sealed.
        saved: those that at least one tier keeps for the other side.
        failed: those that none does, by the reason of the last tier.
        settled: whether nothing was under way any more.
    """

    id: str
    pages: int
    saved: int
    failed: dict[str, int]
    settled: bool

    @classmethod
    def joined(cls, reports: Sequence[HandoffReport]) -> HandoffReport:
        """Of several parts, added up."""
        failed = sum((Counter(report.failed) for report in reports), Counter[str]())
        pages, saved = (sum(getattr(report, name) for report in reports) for name in ("pages", "saved"))
        return cls(reports[0].id, pages, saved, dict(failed), all(report.settled for report in reports))

    @property
    def confirmed(self) -> bool:
        """Whether the other side may be told."""
        return self.settled and self.pages == self.saved


@dataclass(slots=True, eq=False)
class Handoff:
    """One handoff, as far as it was sealed.

    Attributes:
        name: given by the caller.
        keys: uint64[n, 2], of its records.
        codes: u8[n] by tier.
        flying: bool[n] by tier, records that are being saved.
        open: its saves in flight.
    """

    name: str
    keys: Keys
    codes: list[Codes]
    flying: list[NDArray[np.bool_]]
    open: dict[Pending[Any], None] = field(default_factory=dict)


class Handoffs:
    """The latest handoffs of a store; thread-safe.

    Args:
        tiers: how many tiers they go to.
        record_pages: pages of a record.
        growing: a request's records are added to those that it had; else each seal's replace them.
    """

    def __init__(self, tiers: int, record_pages: int, *, growing: bool = True) -> None:
        self._tiers = tiers
        self._step = record_pages
        self._growing = growing
        self._lock = threading.Lock()
        self._kept: dict[str, Handoff] = {}

    def begin(self, name: str, keys: Keys) -> tuple[Handoff, list[NDArray[np.bool_]]]:
        """A handoff, and which of the request's records each tier has still to be given.

        Args:
            name: of the handoff.
            keys: uint64[n, 2], of the request's complete records, or those of its latest checkpoint.

        Returns:
            The handoff; bool[n] by tier, records that count as being saved from now on.

        Raises:
            UsageFault: the name stands for another request's pages.
        """
        with self._lock:
            kept = self._kept.setdefault(name, self._new(name))
            if not self._growing and not np.array_equal(kept.keys, keys):
                kept = self._kept[name] = self._replaced(kept, keys)
            shared = min(len(kept.keys), len(keys))
            if not np.array_equal(kept.keys[:shared], keys[:shared]):
                raise UsageFault(f"handoff {name!r} is another request's; release it, or take another name")
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
            todo, count, more = [], len(keys), len(keys) - len(kept.keys)
            if more > 0:
                kept.keys = keys.copy()
            for tier in range(self._tiers):
                if more > 0:
                    fresh = np.full(more, _UNTRIED, np.uint8)
                    kept.codes[tier] = np.concatenate([kept.codes[tier], fresh])
                    kept.flying[tier] = np.concatenate([kept.flying[tier], np.zeros(more, np.bool_)])
                todo.append((kept.codes[tier][:count] != Code.OK) & ~kept.flying[tier][:count])
                kept.flying[tier][:count] |= todo[-1]
        return kept, todo

    def _replaced(self, old: Handoff, keys: Keys) -> Handoff:
        """A handoff of other records, of which those that a tier keeps already need not be given to it."""
        new, where = self._new(old.name), {key.tobytes(): at for at, key in enumerate(old.keys)}
        at = np.array([where.get(key.tobytes(), -1) for key in keys], np.int64)
        new.keys = keys.copy()
        for tier, codes in enumerate(old.codes):
            there = np.isin(at, np.flatnonzero(codes == Code.OK))
            new.codes[tier] = np.where(there, np.uint8(Code.OK), np.uint8(_UNTRIED))
            new.flying[tier] = np.zeros(len(keys), np.bool_)
        for save in list(old.open):  # they go on, and whoever waits for the handoff waits for them
            self._watch(new, save)
        return new

    def _new(self, name: str) -> Handoff:
        return Handoff(
            name,
            np.zeros((0, 2), np.uint64),
            [np.zeros(0, np.uint8) for _ in range(self._tiers)],
            [np.zeros(0, np.bool_) for _ in range(self._tiers)],
        )

    def settled(self, handoff: Handoff, tier: int, numbers: NDArray[np.int64], codes: Codes) -> None:
        """One tier has answered for some records."""
        with self._lock:
            handoff.codes[tier][numbers] = codes
            handoff.flying[tier][numbers] = False

    def watch(self, handoff: Handoff, save: Pending[Any]) -> None:
        """A save belongs to a handoff until it settles."""
        with self._lock:
            self._watch(handoff, save)

    def _watch(self, handoff: Handoff, save: Pending[Any]) -> None:
        handoff.open[save] = None
        save.on_done(lambda _: handoff.open.pop(save, None))

    def open(self, name: str) -> Sequence[Pending[Any]]:
        """Its saves in flight."""
        with self._lock:
            kept = self._kept.get(name)
            return [] if kept is None else list(kept.open)

    def report(self, name: str) -> HandoffReport:
        """What became of it so far; no pages for one that is not known."""
        with self._lock:
            kept = self._kept.get(name) or self._new(name)
            codes = np.stack(kept.codes) if self._tiers else np.zeros((1, 0), np.uint8)
            settled = not any(flying.any() for flying in kept.flying)
        ok = (codes == Code.OK).any(axis=0)
        counted, step = Counter(_reason(code) for code in codes[-1, ~ok].tolist()), self._step
        failed = {reason: count * step for reason, count in sorted(counted.items())}
        return HandoffReport(name, len(ok) * step, int(ok.sum()) * step, failed, settled)

    def forget(self, name: str) -> None:
        """It has ended."""
        with self._lock:
            self._kept.pop(name, None)


def _reason(code: int) -> str:
    return "not settled" if code == _UNTRIED else Code(code).name.lower()
