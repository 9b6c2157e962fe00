"""One batch of records on its way to the tiers, and the share of a pool that such batches may pin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, all_of
from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys, Pages
from kvcontract.store.handoffs import Handoff
from kvcontract.store.marks import Flags, Generations, Saving
from kvcontract.store.rank import Berth
from kvcontract.store.worker import After
from kvcontract.tiers.base import Code, SaveClass
from kvcontract.tiers.cipher import NO_KEY, KeyId


@dataclass(frozen=True, slots=True)
class SealReport:
    """What became of one seal, in pages: those of an incomplete record wait for a later one.

    A snapshot counts as a page, and so does a page of each window.

    Attributes:
        pages: pages that had to be saved; 0 if there was nothing new (C9).
        saved: pages now stored in every tier that is given them from the device; others follow from there.
        failed: pages that are not, by reason, ``shed`` among them; they are tried again (C4, C5).
    """

    pages: int
    saved: int
    failed: dict[str, int]

    @classmethod
    def joined(cls, reports: Sequence[SealReport]) -> SealReport:
        """Of several parts, added up."""
        failed = sum((Counter(report.failed) for report in reports), Counter[str]())
        pages, saved = (sum(getattr(report, name) for report in reports) for name in ("pages", "saved"))
        return cls(pages, saved, dict(failed))


NOTHING = SealReport(0, 0, {})


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Complete records of one sequence, from its start.

    Attributes:
        keys: uint64[n, 2].
        pages: int32[n, pages of a record].
        first: number of the first record that is looked at.
        generations: uint32[n - first], of the occupants of their last pages.
        content: what they hold, if somebody is told (I7).
        key: that their records are encrypted with where they leave the process; None: none is known.
    """

    keys: Keys
    pages: Pages
    generations: Generations
    content: Content | None
    first: int = 0
    key: KeyId | None = NO_KEY

    @property
    def last(self) -> Pages:
        """int32[n - first], the last page of each record that is looked at: it stands for the record."""
        return self.pages[self.first :, -1]


@dataclass(slots=True, eq=False)
class Batch:
    """Records on their way to some tiers.

    Attributes:
        numbers: int64[k], which records of the run.
        todo: bool[tiers, k], which of them each tier gets.
        cls: by tier.
        budgeted: whether its pins count.
        shed: int64[m], which records of the run were not even tried.
        capped: bool[tiers, k], those that a tier has no room for among what it is being given already.
        report: settles once every copy has landed.
        done: settles once nothing is tried again for it, either.
        savings: by tier, its marks.
        blocks: int32[k, pages of a record].
        codes: u8[tiers, k].
        again: bool[tiers, k], those that failed after another try was asked for.
    """

    rank: Berth
    run: Run
    numbers: NDArray[np.int64]
    todo: NDArray[np.bool_]
    cls: Sequence[SaveClass]
    budgeted: bool
    handoff: Handoff | None = None
    after: After | None = None
    shed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    capped: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), np.bool_))
    report: Pending[SealReport] = field(default_factory=Pending)
    done: Pending[None] = field(default_factory=Pending)
    savings: dict[int, Saving] = field(default_factory=dict)
    blocks: Pages = field(init=False)
    codes: NDArray[np.uint8] = field(init=False)
    again: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = self.run.pages[self.numbers]
        self.codes = np.zeros(self.todo.shape, np.uint8)
        if self.capped.size:
            self.codes[self.capped] = Code.SHED
        self.again = np.zeros(self.todo.shape, np.bool_)

    @property
    def pages(self) -> Pages:
        """int32[k * pages of a record], all of them."""
        return self.blocks.reshape(-1)

    @property
    def step(self) -> int:
        """Pages of a record."""
        return int(self.blocks.shape[1])

    def of(self, tier: int) -> NDArray[np.int64]:
        """Which rows of the batch a tier gets."""
        return np.flatnonzero(self.todo[tier])

    def outcome(self) -> SealReport:
        """What became of it, after the last copy."""
        worst = self.codes.max(axis=0, initial=Code.OK)
        ok: Flags = worst == Code.OK
        counted, step = sorted(Counter(worst[~ok].tolist()).items()), self.step
        failed = {Code(code).name.lower(): n * step for code, n in counted}
        if shed := len(self.shed):
            failed["shed"] = failed.get("shed", 0) + shed * step
        return SealReport((len(self.numbers) + shed) * step, int(ok.sum()) * step, failed)

    @property
    def shed_pages(self) -> int:
        """Pages that some tier was not given, to keep what is under way within bounds."""
        capped = int(self.capped.any(axis=0).sum()) if self.capped.size else 0
        return (len(self.shed) + capped) * self.step


@dataclass(slots=True, eq=False)
class Remembered:
    """What a retired request has left to be saved.

    Attributes:
        after: what its blocks' writing is known by (C2): it may not have ended yet when they are saved.
        saves: that were begun for it.
        done: settles once nothing is left to begin, or it is given up, and all of them have ended (C8).
    """

    after: After | None = field(default=None, kw_only=True)
    saves: list[Pending[None]] = field(default_factory=list, kw_only=True)
    done: Pending[None] = field(default_factory=Pending, kw_only=True)

    def end(self) -> None:
        """Nothing more begins for it."""
        all_of(self.saves).on_done(lambda _: self.done.settle(None))


@dataclass(slots=True, eq=False)
class Shed(Remembered):
    """Records of a retired request that still want to be saved.

    Each is tried once in each tier: one that fails again would keep those behind it waiting for ever.

    Attributes:
        page_keys: of their pages.
        open: bool[tiers, n], what has not been tried.
        fresh: it has not been looked at yet.
        key: see `Run`.
    """

    keys: Keys
    page_keys: Keys
    content: Content | None
    key: KeyId | None
    open: NDArray[np.bool_]
    fresh: bool = True

    @property
    def first(self) -> int:
        """Number of the first record that is left; as many as there are if none is."""
        left = np.flatnonzero(self.open.any(axis=0))
        return int(left[0]) if len(left) else len(self.keys)

    def cut(self, records: int, record_tokens: int) -> Content | None:
        """What the first of its records hold."""
        told = self.content
        return None if told is None else Content(told.token_ids[: records * record_tokens], told.scope)

    def tried(self, first: int, batch: Batch | None) -> bool:
        """Records from `first` on were looked at; all but what the batch has shed is done with.

        Returns:
            Whether some are left.
        """
        before, self.fresh = self.open.copy(), False
        self.open[:, first:] = False  # what is not resident any more cannot be saved
        if batch is not None:
            self.open[:, batch.shed] = before[:, batch.shed]
            if batch.capped.size:
                self.open[:, batch.numbers] = batch.capped
        return bool(self.open.any())


class SavingBudgets:
    """How many records each tier is being given, and how many it may be.

    Not thread-safe.

    Args:
        limits: records by tier; None: any number.
    """

    def __init__(self, limits: Sequence[int | None]) -> None:
        self._limits = tuple(limits)
        self._used = [0] * len(limits)
        self.limited = any(limit is not None for limit in limits)

    def cap(self, tier: int, wanted: Flags) -> Flags:
        """Which of the records that are wanted, bool[n], the tier has no room for: the last ones."""
        limit = self._limits[tier]
        over = np.zeros(len(wanted), np.bool_)
        if limit is not None:
            over[np.flatnonzero(wanted)[max(0, limit - self._used[tier]) :]] = True
        return over

    def take(self, tier: int, records: int) -> None:
        """Records are on their way to a tier."""
        self._used[tier] += records

    def give(self, tier: int, records: int) -> None:
        """Undo one `take`."""
        self._used[tier] -= records


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
