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

from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Code, Codes

KEPT: Final = 4096
_UNTRIED: Final = 255


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What became of a handoff's saves.

    Attributes:
        id: the caller's name for it.
        pages: complete pages of the request when it was last sealed.
        saved: those that at least one tier keeps for the other side.
        failed: those that none does, by the reason of the last tier.
        settled: whether nothing was under way any more.
    """

    id: str
    pages: int
    saved: int
    failed: dict[str, int]
    settled: bool

    @property
    def confirmed(self) -> bool:
        """Whether the other side may be told."""
        return self.settled and self.pages == self.saved


@dataclass(slots=True, eq=False)
class _Handoff:
    codes: list[Codes]
    flying: list[NDArray[np.bool_]]
    open: dict[Pending[Any], None] = field(default_factory=dict)


class Handoffs:
    """The latest handoffs of a store; thread-safe.

    Args:
        tiers: how many tiers they go to.
    """

    def __init__(self, tiers: int) -> None:
        self._tiers = tiers
        self._lock = threading.Lock()
        self._kept: dict[str, _Handoff] = {}

    def begin(self, name: str, pages: int) -> list[NDArray[np.bool_]]:
        """Which of the request's pages each tier has still to be given: bool[pages] each; they are flying."""
        with self._lock:
            kept = self._kept.setdefault(name, self._new())
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
            todo = []
            for tier in range(self._tiers):
                more = pages - len(kept.codes[tier])
                if more > 0:
                    fresh = np.full(more, _UNTRIED, np.uint8)
                    kept.codes[tier] = np.concatenate([kept.codes[tier], fresh])
                    kept.flying[tier] = np.concatenate([kept.flying[tier], np.zeros(more, np.bool_)])
                todo.append((kept.codes[tier][:pages] != Code.OK) & ~kept.flying[tier][:pages])
                kept.flying[tier][:pages] |= todo[-1]
        return todo

    def _new(self) -> _Handoff:
        return _Handoff(
            [np.zeros(0, np.uint8) for _ in range(self._tiers)],
            [np.zeros(0, np.bool_) for _ in range(self._tiers)],
        )

    def settled(self, name: str, tier: int, numbers: NDArray[np.int64], codes: Codes) -> None:
        """One tier has answered for some pages."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                kept.codes[tier][numbers] = codes
                kept.flying[tier][numbers] = False

    def watch(self, name: str, save: Pending[Any]) -> None:
        """A save belongs to a handoff until it settles."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                return
            kept.open[save] = None
        save.on_done(lambda _: kept.open.pop(save, None))

    def open(self, name: str) -> Sequence[Pending[Any]]:
        """Its saves in flight."""
        with self._lock:
            kept = self._kept.get(name)
            return [] if kept is None else list(kept.open)

    def report(self, name: str) -> HandoffReport:
        """What became of it so far; no pages for one that is not known."""
        with self._lock:
            kept = self._kept.get(name) or self._new()
            codes = np.stack(kept.codes) if self._tiers else np.zeros((1, 0), np.uint8)
            settled = not any(flying.any() for flying in kept.flying)
        ok = (codes == Code.OK).any(axis=0)
        failed = Counter(_reason(code) for code in codes[-1, ~ok].tolist())
        return HandoffReport(name, len(ok), int(ok.sum()), dict(sorted(failed.items())), settled)

    def forget(self, name: str) -> None:
        """It has ended."""
        with self._lock:
            self._kept.pop(name, None)


def _reason(code: int) -> str:
    return "not settled" if code == _UNTRIED else Code(code).name.lower()
