"""`KvStore`: prefix reuse and offload for the ranks of one model.

One asynchronous core runs on one event loop, the store's own thread unless a loop is given; the synchronous
façade is for engines without one.  Every wait has a deadline (R5); no failure of a tier reaches the caller
as an exception (R4).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import count
from typing import Any, Self

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import KvModel, Scope
from kvcontract.core.jit import warm_up
from kvcontract.core.lane import Lane
from kvcontract.core.pending import Pending
from kvcontract.pool.events import Event
from kvcontract.pool.keys import FleetSecret, PageKeys, TokenIds, token_array
from kvcontract.pool.media import Media, MediaItem
from kvcontract.pool.request import RequestKv
from kvcontract.store.barriers import reached
from kvcontract.store.control import ResetReport
from kvcontract.store.core import CloseReport, StoreCore, StoreOptions, settled
from kvcontract.store.explain import Explanation
from kvcontract.store.handoffs import HandoffReport
from kvcontract.store.loop import StoreLoop
from kvcontract.store.pins import PIN_TTL_S, Pin
from kvcontract.store.policy import PLAIN, CancelToken, KvPrefix, ResolvePolicy
from kvcontract.store.rank import Rank
from kvcontract.store.saves import NOTHING, SealReport
from kvcontract.store.search import Ask
from kvcontract.store.stats import StoreStats
from kvcontract.store.worker import After
from kvcontract.tiers.base import Level, SaveClass, Tier

__all__ = ["NOTHING", "KvStore", "StoreOptions"]


# long: the public face of all that a store does, a short method each
class KvStore:
    """Resolve, seal and retire for the ranks of one model.

    Args:
        model: the declaration; without findings.
        ranks: one or several; the table is frozen (A26).
        tiers: below the device, fastest first; the store closes them.
        secret: the fleet's, with which keys are derived; None: the one that the persistent and shared tiers
            keep, or else random.  One that is given must be theirs; where a tier has none yet, it keeps this.
        loop: run on this event loop instead of a thread of the store's own; deadlines are on its clock, also
            those that tiers are given.
        lane: where bytes are copied and checked; None: a thread for each worker.
        options: how it behaves.
        more: options by name, instead.

    Attributes:
        too_small_tiers: names of tiers that no record of the model fits into: they are left alone (H7).

    Raises:
        NotConformant: the declaration has findings, or a lasting tier has no weights to name
            (KVC-OFFLOAD-05).
        UsageFault: ranks, pools, tiers or options that cannot be served together; all faults are named.
    """

    def __init__(
        self,
        model: KvModel,
        ranks: Sequence[Rank],
        tiers: Sequence[Tier] = (),
        *,
        secret: FleetSecret | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        lane: Lane | None = None,
        options: StoreOptions | None = None,
        **more: Any,
    ) -> None:
        chosen = _options(options, more)
        warm_up()  # a kernel that compiled at its first call would do so under a pool's lock
        self.model = model
        self._numbers = count(1)
        self._closed: CloseReport | None = None
        self._close_gate = threading.Lock()
        self._close_task: asyncio.Task[CloseReport] | None = None
        self._loop = StoreLoop(loop)
        with ExitStack() as undo:
            undo.callback(self._loop.stop)
            self._core = StoreCore(
                model, ranks, tiers, secret=secret, clock=self._loop, lane=lane, options=chosen
            )
            undo.pop_all()
        self.keyer, self.record_keyer = self._core.keyer, self._core.record_keyer
        self.fingerprint = self._core.fingerprint
        self.max_tp = self._core.max_tp
        self.too_small_tiers = self._core.too_small

    # The three verbs

    async def resolve_prefix(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        policy: ResolvePolicy = PLAIN,
        *,
        cancel: CancelToken | None = None,
        media: Sequence[MediaItem] = (),
        label: str | None = None,
    ) -> KvPrefix:
        """The longest prefix of a prompt that is resident on a rank, or can be made so in time.

        May be awaited on any event loop; cancelling gives everything back, and what was already being loaded
        is still registered when it lands.

        Args:
            rank: name of the rank.
            tokens: the whole prompt.
            scope: who may share.
            policy: how far to go.
            cancel: ends it from anywhere with an empty prefix (A11).
            media: items of the prompt; no hit ends inside an uncut one.
            label: the caller's name for it, for `explain`; it need not be unique (A14).

        Raises:
            UsageFault: no such rank, token ids out of range, a demand that cannot be met here (A24), or the
                store is closed.  A failing tier is a shorter hit instead.
        """
        ask = self._ask(rank, tokens, scope, policy, cancel, media, label)
        return await self._loop.run(self._core.resolve(ask), KvPrefix.release)

    def resolve(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        policy: ResolvePolicy = PLAIN,
        *,
        cancel: CancelToken | None = None,
        media: Sequence[MediaItem] = (),
        label: str | None = None,
    ) -> KvPrefix:
        """`resolve_prefix` for callers without an event loop; blocks up to the policy's deadline."""
        ask = self._ask(rank, tokens, scope, policy, cancel, media, label)
        return self._loop.wait(self._core.resolve(ask), KvPrefix.release)

    def seal(
        self,
        req: RequestKv,
        cls: SaveClass = SaveClass.CACHEABLE,
        *,
        after: After | None = None,
        handoff: str | None = None,
    ) -> Pending[SealReport]:
        """Save a request's complete pages that are not known to be stored; never blocks.

        Args:
            req: an unreleased request of one of the ranks.
            cls: why.
            after: waited for before the first byte is read: the event of the step's writes (C2).  Called by
                each worker that writes, for each tier, on that worker's lane.
            handoff: with `SaveClass.HANDOFF`, the name under which `flush_handoff` and `release_handoff` know
                it.

        Returns:
            Settles with what became of it, once every copy has landed.  A closed store refuses every page.

        Raises:
            UsageFault: the request is released, or of a pool that is no rank of this store; a handoff without
                a name, or a name without a handoff.
        """
        return self._seal(req, cls, after, handoff, last=False)

    def checkpoint(self, req: RequestKv) -> None:
        """Copy what stands beside full pages, if somebody wants to go on from where the request stands (F1).

        To be called after the step that has ended there and before the next one; `seal` does so first.  Never
        blocks and never raises for what befalls the copy: without room for it nobody goes on from there.

        Raises:
            UsageFault: the request is of a pool that is no rank of this store.
        """
        self._core.snapshots.take(self._core.rank_of(req), req)

    def retire(
        self,
        req: RequestKv,
        cls: SaveClass = SaveClass.CACHEABLE,
        *,
        after: After | None = None,
        handoff: str | None = None,
    ) -> Pending[SealReport]:
        """Save what is not stored yet, failed pages again, and release the request; never blocks (C6).

        Pages with a save in flight stay resident until it settles, whoever owned them; one that fails then is
        tried once more.  Arguments and errors are those of `seal`; whatever is raised, the request is
        released, and a step that is outstanding reverted.
        """
        try:
            return self._seal(req, cls, after, handoff, last=True)
        finally:
            with req:
                pass

    # Barriers

    async def flush_saves(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """Wait for every save submitted before; True if all settled and the tiers reached `level` in time.

        Barriers are answered in the order of the calls; `durable` asks the tiers that outlive the process
        (C8).  May be awaited on any event loop.

        Raises:
            UsageFault: the store is closed.
        """
        return await self._loop.run(self._flush(level, deadline_s), _nothing)

    async def flush_loads(self, deadline_s: float = 60.0) -> bool:
        """Wait until every load submitted before, abandoned ones too, has settled and is registered.

        Returns:
            Whether all did in time.

        Raises:
            UsageFault: the store is closed.
        """
        return await self._loop.run(self._core.flush_loads(self._loop.time() + deadline_s), _nothing)

    def flush(self, level: Level = "landed", deadline_s: float = 60.0) -> bool:
        """`flush_saves` for callers without an event loop."""
        return self._loop.wait(self._flush(level, deadline_s), _nothing)

    async def aflush_handoff(self, handoff: str, deadline_s: float = 5.0) -> HandoffReport:
        """Wait for the saves of one handoff; at the deadline, what is known of it by then (C7).

        Raises:
            UsageFault: the store is closed.
        """
        return await self._loop.run(self._flush_handoff(handoff, deadline_s), _nothing)

    def flush_handoff(self, handoff: str, deadline_s: float = 5.0) -> HandoffReport:
        """`aflush_handoff` for callers without an event loop."""
        return self._loop.wait(self._flush_handoff(handoff, deadline_s), _nothing)

    def release_handoff(self, handoff: str) -> None:
        """The other side has its copy, or will not come: records of a handoff may be evicted; idempotent."""
        for saver in self._core.savers:
            saver.handoffs.forget(handoff)
        for tier in self._core.all_tiers:
            tier.release_handoff(handoff)

    # Residency

    def probe(
        self, tokens: TokenIds, scope: Scope | None = None, *, media: Sequence[MediaItem] = ()
    ) -> dict[str, int]:
        """How many leading tokens of a prompt are resident on each rank; pins nothing, asks no tier.

        Raises:
            UsageFault: token ids out of range.
        """
        keys = self._keys(tokens, scope, media)
        page = self.model.page_tokens
        return {name: rank.pool.probe(keys) * page for name, rank in self._core.ranks.items()}

    def pin(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        ttl_s: float = PIN_TTL_S,
        media: Sequence[MediaItem] = (),
    ) -> Pin:
        """Keep what is resident of a prompt from eviction, for a while, within budget and quota.

        Raises:
            UsageFault: no such rank, token ids out of range, a time that is not above 0, or the store is
                closed.
        """
        self._loop.refuse_if_closed()
        if not ttl_s > 0:
            raise UsageFault(f"a pin for {ttl_s} s; allowed is more than 0")
        keys = self._keys(tokens, scope, media)
        return self._core.pins.pin(self._core.rank(rank), keys, scope or Scope(), ttl_s, self._loop.time())

    def unpin(self, pin: Pin | int) -> bool:
        """End a pin; False if it has ended already."""
        return self._core.pins.unpin(pin if isinstance(pin, int) else pin.id)

    # Switches

    def set_prefix_cache(self, on: bool) -> None:
        """Switch prefix caching: off, no resolve finds anything, only handoffs are saved, nothing is kept.

        Resolves under way finish as they began.
        """
        self._core.switches.set_prefix_cache(on)

    def set_retention(self, on: bool) -> None:
        """Switch whether devices keep released pages; off drains them once, and tiers go on alone."""
        self._core.switches.set_retention(on)

    async def areset(self, tiers: Sequence[str] | None = None, deadline_s: float = 60.0) -> ResetReport:
        """Forget everything kept: on the devices, and in these tiers, or in all.

        Ordered (C11): it runs once what was submitted before has ended and nothing is active; resolves that
        come later wait for it.  Pins end with it.

        Raises:
            UsageFault: no such tier, or the store is closed.
        """
        return await self._loop.run(self._reset(tiers, deadline_s), _nothing)

    def reset(self, tiers: Sequence[str] | None = None, deadline_s: float = 60.0) -> ResetReport:
        """`areset` for callers without an event loop."""
        return self._loop.wait(self._reset(tiers, deadline_s), _nothing)

    # Figures

    def stats(self) -> StoreStats:
        """Counters, hit tokens by source, reasons for shorter hits, what moved, gauges (I6)."""
        return self._core.stats()

    def gauges(self) -> dict[str, int]:
        """The gauges of `stats` alone: cheap enough for every step of a scheduler."""
        return self._core.gauges()

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Each tier's own counters and gauges."""
        return {tier.name: tier.stats() for tier in self._core.all_tiers}

    def explain(self, resolve: KvPrefix | int | str) -> Explanation:
        """Why a hit was as long as it was: by its prefix, its id, or the latest of a label (I8).

        Raises:
            UsageFault: it is not among the latest.
        """
        return self._core.explanations.of(resolve.id if isinstance(resolve, KvPrefix) else resolve)

    def take_events(self) -> list[tuple[str, Event]]:
        """What became findable or is no longer, since the last call: (rank, event), or ("", event) of tiers.

        Devices tell if their pools were given an `EventLog`, tiers if the store was given `TierEvents` (I7).
        """
        return self._core.take_events()

    def computed(self, tokens: int, seconds: float) -> None:
        """Tell the cost model how long an executor took to prefill so many tokens (A21)."""
        self._core.cost.computed(tokens, seconds)

    @property
    def pinned_blocks(self) -> int:
        """Pages with saves in flight (a gauge)."""
        return self.gauges()["pinned_blocks"]

    # Its end

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

    def _ask(
        self,
        rank: str,
        tokens: TokenIds,
        scope: Scope | None,
        policy: ResolvePolicy,
        cancel: CancelToken | None,
        media: Sequence[MediaItem],
        label: str | None,
    ) -> Ask:
        found, ids = self._core.rank(rank), token_array(tokens)
        self._core.refuse_demand(policy)
        deadline, items = self._loop.time() + policy.deadline_s, Media(media, len(ids))
        workers, number = self._core.pages.workers[rank], next(self._numbers)
        given = scope or Scope()
        key = self._core.key_of(given)
        return Ask(number, found, workers, ids, given, policy, deadline, items, cancel, label, key)

    def _keys(self, tokens: TokenIds, scope: Scope | None, media: Sequence[MediaItem]) -> PageKeys:
        ids, page = token_array(tokens), self.model.page_tokens
        items = Media(media, len(ids))
        pages = items.floor_pages(len(ids), page)
        extras = items.extras(page, pages)
        return self.keyer.chain(ids[: pages * page], scope or Scope(), extras=extras)

    def _seal(
        self, req: RequestKv, cls: SaveClass, after: After | None, handoff: str | None, *, last: bool
    ) -> Pending[SealReport]:
        rank = self._core.rank_of(req)
        if (cls is SaveClass.HANDOFF) != (handoff is not None):
            raise UsageFault(f"a save of class {cls.value} with handoff {handoff!r}: a handoff has a name")
        if cls is not SaveClass.HANDOFF and not self._core.switches.prefix_cache and not req.released:
            return Pending.of(NOTHING)
        return self._core.seal(
            rank,
            req,
            cls=cls,
            after=after,
            last=last,
            handoff=handoff,
            scope_tag=self.keyer.scope_tag(req.scope) if self._core.options.events else "",
        )

    async def _flush(self, level: Level, deadline_s: float) -> bool:
        deadline = self._loop.time() + deadline_s
        return await reached(self._core.barriers.ask(level, deadline), deadline)

    async def _flush_handoff(self, handoff: str, deadline_s: float) -> HandoffReport:
        every = [saver.handoffs for saver in self._core.savers]
        waited = [pending for handoffs in every for pending in handoffs.open(handoff)]
        await settled(waited, self._loop.time() + deadline_s)
        return HandoffReport.joined([handoffs.report(handoff) for handoffs in every])

    async def _reset(self, tiers: Sequence[str] | None, deadline_s: float) -> ResetReport:
        return await self._core.resetter.reset(self._loop.time() + deadline_s, tiers)

    async def _close(self, deadline_s: float) -> CloseReport:
        return await self._core.close(self._loop.time() + deadline_s)


def _options(given: StoreOptions | None, more: dict[str, Any]) -> StoreOptions:
    try:
        return replace(given or StoreOptions(), **more)
    except TypeError:
        known = [item.name for item in fields(StoreOptions)]
        wrong = ", ".join(sorted(set(more) - set(known)))
        raise UsageFault(f"no such option: {wrong}; options are {', '.join(known)}") from None


def _nothing(_: object) -> None:
    """Nothing to undo."""
