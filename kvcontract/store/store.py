"""`KvStore`: prefix reuse and offload for the ranks of one model.

One asynchronous core runs on one event loop, the store's own thread unless a loop is given; the synchronous
façade is for engines without one.  Every wait has a deadline (R5); no failure of a tier reaches the caller
as an exception (R4).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

from kvcontract.contract.check import check_model
from kvcontract.contract.clauses import clause
from kvcontract.contract.errors import NotConformant, UsageFault
from kvcontract.contract.finding import Finding
from kvcontract.contract.layout import layout
from kvcontract.contract.model import KvModel, Scope
from kvcontract.contract.wire import Part, fingerprint, parts, wire_record
from kvcontract.core.jit import warm_up
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending, all_of, wait_until
from kvcontract.pool.keys import FleetSecret, Keyer, TokenIds, token_array
from kvcontract.pool.request import RequestKv
from kvcontract.store.loop import StoreLoop
from kvcontract.store.policy import PLAIN, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.resolve import Resolver, Search
from kvcontract.store.seal import After, Sealer, SealReport
from kvcontract.store.stats import StoreStats, Tally
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Level, SaveClass, Tier
from kvcontract.tiers.frame import header_bytes
from kvcontract.tiers.guard import GuardedTier

SAVE_DEADLINE_S: Final = 60.0
"""A save that has not begun by then is given up and tried again at retire."""

LASTING_MAX_TP: Final = 8
"""Default of `max_tp` where records may be read by an engine of another degree."""


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a store ended (C10).

    Attributes:
        drained: nothing was running any more; what was submitted has landed and is findable or was refused.
        loads: operations that still ran; their memory is leaked on purpose, never freed under a copy.
        saves: likewise.
        tiers: names of tiers that could not end their own work.
    """

    drained: bool
    loads: int
    saves: int
    tiers: tuple[str, ...]


