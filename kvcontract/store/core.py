"""What a store is made of: its parts, put together once, and the little that binds them.

`KvStore` is the door; here nothing knows of threads or foreign loops, apart from the clock it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.wire import fingerprint
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending, all_of, report_uncaught, wait_until
from kvcontract.pool.events import Event
from kvcontract.pool.keys import FleetSecret, Keyer, TokenIds
from kvcontract.pool.request import RequestKv
from kvcontract.store.answer import Answers
from kvcontract.store.barriers import Barriers
from kvcontract.store.control import Resetter, Switches
from kvcontract.store.cost import CostFigures, CostModel
from kvcontract.store.events import TierEvents
from kvcontract.store.explain import Explanations
from kvcontract.store.fetch import Fetcher
from kvcontract.store.loads import Landed, Loads
from kvcontract.store.part import Ground, PartStore, make_parts
from kvcontract.store.pins import Pins
from kvcontract.store.policy import KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank, SideBerth
from kvcontract.store.refuse import lasting_names, refuse
from kvcontract.store.resolve import Resolver
from kvcontract.store.room import Lines
from kvcontract.store.saver import Saver
from kvcontract.store.saves import SealReport
from kvcontract.store.seal import Sealer
from kvcontract.store.search import Ask
from kvcontract.store.side_fetch import LandedBeside, SideFetcher
from kvcontract.store.side_saver import SideSaver
from kvcontract.store.snapshots import Snapshots
from kvcontract.store.stats import StoreStats, Tally
from kvcontract.store.tier_policy import DEFAULT, TierPolicy
from kvcontract.store.worker import After
from kvcontract.store.workers import Crew
from kvcontract.tiers.base import SaveClass, Tier
from kvcontract.tiers.cipher import NO_KEY, Encryption, KeyId, RecordCipher
from kvcontract.tiers.guard import GuardedTier

LASTING_MAX_TP: Final = 8
"""Default of `max_tp` where records may be read by an engine of another degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store behaves; shares are of each pool.

    Attributes:
        max_tp: most workers that may ever read the records; None: 8 where records outlive this process or
            leave it, else the ranks' own degree, since nobody else reads them.
        save_budget: that Cacheable saves may pin; what is above it is shed and tried again later (C5).
        pin_budget: that `pin` may keep resident in all.
        scope_pin_quota: that `pin` may keep resident for one scope.
        cost: figures of the cost model; None: off, everything that is found is restored (A21).
        events: told of what tiers hold (I7); None: nobody is.
        tiers: how single tiers are used, by name; the others as `TierPolicy()` says.
        encryption: of records that outlive or leave the process; None: they are stored in the clear.
    """

    max_tp: int | None = None
    save_budget: float = 0.25
    pin_budget: float = 0.25
    scope_pin_quota: float = 0.125
    cost: CostFigures | None = None
    events: TierEvents | None = None
    tiers: Mapping[str, TierPolicy] = field(default_factory=dict)
    encryption: Encryption | None = None

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("save_budget", "pin_budget", "scope_pin_quota")}
        wrong = [f"{name} {value}: expected 0 to 1" for name, value in shares.items() if not 0 <= value <= 1]
        if self.max_tp is not None and self.max_tp < 1:
            wrong.append(f"max_tp {self.max_tp}: expected at least 1")
        if wrong:
            raise UsageFault("; ".join(wrong))


class StoreClock(Protocol):
    """The loop that a store runs on, as its parts see it."""

    def time(self) -> float:
        """Now; from any thread."""
        ...

    def soon(self, function: Callable[[], object]) -> None:
        """Call on the loop; from any thread."""
        ...

    def later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call on the loop after a while; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a store ended (C10).

    Attributes:
        drained: nothing was running any more; what was submitted has landed and is findable or was refused.
        loads: operations that still ran; their memory is leaked on purpose, never freed under a copy.
        saves: likewise.
        tiers: names of tiers that could not end their own work.
        relays: pages that were not copied to a tier that is written back; a tier above has them, for as long
            as it lives.
    """

    drained: bool
    loads: int
    saves: int
    tiers: tuple[str, ...]
    relays: int = 0


