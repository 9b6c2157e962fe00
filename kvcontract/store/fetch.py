"""Bringing pages from the tiers: ask, find room, load; and others who want the same wait for it (A16).

Tiers have records, of one page or several, and give each of them whole; of one that is resident in part, only
the missing pages are written.  The device goes on page by page.

Who waits for room holds nothing meanwhile, neither the lease (A5) nor the pages it has already (R6): they
stay matchable, and are matched again afterwards.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.index import Keys
from kvcontract.store.cost import CostModel
from kvcontract.store.explain import Cut
from kvcontract.store.loads import Guard, Loads, Stretch, resident_stretches
from kvcontract.store.room import Lines, Turn
from kvcontract.store.search import Search
from kvcontract.store.stats import Tally
from kvcontract.store.workers import Source
from kvcontract.tiers.base import Lease, Tier

PARTIAL_SHARE: Final = 0.2
"""Of the time there was: when so little is left without room for all, what fits is loaded (A18)."""

_PROBED_AT_ONCE: Final = 256
_MOST_WAITS: Final = 8

Present = NDArray[np.bool_]


class Fetcher:
    """Brings pages from the tiers of one store.

    Args:
        tiers: asked in order.
        tally: where everything is counted.
        loads: what is in flight.
        cost: whether a restore is worth it.
        lines: who waits for room.
        limits_s: by tier, longest time that it may take to answer; None: until the resolve's own deadline.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        tally: Tally,
        loads: Loads,
        cost: CostModel,
        lines: Lines,
        limits_s: Sequence[float | None],
    ) -> None:
        self._tiers = tuple(tiers)
        self._limits_s = {tier.name: limit or math.inf for tier, limit in zip(tiers, limits_s, strict=True)}
        self._tally = tally
        self._loads = loads
        self._cost = cost
        self._lines = lines
        # Per rank, tier and key: settles with whether that record is not there.
        self._flights: dict[tuple[str, str, bytes], Pending[bool]] = {}
        self._letting_go: tuple[str, int] | None = None

    def quiet(self, rank: str) -> bool:
        """Whether what comes back now is what the first in line lets go; called by whoever gives it back."""
        return self._letting_go == (rank, threading.get_ident())

    # Rounds

    async def round(self, search: Search) -> None:
        """Ask the tiers until none of them, and no two of them together, continue the hit."""
        search.partial.clear()
        await self._each(search)
        while search.short and await self._piece_together(search):
            await self._each(search)

    async def _each(self, search: Search) -> None:
        """Ask every tier in turn, again and again as long as others find something in between."""
        found, last = True, None
        while found:
            found = False
            for number, tier in enumerate(self._tiers):
                if number == last:
                    return  # it gave what it had, and nobody has added to it
                before = search.at
                await self._extend(search, number, tier)
                if search.at > before:
                    found, last = True, number

    async def landed(self, search: Search) -> bool:
        """Whether the last record of all is somewhere, so that asking for the others may be worth it (A7)."""
        if not search.short:
            return False
        for tier in self._tiers:
            lease = await self._lookup(search, tier, search.records[-1:])
            if lease is not None:
                with lease:
                    if lease.present.all():
                        return True
        return False

    async def _extend(self, search: Search, number: int, tier: Tier) -> None:
        """Continue the hit from one tier, if it has the next records."""
        waits = 0
        try:
            again = True
            while again and search.short and not search.late():
                waits += search.reserved is not None
                if waits > _MOST_WAITS:
                    return  # room that was waited for went to somebody else, again and again
                key = search.missing[0]
                if self._loads.slow(search.rank, key, tier):
                    return  # it is still at it, and has had its time
                name = search.rank.name, tier.name, key.tobytes()
                ahead = self._loads.of(search.rank, key), self._flights.get(name)
                if ahead != (None, None):
                    again = await self._joined(search, *ahead)
                    continue
                flight: Pending[bool] = Pending()
                self._flights[name] = flight
                flight.on_done(partial(self._landed, name))
                try:
                    again = await self._attempt(search, number, tier, flight)
                finally:
                    if not flight.done:
                        flight.settle(False)
        finally:
            search.spare()

    def _landed(self, name: tuple[str, str, bytes], _absent: bool) -> None:
        del self._flights[name]

    async def _joined(
        self, search: Search, ended: Pending[None] | None, flight: Pending[bool] | None = None
    ) -> bool:
        """Wait for whoever brings, or looks for, the next record (A16); False if it is not in this tier."""
        self._tally.count("resolves_joined")
        absent = False
        try:
            if ended is not None:
                await wait_until(ended, search.deadline)
            elif flight is not None:
                absent = await wait_until(flight, search.deadline)
        except TimeoutError:
            search.degrade("what another is loading did not land in time")
            return False
        at = search.at
        search.regrow()
        return not absent or search.at > at

    async def _attempt(self, search: Search, number: int, tier: Tier, flight: Pending[bool]) -> bool:
        """Ask one tier and load what it has; whether to ask again, since the wait for room has ended."""
        at = search.record
        lease = await self._lookup(search, tier, search.missing)
        if lease is None:
            return False
        with ExitStack() as owned:  # A6: every branch that does not load releases the lease
            owned.enter_context(lease)
            search.regrow()
            columns, skip = search.workers.columns, search.record - at
            present = lease.present.reshape(-1, columns)[skip:]
            count = self._run_length(search, number, tier, present)
            if not count or not self._worth(search, tier, count):
                if not count and not skip:
                    flight.settle(True)
                return False
            resident = await _resident(search, count)
            count = self._loads.unclaimed(search.rank, search.missing[:count], tier)
            if not count:
                return True  # another has begun to load it meanwhile (A16)
            rows = np.arange(skip * columns, (skip + count) * columns).reshape(count, columns)
            origin, resident = np.full(count, number + 1, np.int16), _cut(search, resident, count)
            if await self._load(search, [Source(tier, lease, rows)], origin, resident, owned, flight):
                return False
        # A5: the lease is back before the pause; admission could not run the request either.
        if not flight.done:
            flight.settle(False)  # who follows need not wait for the same room
        return await self._space(search, resident)

    async def _piece_together(self, search: Search) -> bool:
        """Continue with records of which no tier has every shard, but several together do (R2)."""
        rows = {number: row for number, (record, row) in search.partial.items() if record == search.record}
        if len(rows) < 2 or not np.any(list(rows.values()), axis=0).all() or search.late():  # noqa: PLR2004
            return False
        at, first, columns = search.at, search.record, search.workers.columns
        with ExitStack() as owned:
            offers: list[tuple[int, Tier, Lease]] = []
            for number in rows:
                lease = await self._lookup(search, self._tiers[number], search.missing)
                if lease is not None:
                    owned.enter_context(lease)
                    offers.append((number, self._tiers[number], lease))
            search.regrow()
            skip = search.record - first
            if not offers or not search.short:
                return search.at > at
            have = np.stack([lease.present.reshape(-1, columns)[skip:] for _, _, lease in offers])
            count = _leading(np.all(have.any(axis=0), axis=1))
            resident = await _resident(search, count)
            free = self._loads.unclaimed(search.rank, search.missing[:count], *(item[1] for item in offers))
            if not free:
                owned.close()
                ahead = self._loads.of(search.rank, search.missing[0])  # None: a tier has had its time
                return ahead is not None and await self._joined(search, ahead)
            count, have, resident = free, have[:, :free], _cut(search, resident, free)
            giver = have.argmax(axis=0)
            every = np.arange(skip * columns, (skip + count) * columns).reshape(count, columns)
            sources = [
                Source(tier, lease, np.where(giver == i, every, -1))
                for i, (_, tier, lease) in enumerate(offers)
            ]
            origin = np.array([number + 1 for number, _, _ in offers], np.int16)[giver[:, 0]]
            if not await self._load(search, sources, origin, resident, owned, None):
                search.degrade("no room on the device")
        return search.at > at

    # Steps

    async def _lookup(self, search: Search, tier: Tier, names: Keys) -> Lease | None:
        keys, deadline = search.workers.record_keys(names), self._deadline(search, tier)
        query = tier.lookup(keys, deadline)
        try:
            lease = await wait_until(query, deadline)
        except BaseException as error:
            query.on_done(Lease.release)  # A2: whoever gave up leaves this behind
            if not isinstance(error, TimeoutError):
                raise
            self._failed(search, tier, "lookup timed out")
            return None
        if lease.failed:  # A10: the next tier is still asked
            self._tally.count(f"lookups_failed_{tier.name}")
            self._failed(search, tier, "lookup failed")
            return None
        if lease.present.shape != keys.shape:  # A15
            lease.release()
            self._tally.count("tier_answers_refused")
            self._failed(search, tier, f"answered for {len(lease.present)} records of {len(keys)}")
            return None
        if lease.pending is not None and not lease.present.all():
            search.news.append(lease.pending)
        return lease

    def _deadline(self, search: Search, *tiers: Tier) -> float:
        """Until when tiers may take: the resolve's deadline or their own limits, whichever is first (A20)."""
        now = asyncio.get_running_loop().time()
        return min(search.deadline, *(now + self._limits_s[tier.name] for tier in tiers))

    def _failed(self, search: Search, tier: Tier, why: str) -> None:
        search.degrade(f"{tier.name}: {why}")
        search.cuts[tier.name] = Cut(tier.name, search.at, why, search.workers.part.groups)

    def _run_length(self, search: Search, number: int, tier: Tier, present: Present) -> int:
        """Leading missing records of which every shard is there, for all workers (R2)."""
        count = _leading(np.all(present, axis=1))
        if count == len(present):
            search.cuts.pop(tier.name, None)
            return count
        row, record = present[count], search.record + count
        why = "not there"
        shards: tuple[int, ...] = ()
        workers: tuple[int, ...] = ()
        if row.any():
            search.partial[number] = record, row
            why, shards = "there in part", tuple(np.flatnonzero(~row).tolist())
            workers = tuple(sorted({who for shard in shards for who in search.workers.readers(shard)}))
        groups = search.workers.part.groups
        page = max(search.at, record * search.step)
        search.cuts[tier.name] = Cut(tier.name, page, why, groups, shards, workers)
        if not count:
            self._tally.count(f"misses_{tier.name}")
        return count

    def _worth(self, search: Search, tier: Tier, count: int) -> bool:
        """Whether restoring beats recomputing, where anything may be recomputed at all (A21)."""
        pages = (search.record + count) * search.step - search.at
        tokens, size = pages * search.rank.pool.page_tokens, count * search.workers.loaded_record_bytes
        if search.policy.full_hit or self._cost.worth(tier.name, tokens, size):
            return True
        self._tally.count(f"restores_not_worth_{tier.name}")
        self._failed(search, tier, "recomputing is faster")
        return False

    async def _load(
        self,
        search: Search,
        sources: Sequence[Source],
        origin: NDArray[np.int16],
        resident: Present,
        owned: ExitStack,
        flight: Pending[bool] | None,
    ) -> bool:
        """Load the next records, as many as `resident` tells of; False if there is no room.

        Args:
            search: whose next records.
            sources: rows [n, columns] of each.
            origin: int16[n].
            resident: bool[pages], past a hole; they are not loaded again (A17).
            owned: leases; the load takes them over.
            flight: settled once others can see the load.
        """
        first = search.at
        if search.most_pages is not None:
            fits = first + int(np.count_nonzero(np.cumsum(~resident) <= search.most_pages))
            resident = resident[: max(0, fits // search.step * search.step - first)]
        if not len(resident) or resident[0]:
            return False  # nothing fits; or it is there, and promises leave no room to hold it (B5)
        stretches = self._claimed(search, first + len(resident), resident, owned)
        if stretches is None:
            return False
        if not any(stretch.fresh for stretch in stretches):
            return True
        wanted = np.concatenate([np.arange(item.first, item.end) for item in stretches if item.fresh])
        records = np.unique(wanted // search.step) - search.record
        mine = [Source(item.tier, item.lease, item.rows[records]) for item in sources]
        mine = [item for item in mine if (item.rows >= 0).any()]
        deadline = self._deadline(search, *(item.tier for item in mine))
        load = self._loads.begin(search, mine, origin[records], stretches, owned, deadline)
        if flight is not None and not flight.done:
            flight.settle(False)
        await self._loads.finish(load)
        return True

    def _claimed(self, search: Search, end: int, resident: Present, owned: ExitStack) -> list[Stretch] | None:
        """Stage the missing pages up to `end` and hold those past a hole; None without room for all."""
        pool, waited = search.rank.pool, search.reserved is not None
        if not waited and not self._lines.may_take(search.rank.name):
            return None  # A19
        found: list[Stretch] = []
        with ExitStack() as mine:
            for first, count, there in resident_stretches(search.at, end, resident):
                if there:
                    kept = mine.enter_context(Guard(pool, search.keys[first : first + count]))
                    found.append(Stretch(first, len(kept.pages), kept))
                    if len(kept.pages) < count:
                        break  # it went meanwhile: what follows is for another round
                    continue
                staged = search.reserved if search.holds_room_for(count) else None
                search.reserved = None if staged is not None else search.reserved
                if staged is None:
                    search.spare()
                    staged = pool.reserve(count)
                if staged is None:
                    return None
                found.append(Stretch(first, count, mine.enter_context(staged)))
            owned.push(mine.pop_all())
        return found

    # Room

    async def _space(self, search: Search, resident: Present) -> bool:
        """Wait until the next pages fit, and stage them; False if that is not to be.

        At the deadline, or at once for what can never fit, plain mode settles for the records that do (A18).

        Args:
            search: whose next pages.
            resident: bool[pages], those that need no room, unless the first is among them.
        """
        pool, full, step = search.rank.pool, search.policy.full_hit, search.step
        search.spare()  # room that turned out to be too little for a record
        spared = 0 if resident[0] else int(resident.sum())
        end = search.at + len(resident)
        if full and end - spared > pool.total:
            search.degrade("no room on the device")  # R6: it never will be
            return False
        end = min(end, (pool.total + spared) // step * step)
        if end <= search.at:
            search.degrade("no room on the device")
            return False
        least = step - search.at % step
        least -= 0 if resident[0] else int(resident[:least].sum())
        left = search.deadline - asyncio.get_running_loop().time()
        patience = search.deadline - (0.0 if full else PARTIAL_SHARE * left)
        turn = self._lines.join(search.rank.name)
        try:
            async with asyncio.timeout_at(patience):
                while not self._staged(search, turn, end - spared):
                    self._let_go(search, turn)
                    await turn.event.wait()
                    turn.event.clear()  # before looking: what comes back after it wakes us again
                    search.match()
                return True
        except TimeoutError:
            if not search.hold.live:
                search.match()
            search.degrade("no room on the device")
            return not full and self._staged(search, turn, end - spared, some=least)
        finally:
            self._lines.leave(turn)

    def _staged(self, search: Search, turn: Turn, end: int, *, some: int = 0) -> bool:
        """Stage the pages from the first missing one to `end`, if it is our turn.

        With `some`, as many as fit, but no fewer than that: one record.
        """
        pool, need = search.rank.pool, max(1, end - search.at)
        if not self._lines.may_take(search.rank.name, turn):
            return False
        if some:
            fits = min(need, pool.budget())
            need = fits if fits >= min(some, need) else 0
        search.reserved = pool.reserve(need) if need > 0 else None
        search.most_pages = need
        return search.reserved is not None

    def _let_go(self, search: Search, turn: Turn) -> None:
        """Hold nothing while waiting (R6); the first in line is not woken by its own pages."""
        if self._lines.may_take(search.rank.name, turn):
            self._letting_go = search.rank.name, threading.get_ident()
        search.hold.release()
        self._letting_go = None


def _leading(flags: Any) -> int:
    """How many of some flags, bool[n], are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _cut(search: Search, resident: Present, records: int) -> Present:
    """What is known of the pages of fewer records, from the first missing page on."""
    return resident[: (search.record + records) * search.step - search.at]


async def _resident(search: Search, records: int) -> Present:
    """Which pages are resident, from the first missing one to the end of the next `records` records.

    Not the first, but maybe some past it: bool[pages].
    """
    keys = search.keys[search.at : (search.record + records) * search.step]
    found, at, asked = np.zeros(len(keys), np.bool_), 0, 0
    while at < len(keys):
        run = search.rank.pool.probe(keys[at:])
        found[at : at + run] = True
        at += run + 1
        asked += 1
        if asked % _PROBED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return found
