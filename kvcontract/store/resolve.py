"""Resolve: the longest prefix that is resident, or can be made so before a deadline.

One coroutine per request, all on the store's loop, so that its state has one owner.  The device is asked
first, then each tier in order for what is still missing, until nothing more is found.  Whatever goes wrong is
a shorter hit with a counted reason (R4); nothing found is lost (A4), and nothing taken is kept (A6).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.layout import Part
from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.handles import Hold, Reservation
from kvcontract.pool.index import Keys
from kvcontract.store.policy import DEVICE, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.stats import Tally
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Code, Codes, Lease, Tier

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

    def first_shot(self, rank: str, policy: ResolvePolicy) -> None:
        """A request hit in full without waiting."""
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
    """A load in flight: its pages and its lease stay with it until it settles, waited for or not (A3)."""

    tier: Tier
    lease: ExitStack
    pages: Reservation
    keys: Keys
    parent: NDArray[np.uint64] | None
    op: Pending[Codes]


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
        self._loads: set[Load] = set()
        self._freed: dict[str, asyncio.Event] = {}

    async def resolve(self, search: Search, prompt_tokens: int) -> KvPrefix:
        """The longest prefix; on any exception nothing stays taken."""
        self._tally.count("resolves")
        search.sources[DEVICE] = search.hold.hit_pages
        try:
            if len(search.missing):
                await self._ask_tiers(search)
            hold = search.hold.take()
        except BaseException:
            if search.hold.live:
                search.hold.release()
            raise
        return self._prefix(search, hold, prompt_tokens)

    def _prefix(self, search: Search, hold: Hold, prompt_tokens: int) -> KvPrefix:
        page = search.rank.pool.page_tokens
        hit = hold.hit_pages * page
        sources = {name: pages * page for name, pages in search.sources.items() if pages}
        for name, tokens in sources.items():
            self._tally.hit(name, tokens)
        self._tally.hit("computed", prompt_tokens - hit)
        for reason in search.reasons:
            self._tally.degrade(reason)
        valid = MappingProxyType(dict.fromkeys(self._part.groups, hit))
        if not hold.hit_pages:
            hold.release()
        return KvPrefix(
            search.rank.name,
            hit,
            valid,
            hold if hold.hit_pages else None,
            MappingProxyType(sources),
            tuple(search.reasons),
        )

    async def _ask_tiers(self, search: Search) -> None:
        parks = search.policy.full_hit and not self._breaker.open(search.rank.name, search.policy)
        pause, first = FIRST_PAUSE_S, True
        while True:
            await self._round(search)
            if not len(search.missing):
                if first and search.policy.full_hit:
                    self._breaker.first_shot(search.rank.name, search.policy)
                return
            if not parks:
                return  # A7: plain mode concludes on a miss at once
            first = False
            if not await self._landed(search, pause):
                search.degrade("full hit did not land in time")
                self._breaker.cold(search.rank.name, search.policy)
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _round(self, search: Search) -> None:
        """Ask every tier in turn, again and again as long as that finds something."""
        found = True
        while found and len(search.missing):
            before = search.hold.hit_pages
            for tier in self._tiers:
                if len(search.missing) and not self._late(search):
                    await self._extend(search, tier)
            found = search.hold.hit_pages > before

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
            search.sources[DEVICE] += max(0, grown.hit_pages - search.hold.hit_pages)
            if grown.hit_pages >= search.hold.hit_pages:
                search.hold.release()
                search.hold = grown
            else:
                grown.release()

    def _late(self, search: Search) -> bool:
        if asyncio.get_running_loop().time() < search.deadline:
            return False
        search.degrade("deadline")  # A9: nothing further is issued
        return True

    async def _extend(self, search: Search, tier: Tier) -> None:
        """Continue the hit from one tier, if it has the next pages."""
        while (lease := await self._lookup(search, tier)) is not None:
            with ExitStack() as owned:  # A6: every branch that does not load releases the lease
                owned.enter_context(lease)
                count = self._run_length(search, tier, lease)
                if not count:
                    return
                reservation = search.rank.pool.reserve(count)
                if reservation is not None:
                    op = self._begin(search, tier, lease, reservation, count)
                    base = search.hold
                    parent = base.keys[-1].copy() if base.hit_pages else None
                    load = Load(tier, owned.pop_all(), reservation, search.missing[:count], parent, op)
                    await self._finish(search, load)
                    return
            # A5: the lease is back before the pause; admission could not run the request either.
            if not await self._space(search, count):
                search.degrade("no room on the device")
                return
            self._regrow(search)
            if not len(search.missing):
                return

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
        if len(lease.present) != len(keys):  # A15
            lease.release()
            self._tally.count("tier_answers_refused")
            search.degrade(f"{tier.name}: answered for {len(lease.present)} records of {len(keys)}")
            return None
        return lease

    def _run_length(self, search: Search, tier: Tier, lease: Lease) -> int:
        """Leading pages of which every record is there: AND over shards (R2)."""
        present: NDArray[np.bool_] = np.all(lease.present.reshape(len(search.missing), -1), axis=1)
        absent = np.flatnonzero(~present)
        count = int(absent[0]) if len(absent) else len(present)
        if not count:
            self._tally.count(f"misses_{tier.name}")
        return count

    async def _space(self, search: Search, count: int) -> bool:
        """Wait until pages come back; False at the deadline."""
        event = self._freed.get(search.rank.name)
        if event is None:
            event = self._freed[search.rank.name] = asyncio.Event()
        event.clear()
        gauges = search.rank.pool.gauges()
        if gauges.available - gauges.entitled >= count:
            return True  # they came back between the refusal and now
        try:
            async with asyncio.timeout_at(search.deadline):
                await event.wait()
        except TimeoutError:
            return False
        return True

    def pages_came_back(self, rank: str) -> None:
        """Wake those who wait for room; called on the loop."""
        event = self._freed.get(rank)
        if event is not None:
            event.set()

    def _begin(
        self, search: Search, tier: Tier, lease: Lease, reservation: Reservation, count: int
    ) -> Pending[Codes]:
        keys = search.missing[:count]
        rows = np.arange(count * search.worker.shards(self._part))
        return search.worker.load(tier, lease, rows, self._part, keys, reservation.pages, search.deadline)

    async def _finish(self, search: Search, load: Load) -> None:
        self._loads.add(load)
        self._tally.gauge("loads", 1)
        try:
            codes = await wait_until(load.op, search.deadline)
        except BaseException as error:
            # A3: only the wait is abandoned; pages and lease stay with the operation until it settles.
            self._abandon(search, load)
            if not isinstance(error, TimeoutError):
                raise
            search.degrade(f"{load.tier.name}: load timed out")
            return
        self._settle(load)
        good = self._leading(codes, load)
        before = search.hold.hit_pages
        search.hold = search.rank.pool.commit(load.pages, load.keys, good, base=search.hold)
        search.rank.restored(self._part, search.hold.pages[before:])
        search.sources[load.tier.name] += search.hold.hit_pages - before
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

    def _settle(self, load: Load) -> None:
        self._loads.discard(load)
        self._tally.gauge("loads", -1)
        load.lease.close()

    def _abandon(self, search: Search, load: Load) -> None:
        self._tally.count("loads_abandoned")
        loop, rank = asyncio.get_running_loop(), search.rank

        def late(codes: Codes) -> None:
            loop.call_soon_threadsafe(self._late_load, rank, load, codes)

        load.op.on_done(late)

    def _late_load(self, rank: Rank, load: Load, codes: Codes) -> None:
        """A4: what lands after everybody left is still registered."""
        self._settle(load)
        good = self._leading(codes, load)
        found = rank.pool.commit_late(load.pages, load.keys, good, parent=load.parent)
        self._tally.count("pages_landed_late", found)

    @property
    def loads(self) -> tuple[Pending[Any], ...]:
        """Operations in flight."""
        return tuple(load.op for load in self._loads)
