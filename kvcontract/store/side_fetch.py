"""The joint hit: how deep a prefix can be continued, and bringing what that needs beside the full pages.

A request goes on from a boundary only where every part has what it needs there (R2), along whichever tiers.
So boundaries are found first; then the chain of full pages is brought up to the deepest, and not beyond it;
then the rest.  A part that fails there rewinds the hit to the next lower boundary (F5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.handles import Reservation
from kvcontract.pool.holdings import SideHolds, covered, fits, hold_at, hold_deepest
from kvcontract.pool.index import Keys
from kvcontract.pool.side import Flags
from kvcontract.pool.sides import Side, Slotted
from kvcontract.store.part import PartStore
from kvcontract.store.rank import Rank, SideBerth
from kvcontract.store.search import Search
from kvcontract.store.snapshots import Artefact
from kvcontract.store.stats import Tally
from kvcontract.store.workers import Source, Verdict, Workers
from kvcontract.tiers.base import Clock, Code, Codes, Lease, Tier
from kvcontract.tiers.cipher import KeyId

_MOST_TRIES: Final = 8


@dataclass(slots=True, eq=False)
class Offers:
    """What there is beside the full pages of one prompt.

    Attributes:
        boundaries: in pages, at which a request could go on, the deepest first.
        by_tier: per space, for each tier bool[pages, shards], what it has.
        hangs: whether one of them has had its time without giving what it has.
    """

    boundaries: list[int]
    by_tier: dict[str, list[Flags]] = field(default_factory=dict)
    hangs: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """Blocks of one space that are looked for, and on their way.

    Attributes:
        side: pool and rule of the space.
        part: what is loaded.
        rank: where to.
        numbers: int64[n], pages whose state it is.
        names: uint64[n, 2], by which that is found on the device.
        ended: settles when it is there, or is not.
        until: when its tiers have had their time, and nobody waits for it any more.
    """

    side: Side
    part: PartStore
    rank: Rank
    numbers: NDArray[np.int64]
    names: Keys
    ended: Pending[None] = field(default_factory=Pending)
    until: float = math.inf

    @property
    def workers(self) -> Workers:
        """Who load."""
        return self.part.workers[self.rank.name]

    @property
    def berth(self) -> SideBerth:
        """Where the blocks are."""
        return SideBerth(self.rank.name, self.side.index)


@dataclass(frozen=True, slots=True, eq=False)
class LandedBeside:
    """Records of a part beside full pages that a tier has brought, all of each.

    Attributes:
        part: of the records.
        berth: where they are.
        tier: that has them.
        found: the records.
        key: that their scope is encrypted with.
        begun: when the load began, on the store's clock.
    """

    part: PartStore
    berth: SideBerth
    tier: Tier
    found: Artefact
    key: KeyId | None
    begun: float


class SideFetcher:
    """Finds boundaries, and brings what they need.

    Args:
        parts: those beside the full pages, by space.
        tiers: asked in order.
        tally: where everything is counted.
        clock: the store's.
        landed: told of records that came, per tier.
        limits_s: by tier, longest time that it may take to answer; None: until the resolve's own deadline.
    """

    def __init__(
        self,
        parts: Mapping[str, PartStore],
        tiers: Sequence[Tier],
        tally: Tally,
        clock: Clock,
        landed: Callable[[LandedBeside], object],
        *,
        limits_s: Sequence[float | None],
    ) -> None:
        self._parts = parts
        self._tiers = tuple(tiers)
        self._limits_s = {tier.name: limit or math.inf for tier, limit in zip(tiers, limits_s, strict=True)}
        self._tally = tally
        self._clock = clock
        self._landed_beside = landed
        self._flights: dict[tuple[str, str, bytes], Flight] = {}
        self._open: dict[Flight, None] = {}

    @property
    def pending(self) -> tuple[Pending[None], ...]:
        """Loads in flight, oldest first."""
        return tuple(flight.ended for flight in tuple(self._open))

    # What there is

    async def offers(self, search: Search) -> Offers:
        """Where a request could go on; tiers are asked only if the device alone does not reach the end."""
        sides, size = search.rank.pool.sides, search.rank.pool.page_tokens
        pages, legal = len(search.keys), search.ask.media
        here = {side.key: side.index.present(search.keys) for side in sides}
        found = Offers(covered(sides, size, here, pages, legal))
        if (found.boundaries and found.boundaries[0] == pages) or not (pages and self._tiers):
            return found
        for side in sides:
            found.by_tier[side.key] = [
                await self._present(search, side, tier, here[side.key]) for tier in self._tiers
            ]
        every = {key: there | _whole(found.by_tier[key]) for key, there in here.items()}
        found.boundaries = covered(sides, size, every, pages, legal)
        return found

    async def _present(self, search: Search, side: Side, tier: Tier, here: Flags) -> Flags:
        """Which pages' state a tier has, where the device has not got it: bool[pages, shards]."""
        part, step = self._parts.get(side.index.key), search.step
        if part is None:
            return np.zeros((len(here), 1), np.bool_)
        workers, count = part.workers[search.rank.name], len(here) // step
        found = np.zeros((len(here), workers.columns), np.bool_)
        if search.late():
            return found
        by_record = here[: count * step].reshape(count, step)
        lack = ~by_record[:, -workers.record_pages :].all(axis=1)
        if isinstance(side, Slotted) and side.window is None:
            ends = (np.arange(count) + 1) * step * side.pool.page_tokens
            lack &= ends % search.rank.pool.sides.granule_tokens == 0
        wanted = np.flatnonzero(lack)
        if not len(wanted):
            return found
        lease = await self._lookup(search, workers, tier, search.records[wanted])
        if lease is None:
            return found
        with lease:
            there = lease.present.reshape(-1, workers.columns)
        for page in range(workers.record_pages):
            found[(wanted + 1) * step - 1 - page] = there
        return found

    def _deadline(self, search: Search, *tiers: Tier) -> float:
        """Until when tiers may take: the resolve's deadline or their own limits, whichever is first (A20)."""
        return min(search.deadline, *(self._clock() + self._limits_s[tier.name] for tier in tiers))

    async def _lookup(self, search: Search, workers: Workers, tier: Tier, names: Keys) -> Lease | None:
        keys, deadline = workers.record_keys(names), self._deadline(search, tier)
        query = tier.lookup(keys, deadline)
        try:
            lease = await wait_until(query, deadline)
        except BaseException as error:
            query.on_done(Lease.release)  # A2
            if not isinstance(error, TimeoutError):
                raise
            search.degrade(f"{tier.name}: lookup timed out")
            return None
        if lease.failed or lease.present.shape != keys.shape:  # A10, A15
            self._tally.count("tier_answers_refused" if not lease.failed else f"lookups_failed_{tier.name}")
            lease.release()
            search.degrade(f"{tier.name}: lookup failed")
            return None
        return lease

    # Bringing it

    async def bring(self, search: Search, offers: Offers) -> None:
        """Hold what the deepest boundary needs that the chain reaches, and cut the hit to it (F5)."""
        sides, reach = search.rank.pool.sides, search.at
        for boundary in offers.boundaries:
            if boundary > reach:
                continue
            held = await self._held(search, offers, boundary)
            if held is not None:
                self._cut(search, held)
                return
            if search.late() or search.ask.cancelled or offers.hangs:
                break  # a tier that hangs would have its time for each boundary anew
            search.degrade("state at a deeper boundary could not be had")
            if not fits(sides, boundary):
                search.degrade("no room beside the full pages")
                break  # nor would those before it, of which there may be thousands
        settle(search)

    async def _held(self, search: Search, offers: Offers, boundary: int) -> SideHolds | None:
        """Pin what a boundary needs, brought from the tiers where that is to be had."""
        sides = search.rank.pool.sides
        for _ in range(_MOST_TRIES):
            held = hold_at(sides, search.keys, boundary)
            if held is not None or not offers.by_tier or search.late() or search.ask.cancelled:
                return held
            joined = await self._fetched(search, offers, boundary)
            if not joined:  # nobody else was in the way, so it is not to be had
                return hold_at(sides, search.keys, boundary)
        return hold_at(sides, search.keys, boundary)

    def _cut(self, search: Search, held: SideHolds) -> None:
        if held.pages < search.at:
            self._tally.count("pages_beyond_a_checkpoint", search.at - held.pages)
        search.hold.let_sides_go()
        search.hold.trim(held.pages)
        search.hold.sides = held

    async def _fetched(self, search: Search, offers: Offers, boundary: int) -> bool:
        """Load what a boundary needs and the device has not got, all of it at once.

        What it has got is held meanwhile: room for the rest must not be made of it.

        Returns:
            Whether others were bringing some of it: what they did not bring may be asked for again (A16).
        """
        joined: dict[Flight, None] = {}
        others = False
        with ExitStack() as held:
            for side in search.rank.pool.sides:
                numbers = side.needed(boundary)
                there = side.index.present(search.keys[numbers])
                if there.any():
                    kept = side.index.hold(search.keys[numbers[there]])
                    if kept is None:
                        search.degrade(f"no room in {side.key}")
                        return False
                    held.enter_context(kept)
                missing = numbers[~there]
                going = [
                    self._flights.get((search.rank.name, side.key, search.keys[number].tobytes()))
                    for number in missing.tolist()
                ]
                joined |= dict.fromkeys(flight for flight in going if flight is not None)  # A16
                others = others or any(flight is not None for flight in going)
                left = missing[[flight is None for flight in going]]
                if not len(left):
                    continue
                if search.late():
                    return False  # A9
                flight = await self._flown(search, side, left, offers.by_tier[side.key])
                if flight is None:
                    return False  # what has begun ends by itself, and is found by whoever comes next
                joined[flight] = None
            offers.hangs = not await self._landed(search, list(joined))
            return others and not offers.hangs

    async def _flown(
        self, search: Search, side: Side, numbers: NDArray[np.int64], by_tier: Sequence[Flags]
    ) -> Flight | None:
        """Begin to load some blocks, for all who want them; None if that cannot be."""
        flight = Flight(side, self._parts[side.index.key], search.rank, numbers, search.keys[numbers].copy())
        self._open[flight] = None
        for name in flight.names:
            self._flights[search.rank.name, side.key, name.tobytes()] = flight
        begun = False
        try:
            begun = await self._begin(search, flight, by_tier)
        finally:
            if not begun:
                self._over(flight)
        return flight if begun else None

    async def _landed(self, search: Search, flights: Sequence[Flight]) -> bool:
        try:
            for flight in flights:
                await wait_until(flight.ended, min(search.deadline, flight.until))
        except TimeoutError:
            self._tally.count("loads_abandoned")
            search.degrade("state did not land in time")
            return False
        return True

    async def _begin(self, search: Search, flight: Flight, by_tier: Sequence[Flags]) -> bool:
        """Start to load; False if there is no room, or it is nowhere any more."""
        workers, records = flight.workers, np.unique(flight.numbers // search.step)
        with ExitStack() as owned:
            sources = await self._sources(search, workers, by_tier, records, owned)
            if sources is None:
                search.degrade(f"state in {flight.side.key} is gone")
                return False
            left = ~flight.side.index.present(flight.names)  # A17: some may have come meanwhile
            numbers, names = flight.numbers[left], flight.names[left]
            rows, spread = np.unique(numbers // search.step, return_inverse=True)
            sources = _of_rows(sources, np.isin(records, rows))
            if not len(rows):
                self._over(flight)
                return True
            reserved = flight.side.index.reserve(len(numbers))
            if reserved is None:
                search.degrade(f"no room in {flight.side.key}")
                return False
            owned.enter_context(reserved)
            blocks = np.zeros((len(rows), workers.record_pages), np.int32)
            blocks[spread, numbers % workers.record_pages] = reserved.pages
            keys, begun = search.records[rows], self._clock()
            flight.until = self._deadline(search, *(source.tier for source in sources))
            op = workers.load(sources, keys, blocks, flight.until, key=search.ask.key)
            kept = owned.pop_all()

        def end(verdict: Verdict) -> None:
            try:
                # Occupants before anybody else may be given the blocks.
                found = Artefact(keys, blocks, flight.berth.pool.generation[blocks])
                self._came(flight.side, reserved, names, verdict.codes[spread])
                self._told(flight, sources, found, verdict.codes == Code.OK, search.ask.key, begun)
            finally:
                kept.close()
                self._over(flight)

        op.on_done(end)
        return True

    async def _sources(
        self,
        search: Search,
        workers: Workers,
        by_tier: Sequence[Flags],
        rows: NDArray[np.int64],
        owned: ExitStack,
    ) -> list[Source] | None:
        """Leases on some records, from the first tier that has each shard; None if one is nowhere."""
        left, found = np.ones((len(rows), workers.columns), np.bool_), list[Source]()
        ends = (rows + 1) * search.step - 1
        for tier, there in zip(self._tiers, by_tier, strict=True):
            mine = np.flatnonzero((left & there[ends]).any(axis=1))
            if not len(mine):
                continue
            lease = await self._lookup(search, workers, tier, search.records[rows[mine]])
            if lease is None:
                continue
            owned.enter_context(lease)
            taken = left[mine] & lease.present.reshape(-1, workers.columns)
            every = np.arange(taken.size).reshape(taken.shape)
            given = np.full(left.shape, -1, np.int64)
            given[mine] = np.where(taken, every, -1)
            left[mine] &= ~taken
            if taken.any():
                found.append(Source(tier, lease, given))
        return None if left.any() else found

    def _came(self, side: Side, reserved: Reservation, names: Keys, codes: Codes) -> None:
        """What came is named, whether anybody waits for it still or not (A4)."""
        side.index.commit(reserved, names, codes == Code.OK).release()
        for code, count in enumerate(np.bincount(codes).tolist()):
            if count:
                self._tally.count(f"blocks_{Code(code).name.lower()}_{side.key}", count)

    def _told(
        self,
        flight: Flight,
        sources: Sequence[Source],
        found: Artefact,
        ok: Flags,
        key: KeyId | None,
        begun: float,
    ) -> None:
        """Count what came, and tell of the records that a tier has given whole.

        Args:
            flight: of them.
            sources: rows of each, of all records that were loaded.
            found: those records; block 0 where a page was on the device already.
            ok: bool[n], which of them came.
            key: see `LandedBeside`.
            begun: when the load began.
        """
        seconds, filled = self._clock() - begun, found.blocks != 0
        for source in sources:
            mine, name = (source.rows >= 0) & ok[:, None], source.tier.name
            share = flight.workers.loaded_record_bytes * int(mine.sum()) // flight.workers.columns
            blocks = int(filled[mine.any(axis=1)].sum())
            self._tally.count(f"blocks_loaded_{name}", blocks)
            self._tally.moved(name, "load", blocks, share, seconds)
            whole = mine.all(axis=1) & filled.all(axis=1)
            if whole.any():
                there = found.rows(whole)
                self._landed_beside(LandedBeside(flight.part, flight.berth, source.tier, there, key, begun))

    def _over(self, flight: Flight) -> None:
        """It has ended, whatever came of it."""
        del self._open[flight]
        for name in flight.names:
            self._flights.pop((flight.rank.name, flight.side.key, name.tobytes()), None)
        flight.ended.settle(None)


def _of_rows(sources: Sequence[Source], rows: Flags) -> list[Source]:
    """Of some records, those that are wanted; without the sources of none of them."""
    mine = [Source(source.tier, source.lease, source.rows[rows]) for source in sources]
    return [source for source in mine if (source.rows >= 0).any()]


def _whole(by_tier: Sequence[Flags]) -> Flags:
    """Which pages' state is whole in the tiers together: bool[pages], of bool[pages, shards] for each."""
    every: Flags = np.logical_and.reduce(np.stack(by_tier).any(axis=0), axis=1)
    return every


def settle(search: Search) -> None:
    """Cut a hold to where a request can go on with what is on the device, if nobody has done so."""
    pool = search.rank.pool
    if not pool.sides or not search.hold.live:
        return
    if search.hold.sides is not None and search.hold.sides.pages == search.at:
        return
    search.hold.let_sides_go()
    if not search.at:
        return
    held = hold_deepest(pool.sides, pool.page_tokens, search.keys, search.at, search.ask.media)
    search.hold.trim(0 if held is None else held.pages)
    search.hold.sides = held