class StoreCore:
    """The parts of a store; arguments are those of `KvStore`."""

    def __init__(
        self,
        model: KvModel,
        ranks: Sequence[Rank],
        tiers: Sequence[Tier],
        *,
        secret: FleetSecret | None,
        clock: StoreClock,
        lane: Lane | None,
        options: StoreOptions,
    ) -> None:
        self.max_tp = options.max_tp or max(
            *(rank.tp for rank in ranks), LASTING_MAX_TP if lasting_names(tiers) else 1, 1
        )
        allowed = refuse(model, ranks, tiers, secret, self.max_tp, options.tiers, options.encryption)
        self.cipher = None if options.encryption is None else RecordCipher(options.encryption)
        self.too_small = allowed.too_small
        self.fingerprint = fingerprint(model)
        chosen, identity = allowed.secret, self.fingerprint.required
        self.keyer = self.record_keyer = Keyer(identity, chosen, model.page_tokens)
        if model.record_pages > 1:
            self.record_keyer = Keyer(identity, chosen, model.record_tokens)
        self.clock = clock
        self.options = options
        self.ranks = {rank.name: rank for rank in ranks}
        self.all_tiers = tuple(GuardedTier(tier) for tier in tiers)
        self.tiers = tuple(tier for tier in self.all_tiers if tier.name not in self.too_small)  # H7
        self.policies = [options.tiers.get(tier.name, DEFAULT) for tier in self.tiers]
        if self.policies and self.policies[0].back:  # nothing is left above it
            self.policies[0] = replace(self.policies[0], write="through")
        self.tally = Tally()
        self.crews: dict[str, Crew] = {}
        with ExitStack() as undo:
            for rank in ranks:
                crew = Crew(model, rank, max_tp=self.max_tp, lane=lane, clock=clock.time, cipher=self.cipher)
                self.crews[rank.name] = crew
                undo.callback(crew.close, clock.time())
            self.loads = Loads(self.tally, clock.time, self._landed)
            ground = Ground(
                self.tiers, self.policies, self.tally, clock, lambda: self.loads.pending, self.cipher
            )
            crews = {name: (self.ranks[name], crew) for name, crew in self.crews.items()}
            self.pages, self.sides = make_parts(
                model, allowed.parts, crews, self.max_tp, ground, options.events
            )
            self._connect_saves(ranks)
            self._connect(ranks)
            undo.pop_all()

    def _connect_saves(self, ranks: Sequence[Rank]) -> None:
        clock, pages = self.clock, self.pages
        self.sealer = Sealer(
            pages.known,
            self.policies,
            pages.relays,
            {rank.name: (rank, pages.workers[rank.name]) for rank in ranks},
            self.record_keyer,
            self.tally,
            clock.time,
            budget=self.options.save_budget,
            tell=self.options.events is not None,
            key_of=self.key_of,
        )
        self.side_savers = {key: self._side_saver(part) for key, part in self.sides.items()}
        self.snapshots = Snapshots(self.record_keyer, self.crews, self.tally)

    def _connect(self, ranks: Sequence[Rank]) -> None:
        tell, clock = self.options.events is not None, self.clock
        self.cost = CostModel(self.options.cost, self.tally)
        self.lines = Lines()
        limits_s = [policy.load_deadline_s for policy in self.policies]
        self.fetcher = Fetcher(
            self.tiers,
            tally=self.tally,
            loads=self.loads,
            cost=self.cost,
            lines=self.lines,
            limits_s=limits_s,
        )
        self.explanations = Explanations(self._known_elsewhere)
        groups = [group for part in self.parts for group in part.part.groups]
        answers = Answers(groups, self.tiers, self.tally, self.explanations)
        given = self.sides, self.tiers, self.tally, clock.time, self._landed_beside
        self.side_fetcher = SideFetcher(*given, limits_s=limits_s)
        self.resolver = Resolver(
            self.keyer,
            self.record_keyer,
            self.fetcher,
            answers,
            self.tally,
            soon=clock.soon,
            tell=tell,
            sides=self.side_fetcher if self.sides else None,
        )
        self.barriers = Barriers(self.tiers, self._submitted, clock.time)
        self.pins = Pins(self.options.pin_budget, self.options.scope_pin_quota, clock.later)
        self.switches = Switches(ranks)
        known = list(zip(*(part.known for part in self.parts), strict=True))
        self.resetter = Resetter(ranks, known, self._busy, self.pins.clear)
        self._stop = [rank.pool.on_release(self._waker(rank.name)) for rank in ranks]

    def _side_saver(self, part: PartStore) -> SideSaver:
        given = part.known, self.policies, part.relays, part.berths, self.tally, self.clock.time
        return SideSaver(*given, budget=self.options.save_budget, growing=False)

    @property
    def parts(self) -> tuple[PartStore, ...]:
        """All of them, full pages first."""
        return (self.pages, *self.sides.values())

    @property
    def savers(self) -> tuple[Saver, ...]:
        """In the same order."""
        return (self.sealer, *self.side_savers.values())

    @property
    def loading(self) -> tuple[Pending[None], ...]:
        """Loads in flight."""
        return (*self.loads.pending, *self.side_fetcher.pending)

    # Verbs, on the loop

    async def resolve(self, ask: Ask) -> KvPrefix:
        """See `KvStore.resolve_prefix`."""
        return await self.resolver.resolve(ask, self.resetter.gate, cache=self.switches.prefix_cache)

    async def flush_loads(self, deadline: float) -> bool:
        """Wait for the loads that are in flight."""
        return await settled(self.loading, deadline)

    async def close(self, deadline: float) -> CloseReport:
        """Drain, then close workers and tiers."""
        self.resetter.conclude()
        await self.resolver.conclude()
        self.pins.clear()
        while going := (*self.loading, *self._submitted()):  # what ends may begin another: a retry
            if not await settled(going, deadline):
                break
        for saver in self.savers:
            saver.give_up_shed()
        relays = sum(part.relays.conclude() for part in self.parts)
        while self._stop:
            self._stop.pop()()
        idle = [crew.close(deadline) for crew in self.crews.values()]
        await settled(self._saves, deadline)  # those that came meanwhile: the workers refused them
        stuck = tuple(tier.name for tier in self.all_tiers if not tier.close(deadline))
        for known in (known for part in self.parts for known in part.known):
            known.unsubscribe()
        loads, saves = len(self.loading), len(self._saves)
        drained = all(idle) and not (loads or saves or stuck or relays)
        return CloseReport(drained, loads, saves, stuck, relays)

    # From any thread

    def rank(self, name: str) -> Rank:
        """The rank of that name.

        Raises:
            UsageFault: there is none.
        """
        if name not in self.ranks:
            raise UsageFault(f"there is no rank {name!r}; ranks: {', '.join(self.ranks)}")
        return self.ranks[name]

    def rank_of(self, req: RequestKv) -> Rank:
        """The rank of a request.

        Raises:
            UsageFault: it is of another pool.
        """
        for rank in self.ranks.values():
            if rank.pool is req.pool:
                return rank
        raise UsageFault("the request draws from a pool that is no rank of this store")

    def seal(
        self,
        rank: Rank,
        req: RequestKv,
        *,
        cls: SaveClass,
        after: After | None,
        last: bool,
        handoff: str | None,
        scope_tag: str,
    ) -> Pending[SealReport]:
        """See `KvStore.seal`; what stands beside full pages is copied first, before the next step."""
        self.snapshots.take(rank, req)
        taken = self.snapshots.of(req)
        if last and rank.pool.sides and (began := self.snapshots.begun(rank, req)) is not None:
            taken = [began, *taken]
        reports = [
            self.sealer.seal(rank, req, cls=cls, after=after, last=last, handoff=handoff, scope_tag=scope_tag)
        ]
        for side in rank.pool.sides if taken else ():
            if side.index.key in self.side_savers:
                report = self.side_savers[side.index.key].seal(
                    SideBerth(rank.name, side.index),
                    req,
                    taken,
                    cls=cls,
                    after=after,
                    last=last,
                    handoff=handoff,
                    key_of=self.key_of,
                )
                reports.append(report)
        return reports[0] if len(reports) == 1 else all_of(reports).map(SealReport.joined)

    def key_of(self, scope: Scope) -> KeyId | None:
        """What records of a scope are encrypted with; None: it is not known, so they stay in the process."""
        if self.cipher is None:
            return NO_KEY
        try:
            return self.cipher.id_of(scope)
        except Exception as error:  # noqa: BLE001 - the operator's function; told, and nothing is stored clear
            self.tally.count("scopes_without_key")
            report_uncaught(error)
            return None

    def refuse_demand(self, policy: ResolvePolicy) -> None:
        """Refuse what could only be met by recomputing in silence (A24).

        Raises:
            UsageFault: says why.
        """
        if not policy.full_hit:
            return
        faults = []
        if policy.per_position:
            faults.append("outputs of every position are wanted, which only computing all of them gives")
        if not self.tiers:
            faults.append("there is no tier that another engine's pages could come from")
        if not self.switches.prefix_cache:
            faults.append("prefix caching is off")
        if faults:
            raise UsageFault(f"a full hit cannot be had here: {'; '.join(faults)}")

    def gauges(self) -> dict[str, int]:
        """What goes on now; every one returns to 0 when idle."""
        return {
            "resolving": self.resolver.searching,
            "waiting_for_room": self.lines.waiting,
            "loads": len(self.loading),
            "publishing": len(self.snapshots.pending),
            "saves": len(self._saves),
            "shed": sum(len(saver.shed) for saver in self.savers),
            "relays": sum(part.relays.pages for part in self.parts),
            "pins": self.pins.pages,
            "pinned_blocks": sum(
                pool.pinned_blocks
                for rank in self.ranks.values()
                for pool in (rank.pool, *rank.pool.sides.pools)
            ),
        }

    def stats(self) -> StoreStats:
        """Counters and gauges."""
        return self.tally.read(self.gauges())

    def take_events(self) -> list[tuple[str, Event]]:
        """What has happened since the last call: (rank, event) of the devices, ("", event) of the tiers."""
        found = [
            (rank.name, event)
            for rank in self.ranks.values()
            if rank.pool.events is not None
            for event in rank.pool.events.take()
        ]
        if self.options.events is not None:
            found += [("", event) for event in self.options.events.take()]
        return found

    # Between the parts

    def _submitted(self) -> tuple[Pending[Any], ...]:
        relays = [pending for part in self.parts for pending in part.pending]
        shed = [pending for saver in self.savers for pending in saver.shed]
        return (*self._saves, *shed, *relays, *self.snapshots.pending)

    @property
    def _saves(self) -> tuple[Pending[None], ...]:
        return tuple(pending for saver in self.savers for pending in saver.saves)

    def _busy(self) -> dict[str, Sequence[Pending[Any]]]:
        idle = self.resolver.idle
        resolves = () if idle.done else (idle,)
        return {"resolves": resolves, "loads": self.loading, "saves": self._submitted()}

    def _landed(self, landed: Landed) -> None:
        """Records came from a tier: it has them (C3), and those above it are to have them too."""
        search = landed.search
        found = landed.pages, search.records[landed.numbers], landed.generations
        number = self.pages.came(search.rank, found, landed.source.tier, landed.begun)
        self.sealer.promote(landed, number)

    def _landed_beside(self, landed: LandedBeside) -> None:
        """The same of what stands beside full pages."""
        found, key = landed.found, landed.part.part.space
        last = found.blocks[:, -1], found.keys, found.generations[:, -1]
        number = landed.part.came(landed.berth, last, landed.tier, landed.begun)
        self.side_savers[key].promote(landed.berth, found, number, landed.key)

    def _known_elsewhere(self, rank: str, tokens: TokenIds, scope: Scope) -> bool:
        return self.ranks[rank].pool.probe(self.keyer.chain(tokens, scope)) > 0

    def _waker(self, rank: str) -> Callable[[], None]:
        def wake() -> None:
            if self.lines.awaited(rank) and not self.fetcher.quiet(rank):
                self.clock.soon(lambda: self.lines.came_back(rank))
            if self.resetter.gate is not None:
                self.clock.soon(self.resetter.pages_came_back)

        return wake


async def settled(pendings: Sequence[Pending[Any]], deadline: float) -> bool:
    """Wait for all of them; whether they settled in time."""
    try:
        await wait_until(all_of(pendings), deadline)
    except TimeoutError:
        return False
    return True
