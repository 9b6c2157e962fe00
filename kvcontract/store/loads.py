"""Loads in flight: pages and leases stay with them until they settle, whoever still waits (A3, A4).

A load fills the missing pages of some records, a stretch of the chain.  Those that are resident already, past
a hole, since a save in flight pins them, are kept meanwhile and not loaded again (A17).  Others who want one
of its records wait for it instead of loading the same (A16).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.handles import Reservation
from kvcontract.pool.index import Keys, Pages
from kvcontract.pool.pool import BlockPool
from kvcontract.store.explain import Cut
from kvcontract.store.marks import Generations
from kvcontract.store.rank import Rank
from kvcontract.store.search import Search
from kvcontract.store.stats import Tally
from kvcontract.store.workers import Source, Verdict
from kvcontract.tiers.base import Clock, Code, Codes, Tier


class Guard:
    """Pins pages that are resident past a hole: no hold can own a page without those before it (B14)."""

    def __init__(self, pool: BlockPool, keys: Keys) -> None:
        self._pool = pool
        with pool.match(keys) as hold:
            self.pages = hold.pages.copy()
            pool.pin(self.pages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.unpin(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive pages of the chain.

    Attributes:
        first: number of its first page.
        count: how many.
        pages: a reservation: they are to be loaded; a guard: they are resident.
    """

    first: int
    count: int
    pages: Reservation | Guard

    @property
    def end(self) -> int:
        """Number of the page after it."""
        return self.first + self.count

    @property
    def fresh(self) -> bool:
        """Whether it is to be loaded."""
        return isinstance(self.pages, Reservation)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A load in flight.

    Attributes:
        owned: gives leases and pages back, as far as they were not consumed.
        numbers: int64[r], of the records that are loaded.
        wanted: int64[n], numbers of the pages that are filled.
        rows: int64[n], which of the records each belongs to.
        origin: int16[r], 1 + number of the tier that gives each (most of) it.
        last: int32[r], the last page of each record; 0 where that is not part of the load.
        generations: uint32[r], of its occupants.
        op: settles when nothing touches the pages any more.
        begun: on the store's clock.
        deadline: of the wait for it, likewise.
        ended: settles when what arrived has been registered, and everything else is back.
        free: settles when others may bring its pages: it has ended, or has had its tier's time.
    """

    search: Search
    sources: Sequence[Source]
    owned: ExitStack
    stretches: Sequence[Stretch]
    numbers: NDArray[np.int64]
    wanted: NDArray[np.int64]
    rows: NDArray[np.int64]
    origin: NDArray[np.int16]
    last: Pages
    generations: Generations
    op: Pending[Verdict]
    begun: float
    deadline: float
    ended: Pending[None] = field(default_factory=Pending)
    free: Pending[None] = field(default_factory=Pending)

    @property
    def names(self) -> str:
        """Of the tiers."""
        return "+".join(source.tier.name for source in self.sources)

    @property
    def keys(self) -> Keys:
        """uint64[r, 2], of the records that are loaded."""
        return self.search.records[self.numbers]


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """Records that a load has brought, and where they are known to be stored.

    Attributes:
        pages: int32[n], the last page of each, held or cached.
        numbers: int64[n], of the records in the chain.
        held: whether somebody holds them now.
        begun: when the load began, on the store's clock.
    """

    search: Search
    source: Source
    pages: Pages
    numbers: NDArray[np.int64]
    generations: Generations
    held: bool
    begun: float


class Loads:
    """Begins loads and ends them; thread-safe where loads settle.

    Args:
        tally: where everything is counted.
        clock: the store's.
        landed: told of records that arrived, per tier that has all of a record.
    """

    def __init__(self, tally: Tally, clock: Clock, landed: Callable[[Landed], object]) -> None:
        self._tally = tally
        self._clock = clock
        self._landed = landed
        self._lock = threading.Lock()
        self._open: dict[Load, None] = {}
        self._by_key: dict[tuple[Rank, bytes], Load] = {}
        # Those that have had their tier's time: others need not wait for them, but ask elsewhere.
        self._slow: dict[tuple[Rank, bytes, str], Load] = {}

    @property
    def pending(self) -> tuple[Pending[None], ...]:
        """Loads in flight, oldest first."""
        with self._lock:
            return tuple(load.ended for load in self._open)

    def of(self, rank: Rank, key: Keys) -> Pending[None] | None:
        """Settles when whatever brings a record, uint64[2], has ended or given way; None: nothing does."""
        with self._lock:
            load = self._by_key.get((rank, key.tobytes()))
        return None if load is None else load.free

    def slow(self, rank: Rank, key: Keys, tier: Tier) -> bool:
        """Whether a tier is still reading a record (uint64[2]) for somebody, and has had its time for it."""
        with self._lock:
            return (rank, key.tobytes(), tier.name) in self._slow

    def unclaimed(self, rank: Rank, keys: Keys, *tiers: Tier) -> int:
        """How many leading records, uint64[n, 2], no load brings already, nor these tiers slowly."""
        with self._lock:
            for at, key in enumerate(keys):
                name = key.tobytes()
                slow = self._slow and any((rank, name, tier.name) in self._slow for tier in tiers)
                if slow or (rank, name) in self._by_key:
                    return at
            return len(keys)

    def begin(
        self,
        search: Search,
        sources: Sequence[Source],
        origin: NDArray[np.int16],
        stretches: Sequence[Stretch],
        owned: ExitStack,
        deadline: float,
    ) -> Load:
        """Start to fill pages.

        Args:
            search: for whom.
            sources: rows [r, columns] of each, of the records of which a page is to be filled.
            origin: int16[r].
            stretches: in order, from the first missing page on.
            owned: leases and pages; the load takes them over.
            deadline: of the load, on the loop's clock.
        """
        fresh = [item for item in stretches if item.fresh]
        wanted = np.concatenate([np.arange(item.first, item.end) for item in fresh])
        numbers, rows = np.unique(wanted // search.step, return_inverse=True)
        blocks = np.zeros((len(numbers), search.step), np.int32)  # 0: resident, not to be written again
        blocks[rows, wanted % search.step] = np.concatenate([item.pages.pages for item in fresh])
        last = _last_pages(search, numbers, stretches)
        generations = search.rank.pool.generation[last]
        begun = self._clock()
        op = search.workers.load(sources, search.records[numbers], blocks, deadline, key=search.ask.key)
        kept = owned.pop_all()
        chain = numbers, wanted, rows
        load = Load(search, sources, kept, stretches, *chain, origin, last, generations, op, begun, deadline)
        op.on_done(lambda verdict: self._count(load, verdict))
        with self._lock:
            self._open[load] = None
            for key in load.keys:
                self._by_key[search.rank, key.tobytes()] = load
        return load

    async def finish(self, load: Load) -> None:
        """Wait for a load and extend the search's hold; at its deadline, or if cancelled, leave it behind."""
        search = load.search
        try:
            verdict = await wait_until(load.op, load.deadline)
        except BaseException as error:
            # A3: only the wait is abandoned; pages and leases stay with the operation until it settles.
            self._tally.count("loads_abandoned")
            if load.deadline < search.deadline and isinstance(error, TimeoutError):
                self._give_way(load)
            load.op.on_done(lambda verdict: self._late(load, verdict))
            if not isinstance(error, TimeoutError):
                raise
            search.degrade(f"{load.names}: load timed out")
            return
        try:
            self._commit(load, verdict)
        finally:
            self._end(load)

    def _give_way(self, load: Load) -> None:
        """The tier's time is over, not the resolve's: others may bring the pages instead."""
        with self._lock:
            for key in load.keys:
                name = key.tobytes()
                if self._by_key.get((load.search.rank, name)) is load:
                    del self._by_key[load.search.rank, name]
                for source in load.sources:
                    self._slow[load.search.rank, name, source.tier.name] = load
        load.free.settle(None)

    def _commit(self, load: Load, verdict: Verdict) -> None:
        search, pool, at = load.search, load.search.rank.pool, 0
        codes, origin = verdict.codes[load.rows], load.origin[load.rows]
        for stretch in load.stretches:
            if isinstance(stretch.pages, Guard):
                search.regrow(stretch.end)  # it is in the chain now; the guard ends with the load
                if search.at < stretch.end:
                    break
                continue
            good = _leading(codes[at : at + stretch.count])
            keys = search.keys[stretch.first : stretch.end]
            told = search.content(stretch.first, stretch.end) if pool.events is not None else None
            search.hold = pool.commit(stretch.pages, keys, good, base=search.hold, content=told)
            search.origin[stretch.first : stretch.first + good] = origin[at : at + good]
            at += good
            if good < stretch.count:
                self._blame(load, verdict, at)
                break
        ends = (load.numbers + 1) * search.step
        whole = (ends <= search.at) & (verdict.codes == Code.OK)
        pages = search.hold.pages[ends[whole] - 1]
        self._tell(load, np.flatnonzero(whole), pages, pool.generation[pages], held=True)

    def _late(self, load: Load, verdict: Verdict) -> None:
        """A4: what lands after everybody left is still registered; runs in the thread that settles."""
        search, pool, at, found = load.search, load.search.rank.pool, 0, 0
        codes = verdict.codes[load.rows]
        try:
            for stretch in load.stretches:
                if isinstance(stretch.pages, Guard):
                    continue
                good = _leading(codes[at : at + stretch.count])
                keys = search.keys[stretch.first : stretch.end]
                parent = search.keys[stretch.first - 1].copy() if stretch.first else None
                told = search.content(stretch.first, stretch.end) if pool.events is not None else None
                found += pool.commit_late(stretch.pages, keys, good, parent=parent, content=told)
                at += good
                if good < stretch.count:
                    break
            self._tally.count("pages_landed_late", found)
            done = np.searchsorted(load.rows, np.arange(len(load.numbers)), side="right") <= at
            whole = np.flatnonzero(done & (load.last > 0))
            self._tell(load, whole, load.last[whole], load.generations[whole], held=False)
        finally:
            self._end(load)

    def _tell(
        self, load: Load, rows: NDArray[np.int64], pages: Pages, generations: Generations, *, held: bool
    ) -> None:
        for source in load.sources:
            mine = (source.rows[rows] >= 0).all(axis=1)
            if mine.any():
                numbers = load.numbers[rows[mine]]
                self._landed(
                    Landed(load.search, source, pages[mine], numbers, generations[mine], held, load.begun)
                )

    def _blame(self, load: Load, verdict: Verdict, at: int) -> None:
        """Say what was wrong with the first page that did not arrive whole."""
        row = int(load.rows[at])
        code = Code(int(verdict.codes[row]))
        load.search.degrade(f"{load.names}: {code.name.lower()}")
        workers = tuple(np.flatnonzero(verdict.by_worker[:, row] != Code.OK).tolist())
        number = int(load.wanted[at])
        cut = Cut(
            load.names, number, f"load: {code.name.lower()}", load.search.workers.part.groups, (), workers
        )
        load.search.cuts[load.names] = cut

    def _count(self, load: Load, verdict: Verdict) -> None:
        codes = verdict.codes[load.rows]
        bad = codes[codes != Code.OK]
        for code, count in sorted(Counter(bad.tolist()).items()):
            self._tally.count(f"pages_{Code(code).name.lower()}_{load.names}", count)
        seconds, ok = self._clock() - load.begun, verdict.codes == Code.OK
        for source in load.sources:
            mine = (source.rows >= 0) & ok[:, None]
            share = load.search.workers.loaded_record_bytes * int(mine.sum()) // load.search.workers.columns
            pages = int(mine.any(axis=1)[load.rows].sum())
            self._tally.count(f"pages_loaded_{source.tier.name}", pages)
            self._tally.moved(source.tier.name, "load", pages, share, seconds)

    def _end(self, load: Load) -> None:
        load.owned.close()
        with self._lock:
            self._open.pop(load, None)
            for key in load.keys:
                name = (load.search.rank, key.tobytes())
                if self._by_key.get(name) is load:
                    del self._by_key[name]
                for source in load.sources if self._slow else ():
                    if self._slow.get((*name, source.tier.name)) is load:
                        del self._slow[(*name, source.tier.name)]
        load.ended.settle(None)
        if not load.free.done:
            load.free.settle(None)


def _last_pages(search: Search, numbers: NDArray[np.int64], stretches: Sequence[Stretch]) -> Pages:
    """The last page of each record, int32[n]; 0 where the stretches end before it."""
    pages = np.concatenate([item.pages.pages for item in stretches])
    at = (numbers + 1) * search.step - 1 - stretches[0].first
    found: Pages = np.where(at < len(pages), pages[np.minimum(at, len(pages) - 1)], 0).astype(np.int32)
    return found


def _leading(codes: Codes) -> int:
    """Leading pages that arrived whole."""
    bad = np.flatnonzero(codes != Code.OK)
    return int(bad[0]) if len(bad) else len(codes)


def resident_stretches(first: int, end: int, resident: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Cut pages `first` to `end` into runs that are all resident or all missing: (first, count, resident).

    Args:
        first: number of the first page.
        end: number of the page after the last.
        resident: bool[end - first].
    """
    edges = (np.flatnonzero(np.diff(resident)) + 1 + first).tolist()
    marks = [first, *edges, end]
    return [(at, last - at, bool(resident[at - first])) for at, last in pairwise(marks) if last > at]
