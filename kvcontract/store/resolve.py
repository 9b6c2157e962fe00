"""Resolve: the longest prefix that is resident, or can be made so before a deadline.

One coroutine per request, all on the store's loop, so that its state has one owner.  The device is asked
first, then each tier in order for what is still missing, until nothing more is found.  Whatever goes wrong is
a shorter hit with a counted reason (R4); nothing found is lost (A4), and nothing taken is kept (A6).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.wire import Part
from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.handles import Hold, Reservation
from kvcontract.pool.index import Keys
from kvcontract.store.policy import DEVICE, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.stats import Tally
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Code, Codes, Lease, Op, Tier

FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.1
COLD_MISSES_TO_OPEN: Final = 3


class Breaker:
    """Whether full-hit resolves may still park: cold producers are not waited for again and again (A8)."""

    def __init__(self) -> None:
        self._cold: Counter[tuple[str, ResolvePolicy]] = Counter()

    def open(self, rank: str, policy: ResolvePolicy) -> bool:
        """Whether later requests should not park."""
        return self._cold[rank, policy] >= COLD_MISSES_TO_OPEN

    def hit(self, rank: str, policy: ResolvePolicy) -> None:
        """A request hit in full; while open nobody parks, so only a first shot closes it."""
        del self._cold[rank, policy]

    def cold(self, rank: str, policy: ResolvePolicy) -> None:
        """A request waited in vain."""
        self._cold[rank, policy] += 1


@dataclass(slots=True)
class Search:
    """One resolve on its way.

    Attributes:
        keys: uint64[n, 2], the pages that may be hit (A12).
        hold: what is pinned so far; replaced as the hit grows.
        deadline: on the loop's clock.
        sources: pages by where they came from.
        reasons: why the hit is shorter than it might be.
    """

    rank: Rank
    worker: Worker
    keys: Keys
    hold: Hold
    policy: ResolvePolicy
    deadline: float
    sources: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    @property
    def missing(self) -> Keys:
        """Keys of the pages not held yet."""
        return self.keys[self.hold.hit_pages :]

    def degrade(self, reason: str) -> None:
        """Note why the hit is shorter."""
        if reason not in self.reasons:
            self.reasons.append(reason)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A load in flight: its pages and its lease stay with it until it settles, waited for or not (A3).

    Attributes:
        owned: gives lease and pages back, as far as they were not consumed.
        pages: where it writes.
        keys: uint64[n, 2], names of the pages.
        parent: key of the page before them, or None.
        op: settles when nothing touches the pages any more.
        ended: settles when what arrived has been registered, and everything else is back.
    """

    rank: Rank
    tier: Tier
    owned: ExitStack
    pages: Reservation
    keys: Keys
    parent: NDArray[np.uint64] | None
    op: Op
    ended: Pending[None] = field(default_factory=Pending)


