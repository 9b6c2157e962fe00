"""Seal and retire: complete pages on their way to the tiers.

A full page is immutable, so sealing copies it from where it lies: guards pin the page until every copy has
landed (C1), while its owner goes on or is gone.  Nothing here waits: what a save becomes is settled on the
thread that finishes it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.wire import Part
from kvcontract.core.pending import Pending, all_of
from kvcontract.pool.request import RequestKv
from kvcontract.store.rank import Rank
from kvcontract.store.stats import Tally
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Code, Codes, SaveClass, Tier

After = Callable[[], object]
"""Waited for, on the store's own thread, before the first byte is read (C2)."""


@dataclass(frozen=True, slots=True)
class SealReport:
    """What became of one seal.

    Attributes:
        pages: pages submitted; 0 if there was nothing new (C9).
        saved: pages now stored in every tier.
        failed: pages that are not, by reason; they are tried again at retire (C4).
    """

    pages: int
    saved: int
    failed: dict[str, int]


NOTHING = SealReport(0, 0, {})


class Sealer:
    """Runs saves; knows which are in flight.

    Args:
        part: what is saved and restored as one unit.
        tiers: all of them get every page.
        tally: where everything is counted.
    """

    def __init__(self, part: Part, tiers: Sequence[Tier], tally: Tally) -> None:
        self._part = part
        self._tiers = tuple(tiers)
        self._tally = tally
        self._lock = threading.Lock()
        self._open: set[Pending[SealReport]] = set()

    def seal(
        self,
        rank: Rank,
        worker: Worker,
        req: RequestKv,
        *,
        cls: SaveClass,
        deadline: float,
        after: After | None,
    ) -> Pending[SealReport]:
        """Save the request's complete pages that are not known to be stored.

        Never blocks and never raises for what befalls a save; the report settles once every copy has landed.

        Raises:
            UsageFault: the request is released.
        """
        if req.released:
            raise UsageFault("the request is released: its pages may be another's by now; seal before that")
        pages, keys = req.pages[: req.registered], req.keys
        todo = rank.unsaved(self._part, pages) if len(pages) and self._tiers else np.zeros(0, np.bool_)
        report: Pending[SealReport] = Pending()
        if not todo.any():
            report.settle(NOTHING)  # C9
            return report
        chosen = np.ascontiguousarray(pages[todo])
        rank.pool.pin(chosen)  # C1: the guard outlives the owner
        with self._lock:
            self._open.add(report)
        self._tally.count("pages_sealed", len(chosen))
        ops = [
            worker.save(tier, self._part, keys[todo], chosen, cls, deadline, after) for tier in self._tiers
        ]
        # C12: all copies are awaited before anything is released
        all_of(ops).on_done(lambda codes: self._settle(rank, chosen, codes, report))
        return report

    def _settle(
        self, rank: Rank, pages: NDArray[np.int32], codes: tuple[Codes, ...], report: Pending[SealReport]
    ) -> None:
        worst = np.max(np.stack(codes), axis=0)
        ok = worst == Code.OK
        rank.settled(self._part, pages, ok)
        rank.pool.unpin(pages)
        failed = {Code(code).name.lower(): n for code, n in Counter(worst[~ok].tolist()).items()}
        self._tally.count("pages_saved", int(ok.sum()))
        for reason, count in failed.items():
            self._tally.count(f"pages_not_saved_{reason}", count)
        with self._lock:
            self._open.discard(report)
        report.settle(SealReport(len(pages), int(ok.sum()), failed))

    @property
    def saves(self) -> tuple[Pending[SealReport], ...]:
        """Seals in flight."""
        with self._lock:
            return tuple(self._open)
