"""`KvStore`: prefix reuse and offload for the ranks of one model.

One asynchronous core runs on one event loop, the store's own thread unless a loop is given; the synchronous
façade is for engines without one.  Every wait has a deadline (R5); no failure of a tier reaches the caller
as an exception (R4).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from kvcontract.contract.check import Finding, check_model
from kvcontract.contract.clauses import clause
from kvcontract.contract.errors import NotConformant, UsageFault
from kvcontract.contract.layout import fingerprint, layout, parts
from kvcontract.contract.model import KvModel, Scope
from kvcontract.core.pending import Pending, all_of, wait_until
from kvcontract.pool.keys import FleetSecret, Keyer, TokenIds, token_array
from kvcontract.pool.request import RequestKv
from kvcontract.store.policy import PLAIN, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.resolve import Resolver, Search
from kvcontract.store.seal import After, Sealer, SealReport
from kvcontract.store.stats import StoreStats, Tally
from kvcontract.store.worker import Worker
from kvcontract.tiers.base import Level, SaveClass, Tier

SAVE_DEADLINE_S: Final = 60.0
"""A save that has not begun by then is given up and tried again at retire."""

LASTING_MAX_TP: Final = 8
"""Default of `max_tp` where records may be read by an engine of another degree."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a store ended (C10).

    Attributes:
        drained: nothing was running any more.
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
        loop: run on this event loop instead of a thread of the store's own.

    Raises:
        NotConformant: the declaration has findings, or tiers ask for what is not served (KVC-OFFLOAD-05).
        UsageFault: ranks or tiers share a name, or a pool is larger than its arenas; all faults are named.
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
    ) -> None:
        _refuse(model, ranks, tiers, secret)
        self.model = model
        self.fingerprint = fingerprint(model)
        self._ranks = {rank.name: rank for rank in ranks}
        self._rank_of = {id(rank.pool): rank for rank in ranks}
        self._tiers = tuple(tiers)
        self._part = parts(model)[0]
        self.keyer = Keyer(self.fingerprint.required, secret or FleetSecret.random(), model.page_tokens)
        tp = max(rank.tp for rank in ranks)
        lasting = any(tier.capabilities.persistent or tier.capabilities.shared for tier in tiers)
        self.max_tp = max_tp if max_tp is not None else max(tp, LASTING_MAX_TP if lasting else 1)
        self._workers = {
            rank.name: Worker(model, layout(model, 0, rank.tp), rank.bindings, max_tp=self.max_tp)
            for rank in ranks
        }
        self._tally = Tally()
        self._resolver = Resolver(self._part, tiers, self._tally)
        self._sealer = Sealer(self._part, tiers, self._tally)
        self._closed: CloseReport | None = None
        self._own_thread = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-store", daemon=True)
        if self._own_thread:
            self._thread.start()
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
            UsageFault: no such rank, or token ids out of range.  A failing tier is a shorter hit instead.
        """
        work = self._resolve(self._rank(rank), token_array(tokens), scope or Scope(), policy)
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def resolve(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        policy: ResolvePolicy = PLAIN,
    ) -> KvPrefix:
        """`resolve_prefix` for callers without an event loop; blocks up to the policy's deadline."""
        return self._wait(self._resolve(self._rank(rank), token_array(tokens), scope or Scope(), policy))

    def seal(
        self, req: RequestKv, cls: SaveClass = SaveClass.CACHEABLE, *, after: After | None = None
    ) -> Pending[SealReport]:
        """Save a request's complete pages that are not known to be stored; never blocks.

        Args:
            req: an unreleased request of one of the ranks.
            cls: why.
            after: waited for before the first byte is read: the event of the step's writes (C2).

        Returns:
            Settles with what became of it, once every copy has landed.
        """
        rank = self._rank_by_request(req)
        deadline = self._loop.time() + SAVE_DEADLINE_S
        worker = self._workers[rank.name]
        return self._sealer.seal(rank, worker, req, cls=cls, deadline=deadline, after=after)

    def retire(self, req: RequestKv, cls: SaveClass = SaveClass.CACHEABLE) -> Pending[SealReport]:
        """Save what is not stored yet, failed pages again, and release the request; never blocks (C6).

        Pages with a save in flight stay resident until it settles, whoever owned them.
        """
        try:
            return self.seal(req, cls)
        finally:
            req.release()

    # Barriers

    async def flush_saves(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """Wait for every save submitted before; True if all settled and the tiers reached `level` in time."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        if not await _settled(self._sealer.saves, deadline):
            return False
        flushed = [tier.flush(level, deadline) for tier in self._tiers]
        return await _settled(flushed, deadline) and all(item.value for item in flushed)

    async def flush_loads(self, deadline_s: float = 60.0) -> bool:
        """Wait for every load submitted before, abandoned ones too; True if all settled in time."""
        return await _settled(self._resolver.loads, asyncio.get_running_loop().time() + deadline_s)

    def flush(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """`flush_saves` for callers without an event loop."""
        return self._wait(self.flush_saves(level, deadline_s))

    # The rest

    def stats(self) -> StoreStats:
        """Counters, hit tokens by source, reasons for shorter hits, and gauges (I6)."""
        pinned = sum(rank.pool.pinned_blocks for rank in self._ranks.values())
        return self._tally.read(saves=len(self._sealer.saves), pinned_blocks=pinned)

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Each tier's own counters and gauges."""
        return {tier.name: tier.stats() for tier in self._tiers}

    @property
    def pinned_blocks(self) -> int:
        """Pages with saves in flight (a gauge)."""
        return self.stats().gauges["pinned_blocks"]

    def close(self, deadline_s: float = 10.0) -> CloseReport:
        """Take no more work, drain loads and saves, close the tiers (C10); again: the same report."""
        if self._closed is None:
            self._closed = self._wait(self._close(deadline_s))
            if self._own_thread and self._closed.drained:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
        return self._closed

    async def aclose(self, deadline_s: float = 10.0) -> CloseReport:
        """`close` for a store that runs on a given loop; call it there."""
        if self._closed is None:
            self._closed = await self._close(deadline_s)
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    async def _resolve(self, rank: Rank, tokens: Any, scope: Scope, policy: ResolvePolicy) -> KvPrefix:
        self._refuse_if_closed()
        deadline = self._loop.time() + policy.deadline_s
        page = self.model.page_tokens
        covered = len(tokens) if policy.full_pages else max(0, len(tokens) - 1)  # A12
        keys = self.keyer.chain(tokens[: covered // page * page], scope)
        hold = rank.pool.match(keys)
        search = Search(rank, self._workers[rank.name], keys, hold, policy, deadline)
        return await self._resolver.resolve(search, len(tokens))

    async def _close(self, deadline_s: float) -> CloseReport:
        self._closing = True
        deadline = self._loop.time() + deadline_s
        await _settled(self._resolver.loads, deadline)
        await _settled(self._sealer.saves, deadline)
        for stop in self._stop:
            stop()
        stuck = tuple(tier.name for tier in self._tiers if not tier.close(deadline))
        loads, saves = len(self._resolver.loads), len(self._sealer.saves)
        for worker in self._workers.values():
            worker.close(deadline)
        return CloseReport(not (loads or saves or stuck), loads, saves, stuck)

    _closing = False

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise UsageFault("the store is closed: it takes no more work")

    def _rank(self, name: str) -> Rank:
        if name not in self._ranks:
            raise UsageFault(f"there is no rank {name!r}; ranks: {', '.join(self._ranks)}")
        return self._ranks[name]

    def _rank_by_request(self, req: RequestKv) -> Rank:
        rank = self._rank_of.get(id(req.pool))
        if rank is None:
            raise UsageFault("the request draws from a pool that is no rank of this store")
        self._refuse_if_closed()
        return rank

    def _waker(self, rank: str) -> Callable[[], None]:
        def wake() -> None:
            self._loop.call_soon_threadsafe(self._resolver.pages_came_back, rank)

        return wake

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._own_thread:
            work.close()
            raise UsageFault("this store runs on a loop of yours: await its coroutines there")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _settled(pendings: Sequence[Pending[Any]], deadline: float) -> bool:
    try:
        await wait_until(all_of(list(pendings)), deadline)
    except TimeoutError:
        return False
    return True


def _refuse(model: KvModel, ranks: Sequence[Rank], tiers: Sequence[Tier], secret: FleetSecret | None) -> None:
    findings = check_model(model)
    if findings:
        raise NotConformant(model.name, findings)
    faults = [] if ranks else ["a store has at least one rank"]
    for what, names in (("rank", [rank.name for rank in ranks]), ("tier", [tier.name for tier in tiers])):
        faults += [f"two {what}s are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    for rank in ranks:
        if rank.pool.page_tokens != model.page_tokens:
            faults.append(f"rank {rank.name!r}: its pool's page differs from {model.page_tokens} tokens")
    lasting = [tier.name for tier in tiers if tier.capabilities.persistent or tier.capabilities.shared]
    if lasting and secret is None:
        faults.append(f"tier {', '.join(lasting)} outlives or leaves this process: give the fleet's secret")
    if faults:
        raise UsageFault("; ".join(faults))
    for rank in ranks:
        rank.pool.check_capacity({key: binding.blocks for key, binding in rank.bindings.items()})
    _refuse_unserved(model, ranks, tiers, lasting)


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