class Resolver:
    """Runs resolves; knows which loads are in flight.

    Args:
        part: what is saved and restored as one unit.
        tiers: asked in order.
        tally: where everything is counted.
    """

    def __init__(self, part: Part, tiers: Sequence[Tier], tally: Tally) -> None:
        self._part = part
        self._tiers = tuple(tiers)
        self._tally = tally
        self._breaker = Breaker()
        self._searching: set[asyncio.Timeout] = set()
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._lock = threading.Lock()
        self._loads: set[Load] = set()

    async def resolve(self, search: Search, prompt_tokens: int) -> KvPrefix:
        """The longest prefix; on any exception nothing stays taken."""
        self._tally.count("resolves")
        search.sources[DEVICE] = search.hold.hit_pages
        try:
            if len(search.missing):
                await self._while_open(search)
            return self._prefix(search, prompt_tokens)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            self._tally.count("resolves_cancelled" if cancelled else "resolves_failed")
            if search.hold.live:
                search.hold.release()
            raise

    async def conclude(self) -> None:
        """End every search now, with what it holds; returns when the last has ended."""
        while self._searching:
            for scope in self._searching:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(0)  # they end within a few rounds of the loop: nothing waits after a cancel

    async def _while_open(self, search: Search) -> None:
        scope = asyncio.timeout(None)
        self._searching.add(scope)
        try:
            async with scope:
                await self._ask_tiers(search)
        except TimeoutError:
            if not scope.expired():
                raise
            search.degrade("the store was closed")
        finally:
            self._searching.discard(scope)

    def _prefix(self, search: Search, prompt_tokens: int) -> KvPrefix:
        hold, page = search.hold, search.rank.pool.page_tokens
        hit = hold.hit_pages * page
        sources = {name: pages * page for name, pages in search.sources.items() if pages}
        for name, tokens in sources.items():
            self._tally.hit(name, tokens)
        self._tally.hit("computed", prompt_tokens - hit)
        for reason in search.reasons:
            self._tally.degrade(reason)
        if not hit:
            hold.release()
        return KvPrefix(
            search.rank.name,
            hit,
            MappingProxyType(dict.fromkeys(self._part.groups, hit)),
            hold if hit else None,
            MappingProxyType(sources),
            tuple(search.reasons),
        )

    async def _ask_tiers(self, search: Search) -> None:
        rank, policy = search.rank.name, search.policy
        parks = policy.full_hit and not self._breaker.open(rank, policy)
        pause = FIRST_PAUSE_S
        while True:
            await self._round(search)
            if not len(search.missing):
                if policy.full_hit:
                    self._breaker.hit(rank, policy)
                return
            if not parks:
                return  # A7: plain mode concludes on a miss at once
            if not await self._landed(search, pause):
                search.degrade("full hit did not land in time")
                self._breaker.cold(rank, policy)
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _round(self, search: Search) -> None:
        """Ask every tier in turn, again and again as long as others find something in between."""
        found, last = True, None
        while found:
            found = False
            for tier in self._tiers:
                if tier is last:
                    return  # it gave what it had, and nobody has added to it
                before = search.hold.hit_pages
                await self._extend(search, tier)
                if search.hold.hit_pages > before:
                    found, last = True, tier

    async def _landed(self, search: Search, pause: float) -> bool:
        """Wait a little for a producer; False once the deadline leaves no time for that (A7)."""
        loop = asyncio.get_running_loop()
        if loop.time() + pause >= search.deadline:
            return False
        await asyncio.sleep(pause)
        self._regrow(search)
        return True

    def _regrow(self, search: Search) -> None:
        """Pages that arrived on the device meanwhile are not loaded (A17)."""
        if search.rank.pool.probe(search.keys) > search.hold.hit_pages:
            grown = search.rank.pool.match(search.keys)
            gained = grown.hit_pages - search.hold.hit_pages
            if gained > 0:
                search.hold, grown = grown, search.hold
                search.sources[DEVICE] += gained
            grown.release()

    def _late(self, search: Search) -> bool:
        if asyncio.get_running_loop().time() < search.deadline:
            return False
        search.degrade("deadline")  # A9: nothing further is issued
        return True

    async def _extend(self, search: Search, tier: Tier) -> None:
        """Continue the hit from one tier, if it has the next pages."""
        while len(search.missing) and not self._late(search):
            asked = search.hold.hit_pages
            lease = await self._lookup(search, tier)
            if lease is None:
                return
            with ExitStack() as owned:  # A6: every branch that does not load releases the lease
                owned.enter_context(lease)
                self._regrow(search)
                skip = search.hold.hit_pages - asked
                count = self._run_length(search, tier, lease, skip)
                if not count:
                    return
                pages = search.rank.pool.reserve(count)
                if pages is not None:
                    owned.enter_context(pages)
                    op = self._begin(search, tier, lease, pages, skip)
                    parent = search.hold.keys[-1].copy() if search.hold.hit_pages else None
                    keys = search.missing[:count]
                    load = Load(search.rank, tier, owned.pop_all(), pages, keys, parent, op)
                    await self._finish(search, load)
                    return
            # A5: the lease is back before the pause; admission could not run the request either.
            if not await self._space(search, count):
                search.degrade("no room on the device")
                return
            self._regrow(search)

    async def _lookup(self, search: Search, tier: Tier) -> Lease | None:
        keys = search.worker.record_keys(self._part, search.missing)
        query = tier.lookup(keys, search.deadline)
        try:
            lease = await wait_until(query, search.deadline)
        except BaseException as error:
            query.on_done(Lease.release)  # A2: whoever gave up leaves this behind
            if not isinstance(error, TimeoutError):
                raise
            search.degrade(f"{tier.name}: lookup timed out")
            return None
        if lease.failed:  # A10: the next tier is still asked
            self._tally.count(f"lookups_failed_{tier.name}")
            search.degrade(f"{tier.name}: lookup failed")
            return None
        if lease.present.shape != keys.shape:  # A15
            lease.release()
            self._tally.count("tier_answers_refused")
            search.degrade(f"{tier.name}: answered for {len(lease.present)} records of {len(keys)}")
            return None
        return lease

    def _run_length(self, search: Search, tier: Tier, lease: Lease, skip: int) -> int:
        """Leading missing pages of which every record is there: AND over shards (R2)."""
        shards = search.worker.shards(self._part)
        present: NDArray[np.bool_] = np.all(lease.present.reshape(-1, shards)[skip:], axis=1)
        count = len(present) if present.all() else int(present.argmin())
        if len(present) and not count:
            self._tally.count(f"misses_{tier.name}")
        return count

    async def _space(self, search: Search, count: int) -> bool:
        """Wait until pages come back; False at the deadline, or at once for what can never fit (R6)."""
        pool = search.rank.pool
        if search.hold.hit_pages + count > pool.total:
            return False
        event = asyncio.Event()
        waiters = self._waiters.setdefault(search.rank.name, set())
        waiters.add(event)
        try:
            async with asyncio.timeout_at(search.deadline):
                while True:
                    event.clear()  # before looking: what comes back after it wakes us again
                    gauges = pool.gauges()
                    if gauges.available - gauges.entitled >= count:
                        return True
                    await event.wait()
        except TimeoutError:
            return False
        finally:
            waiters.discard(event)

    def awaited(self, rank: str) -> bool:
        """Whether somebody waits for room on a rank; from any thread."""
        return bool(self._waiters.get(rank))

    def pages_came_back(self, rank: str) -> None:
        """Wake those who wait for room; called on the loop."""
        for event in self._waiters.get(rank, ()):
            event.set()

    def _begin(self, search: Search, tier: Tier, lease: Lease, pages: Reservation, skip: int) -> Op:
        count, shards = len(pages.pages), search.worker.shards(self._part)
        rows = np.arange(skip * shards, (skip + count) * shards)
        keys = search.missing[:count]
        return search.worker.load(tier, lease, rows, self._part, keys, pages.pages, search.deadline)

    async def _finish(self, search: Search, load: Load) -> None:
        with self._lock:
            self._loads.add(load)
        try:
            codes = await wait_until(load.op, search.deadline)
        except BaseException as error:
            # A3: only the wait is abandoned; pages and lease stay with the operation until it settles.
            self._tally.count("loads_abandoned")
            load.op.on_done(lambda codes: self._landed_late(load, codes))
            if not isinstance(error, TimeoutError):
                raise
            search.degrade(f"{load.tier.name}: load timed out")
            return
        try:
            good = self._leading(codes, load)
            before = search.hold.hit_pages
            search.hold = search.rank.pool.commit(load.pages, load.keys, good, base=search.hold)
            search.rank.restored(self._part, search.hold.pages[before:])
            search.sources[load.tier.name] += search.hold.hit_pages - before
        finally:
            self._end(load)
        if good < len(load.keys):
            search.degrade(f"{load.tier.name}: {Code(int(codes[good])).name.lower()}")

    def _leading(self, codes: Codes, load: Load) -> int:
        """Leading pages that arrived whole."""
        bad = np.flatnonzero(codes != Code.OK)
        for code, count in Counter(codes[bad].tolist()).items():
            self._tally.count(f"pages_{Code(code).name.lower()}_{load.tier.name}", count)
        good = int(bad[0]) if len(bad) else len(codes)
        self._tally.count(f"pages_loaded_{load.tier.name}", good)
        return good

    def _landed_late(self, load: Load, codes: Codes) -> None:
        """A4: what lands after everybody left is still registered; runs in the thread that settles."""
        try:
            good = self._leading(codes, load)
            found = load.rank.pool.commit_late(load.pages, load.keys, good, parent=load.parent)
            self._tally.count("pages_landed_late", found)
        finally:
            self._end(load)

    def _end(self, load: Load) -> None:
        load.owned.close()
        with self._lock:
            self._loads.discard(load)
        load.ended.settle(None)

    @property
    def searching(self) -> int:
        """Resolves that wait for a tier, a producer or room."""
        return len(self._searching)

    @property
    def loads(self) -> tuple[Pending[None], ...]:
        """Loads in flight."""
        with self._lock:
            return tuple(load.ended for load in self._loads)