class KvStore:
    """Resolve, seal and retire for the ranks of one model.

    Args:
        model: the declaration; without findings.
        ranks: one or several; the table is frozen (A26).
        tiers: below the device, fastest first; the store closes them.
        secret: the fleet's; None: random, which no persistent or shared tier may use.
        max_tp: most workers that may ever read the records; None: 8 where records outlive this process or
            leave it, else the ranks' own degree, since nobody else reads them.
        loop: run on this event loop instead of a thread of the store's own; deadlines are on its clock, also
            those that tiers are given.
        lane: where bytes are copied and checked; None: a thread for each rank.

    Raises:
        NotConformant: the declaration has findings, or tiers ask for what is not served (KVC-OFFLOAD-05).
        UsageFault: ranks, pools or tiers that cannot be served together; all faults are named.
    """

    def __init__(
        self,
        model: KvModel,
        ranks: Sequence[Rank],
        tiers: Sequence[Tier] = (),
        *,
        secret: FleetSecret | None = None,
        max_tp: int | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._part = _refuse(model, ranks, tiers, secret, max_tp)
        tp = max(rank.tp for rank in ranks)
        lasting = any(tier.capabilities.persistent or tier.capabilities.shared for tier in tiers)
        self.max_tp = max_tp if max_tp is not None else max(tp, LASTING_MAX_TP if lasting else 1)
        _refuse_small_tiers(model, self._part, tiers, self.max_tp)
        warm_up()  # a kernel that compiled at its first call would do so under a pool's lock
        self.model = model
        self.fingerprint = fingerprint(model)
        self.keyer = Keyer(self.fingerprint.required, secret or FleetSecret.random(), model.page_tokens)
        self._ranks = {rank.name: rank for rank in ranks}
        self._rank_of = {id(rank.pool): rank for rank in ranks}
        self._tiers = tuple(GuardedTier(tier) for tier in tiers)
        self._tally = Tally()
        self._resolver = Resolver(self._part, self._tiers, self._tally)
        self._sealer = Sealer(self._part, self._tiers, self._tally)
        self._closed: CloseReport | None = None
        self._close_gate = threading.Lock()
        self._close_task: asyncio.Task[CloseReport] | None = None
        self._loop = StoreLoop(loop)
        with ExitStack() as undo:
            undo.callback(self._loop.stop)
            self._workers: dict[str, Worker] = {}
            for rank in ranks:
                self._workers[rank.name] = worker = Worker(
                    model,
                    layout(model, 0, rank.tp),
                    rank.bindings,
                    max_tp=self.max_tp,
                    lane=lane,
                    clock=self._loop.time,
                )
                undo.callback(worker.close, self._loop.time())
            undo.pop_all()
        self._stop = [rank.pool.on_release(self._waker(rank.name)) for rank in ranks]

    # The three verbs

    async def resolve_prefix(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        policy: ResolvePolicy = PLAIN,
    ) -> KvPrefix:
        """The longest prefix of a prompt that is resident on a rank, or can be made so in time.

        May be awaited on any event loop; cancelling gives everything back, and what was already being loaded
        is still registered when it lands.

        Args:
            rank: name of the rank.
            tokens: the whole prompt.
            scope: who may share.
            policy: how far to go.

        Raises:
            UsageFault: no such rank, token ids out of range, or the store is closed.  A failing tier is a
                shorter hit instead.
        """
        work = self._resolve(self._rank(rank), token_array(tokens), scope or Scope(), policy)
        return await self._loop.run(work, KvPrefix.release)

    def resolve(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        policy: ResolvePolicy = PLAIN,
    ) -> KvPrefix:
        """`resolve_prefix` for callers without an event loop; blocks up to the policy's deadline."""
        work = self._resolve(self._rank(rank), token_array(tokens), scope or Scope(), policy)
        return self._loop.wait(work, KvPrefix.release)

    def seal(
        self, req: RequestKv, cls: SaveClass = SaveClass.CACHEABLE, *, after: After | None = None
    ) -> Pending[SealReport]:
        """Save a request's complete pages that are not known to be stored; never blocks.

        Args:
            req: an unreleased request of one of the ranks.
            cls: why.
            after: waited for before the first byte is read: the event of the step's writes (C2).

        Returns:
            Settles with what became of it, once every copy has landed.  A closed store refuses every page.

        Raises:
            UsageFault: the request is released, or of a pool that is no rank of this store.
        """
        rank = self._rank_by_request(req)
        deadline = self._loop.time() + SAVE_DEADLINE_S
        worker = self._workers[rank.name]
        return self._sealer.seal(rank, worker, req, cls=cls, deadline=deadline, after=after)

    def retire(
        self, req: RequestKv, cls: SaveClass = SaveClass.CACHEABLE, *, after: After | None = None
    ) -> Pending[SealReport]:
        """Save what is not stored yet, failed pages again, and release the request; never blocks (C6).

        Pages with a save in flight stay resident until it settles, whoever owned them.  Arguments and errors
        are those of `seal`; whatever is raised, the request is released, and a step that is outstanding
        reverted.
        """
        try:
            return self.seal(req, cls, after=after)
        finally:
            with req:
                pass

    # Barriers

    async def flush_saves(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """Wait for every save submitted before; True if all settled and the tiers reached `level` in time.

        May be awaited on any event loop.

        Raises:
            UsageFault: the store is closed.
        """
        return await self._loop.run(self._flush(level, deadline_s), _nothing)

    async def flush_loads(self, deadline_s: float = 60.0) -> bool:
        """Wait until every load submitted before, abandoned ones too, has settled and is registered.

        May be awaited on any event loop.

        Returns:
            Whether all did in time.

        Raises:
            UsageFault: the store is closed.
        """
        return await self._loop.run(self._flush_loads(deadline_s), _nothing)

    def flush(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """`flush_saves` for callers without an event loop."""
        return self._loop.wait(self._flush(level, deadline_s), _nothing)

    # The rest

    def stats(self) -> StoreStats:
        """Counters, hit tokens by source, reasons for shorter hits, and gauges (I6)."""
        return self._tally.read(
            resolving=self._resolver.searching,
            loads=len(self._resolver.loads),
            saves=len(self._sealer.saves),
            pinned_blocks=sum(rank.pool.pinned_blocks for rank in self._ranks.values()),
        )

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Each tier's own counters and gauges."""
        return {tier.name: tier.stats() for tier in self._tiers}

    @property
    def pinned_blocks(self) -> int:
        """Pages with saves in flight (a gauge)."""
        return self.stats().gauges["pinned_blocks"]

    def close(self, deadline_s: float = 10.0) -> CloseReport:
        """Take no more work, drain loads and saves, close the tiers (C10); again: the same report.

        Resolves under way end with what they hold.  What has not settled by the deadline goes on, and its
        memory with it: the report says how much.

        Raises:
            UsageFault: called on the store's event loop; await `aclose` there.
        """
        if self._closed is None:
            self._loop.refuse_to_block()
        with self._close_gate:
            if self._closed is None:
                self._closed = self._loop.finish(self._close(deadline_s))
                if self._closed.drained:
                    self._loop.stop()
        return self._closed

    async def aclose(self, deadline_s: float = 10.0) -> CloseReport:
        """`close` for event loops: the one that was given to the store, or any, if none was."""
        if self._loop.own:
            return await asyncio.to_thread(self.close, deadline_s)
        if self._close_task is None:
            self._loop.shut()
            self._close_task = asyncio.get_running_loop().create_task(self._close(deadline_s))
        self._closed = await asyncio.shield(self._close_task)
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Inside

    async def _resolve(self, rank: Rank, tokens: Any, scope: Scope, policy: ResolvePolicy) -> KvPrefix:
        self._loop.refuse_if_closed()
        deadline = self._loop.time() + policy.deadline_s
        page = self.model.page_tokens
        covered = len(tokens) if policy.full_pages else max(0, len(tokens) - 1)  # A12
        keys = self.keyer.chain(tokens[: covered // page * page], scope)
        hold = rank.pool.match(keys)
        search = Search(rank, self._workers[rank.name], keys, hold, policy, deadline)
        return await self._resolver.resolve(search, len(tokens))

    async def _flush(self, level: Level, deadline_s: float) -> bool:
        deadline = self._loop.time() + deadline_s
        if not await _settled(self._sealer.saves, deadline):
            return False
        flushed = [tier.flush(level, deadline) for tier in self._tiers]
        return await _settled(flushed, deadline) and all(item.value for item in flushed)

    async def _flush_loads(self, deadline_s: float) -> bool:
        return await _settled(self._resolver.loads, self._loop.time() + deadline_s)

    async def _close(self, deadline_s: float) -> CloseReport:
        deadline = self._loop.time() + deadline_s
        await self._resolver.conclude()
        await _settled(self._resolver.loads, deadline)
        await _settled(self._sealer.saves, deadline)
        while self._stop:
            self._stop.pop()()
        idle = [worker.close(deadline) for worker in self._workers.values()]
        await _settled(self._sealer.saves, deadline)  # those that came meanwhile: the worker refused them
        stuck = tuple(tier.name for tier in self._tiers if not tier.close(deadline))
        loads, saves = len(self._resolver.loads), len(self._sealer.saves)
        return CloseReport(all(idle) and not (loads or saves or stuck), loads, saves, stuck)

    def _rank(self, name: str) -> Rank:
        if name not in self._ranks:
            raise UsageFault(f"there is no rank {name!r}; ranks: {', '.join(self._ranks)}")
        return self._ranks[name]

    def _rank_by_request(self, req: RequestKv) -> Rank:
        rank = self._rank_of.get(id(req.pool))
        if rank is None:
            raise UsageFault("the request draws from a pool that is no rank of this store")
        return rank

    def _waker(self, rank: str) -> Callable[[], None]:
        def wake() -> None:
            if self._resolver.awaited(rank):
                self._loop.soon(lambda: self._resolver.pages_came_back(rank))

        return wake


def _nothing(_value: object) -> None:
    """Undoes what needs no undoing."""


async def _settled(pendings: Sequence[Pending[Any]], deadline: float) -> bool:
    try:
        await wait_until(all_of(list(pendings)), deadline)
    except TimeoutError:
        return False
    return True


def _refuse(
    model: KvModel,
    ranks: Sequence[Rank],
    tiers: Sequence[Tier],
    secret: FleetSecret | None,
    max_tp: int | None,
) -> Part:
    """Refuse what cannot be served; returns what is saved and restored as one unit."""
    findings = check_model(model)
    if findings:
        raise NotConformant(model.name, findings)
    faults = [] if ranks else ["a store has at least one rank"]
    faults += [] if max_tp is None or max_tp >= 1 else [f"max_tp {max_tp}: expected at least 1"]
    for what, names in (("rank", [rank.name for rank in ranks]), ("tier", [tier.name for tier in tiers])):
        faults += [f"two {what}s are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    if len({id(rank.pool) for rank in ranks}) < len(ranks):
        faults.append("two ranks share a pool; each has its own")
    for rank in ranks:
        if rank.pool.page_tokens != model.page_tokens:
            faults.append(f"rank {rank.name!r}: its pool's page differs from {model.page_tokens} tokens")
    lasting = [tier.name for tier in tiers if tier.capabilities.persistent or tier.capabilities.shared]
    if lasting and secret is None:
        faults.append(f"tier {', '.join(lasting)} outlives or leaves this process: give the fleet's secret")
    mixing = [tier.name for tier in tiers if not tier.capabilities.scopes]
    if mixing:
        faults.append(f"tier {', '.join(mixing)} cannot keep scopes apart; every tier of a store must (D3)")
    if faults:
        raise UsageFault("; ".join(faults))
    for rank in ranks:
        rank.pool.check_capacity({key: binding.blocks for key, binding in rank.bindings.items()})
    _refuse_unserved(model, ranks, tiers, lasting)
    return parts(model)[0]


def _refuse_small_tiers(model: KvModel, part: Part, tiers: Sequence[Tier], max_tp: int) -> None:
    """A tier that no record fits into would never be of use (H10)."""
    shards = part.shards(max_tp)
    records = [wire_record(model, part, shard, shards) for shard in range(shards)]
    largest = max(record.payload_bytes + header_bytes(len(record.segments)) for record in records)
    small = [
        f"tier {tier.name!r} takes records of at most {limit:,} B"
        for tier in tiers
        if (limit := tier.capabilities.max_record_bytes) is not None and limit < largest
    ]
    if small:
        raise UsageFault(f"{'; '.join(small)}; one page of part {part.name!r} needs {largest:,} B")


def _refuse_unserved(
    model: KvModel, ranks: Sequence[Rank], tiers: Sequence[Tier], lasting: Sequence[str]
) -> None:
    rule = clause("KVC-OFFLOAD-05")
    found = []
    for rank in ranks if tiers else ():
        if rank.tp != 1:
            message = f"rank {rank.name!r} has tp {rank.tp}; tiers are served at tp 1 in this version"
            found.append(Finding(rule.id, "rank.tp", rank.tp, "1", message))
    if lasting and not model.weights.resolved:
        message = f"tier {', '.join(lasting)} keeps records beyond this process"
        found.append(
            Finding(rule.id, "weights.kind", model.weights.kind, "digest or revision", message, model.where)
        )
    if found:
        raise NotConformant(model.name, tuple(found))
