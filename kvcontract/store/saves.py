"""One batch of pages on its way to the tiers, and the share of a pool that such batches may pin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending
from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys, Pages
from kvcontract.store.handoffs import Handoff
from kvcontract.store.marks import Flags, Generations, Saving
from kvcontract.store.rank import Rank
from kvcontract.store.worker import After
from kvcontract.tiers.base import Code, SaveClass


@dataclass(frozen=True, slots=True)
class SealReport:
    """What became of one seal.

    Attributes:
        pages: pages that had to be saved; 0 if there was nothing new (C9).
        saved: pages now stored in every tier.
        failed: pages that are not, by reason, ``shed`` among them; they are tried again (C4, C5).
    """

    pages: int
    saved: int
    failed: dict[str, int]


NOTHING = SealReport(0, 0, {})


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Complete pages of one sequence, from its start.

    Attributes:
        keys: uint64[n, 2].
        pages: int32[n].
        first: number of the first page that is looked at.
        generations: uint32[n - first], of the occupants of those.
        content: what they hold, if somebody is told (I7).
    """

    keys: Keys
    pages: Pages
    generations: Generations
    content: Content | None
    first: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """Pages on their way to some tiers.

    Attributes:
        numbers: int64[k], which pages of the run.
        todo: bool[tiers, k], which of them each tier gets.
        cls: by tier.
        budgeted: whether its pins count.
        shed: pages that were not even tried.
        report: settles once every copy has landed.
        savings: by tier, its marks.
        pages: int32[k].
        codes: u8[tiers, k].
        again: bool[tiers, k], those that failed after another try was asked for.
    """

    rank: Rank
    run: Run
    numbers: NDArray[np.int64]
    todo: NDArray[np.bool_]
    cls: Sequence[SaveClass]
    budgeted: bool
    handoff: Handoff | None = None
    after: After | None = None
    shed: int = 0
    report: Pending[SealReport] = field(default_factory=Pending)
    savings: dict[int, Saving] = field(default_factory=dict)
    pages: Pages = field(init=False)
    codes: NDArray[np.uint8] = field(init=False)
    again: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = self.run.pages[self.numbers]
        self.codes = np.zeros(self.todo.shape, np.uint8)
        self.again = np.zeros(self.todo.shape, np.bool_)

    def of(self, tier: int) -> NDArray[np.int64]:
        """Which rows of the batch a tier gets."""
        return np.flatnonzero(self.todo[tier])

    def outcome(self) -> SealReport:
        """What became of it, after the last copy."""
        worst = self.codes.max(axis=0, initial=Code.OK)
        ok: Flags = worst == Code.OK
        failed = {Code(code).name.lower(): n for code, n in sorted(Counter(worst[~ok].tolist()).items())}
        if self.shed:
            failed["shed"] = failed.get("shed", 0) + self.shed
        return SealReport(len(self.numbers) + self.shed, int(ok.sum()), failed)


class PinBudget:
    """How many pages of one rank are pinned by saves that may be shed; a page in two saves counts once (B9).

    Not thread-safe.

    Args:
        pages: of the pool.
        limit: most pages that may be pinned.
    """

    def __init__(self, pages: int, limit: int) -> None:
        self._limit = limit
        self._pins = np.zeros(pages, np.int32)
        self._used = 0

    @property
    def left(self) -> int:
        """Pages that may still be pinned."""
        return max(0, self._limit - self._used)

    def take(self, pages: Pages) -> None:
        """Pages (int32[n], none twice) are pinned by one more save."""
        self._pins[pages] += 1
        self._used += int(np.count_nonzero(self._pins[pages] == 1))

    def give(self, pages: Pages) -> None:
        """Undo one `take`."""
        self._pins[pages] -= 1
        self._used -= int(np.count_nonzero(self._pins[pages] == 0))
