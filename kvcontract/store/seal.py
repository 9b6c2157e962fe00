"""Seal and retire: complete records on their way to the tiers.

A full page is immutable, so sealing copies it from where it lies: guards pin the page until every copy has
landed (C1), while its owner goes on or is gone.  Nothing here waits: what a save becomes is settled on the
thread that finishes it.  A record of several pages is saved once all of them are complete; its last page,
whose key tells all tokens before it, carries what is known of the record.

Saves that nobody waits for may pin only a share of the pool (C5).  What is above it is shed: a request that
goes on seals again anyway, and what a retired one leaves behind is tried when pins come back, as long as it
is resident.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending
from kvcontract.pool.events import Content
from kvcontract.pool.keys import Keyer
from kvcontract.pool.request import RequestKv
from kvcontract.store.known import Known
from kvcontract.store.loads import Landed
from kvcontract.store.rank import Berth, Rank
from kvcontract.store.relay import Relays
from kvcontract.store.saver import Saver
from kvcontract.store.saves import NOTHING, Batch, Run, SealReport, Shed
from kvcontract.store.stats import Tally
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.store.worker import After
from kvcontract.store.workers import Workers
from kvcontract.tiers.base import Clock, SaveClass
from kvcontract.tiers.cipher import KeyId

__all__ = ["NOTHING", "SealReport", "Sealer"]

KEPT_SHED: Final = 256
"""Retired requests whose shed pages are remembered, a rank."""


class Sealer(Saver):
    """Runs saves; knows which are in flight.

    Args:
        known: what is known of each tier, fastest first; each gets every record.
        policies: of each tier.
        relays: bring records to the tiers that are written back.
        ranks: name -> rank and its workers.
        keyer: derives keys of records.
        tally: where everything is counted.
        clock: the store's.
        budget: share of a pool that saves may pin which may be shed.
        tell: whether somebody is told what pages hold.
        key_of: what records of a scope are encrypted with; None: unknown, so they leave the process nowhere.
    """

    def __init__(
        self,
        known: Sequence[Known],
        policies: Sequence[TierPolicy],
        relays: Relays,
        ranks: Mapping[str, tuple[Rank, Workers]],
        keyer: Keyer,
        tally: Tally,
        clock: Clock,
        *,
        budget: float,
        tell: bool,
        key_of: Callable[[Scope], KeyId | None],
    ) -> None:
        super().__init__(known, policies, relays, ranks, tally, clock, budget=budget)
        self._ranks = {name: rank for name, (rank, _) in ranks.items()}
        self._keyer = keyer
        self._tell = tell
        self._key_of = key_of
        self._shed: dict[str, deque[Shed]] = {name: deque() for name in ranks}
        self._sealed: WeakKeyDictionary[RequestKv, int] = WeakKeyDictionary()

    @property
    def shed(self) -> tuple[Pending[None], ...]:
        """Shed pages of retired requests that wait for their turn."""
        with self._lock:
            return tuple(item.done for line in self._shed.values() for item in line)

    def seal(
        self,
        rank: Rank,
        req: RequestKv,
        *,
        cls: SaveClass,
        after: After | None,
        last: bool,
        handoff: str | None = None,
        scope_tag: str = "",
    ) -> Pending[SealReport]:
        """Save the request's complete records that are not known to be stored.

        Never blocks and never raises for what befalls a save; the report settles once every copy has landed.

        Args:
            rank: of the request.
            req: the request.
            cls: why.
            after: see `Workers.save`.
            last: nobody will seal it again: records that failed before are tried too (C4), and those that are
                shed are remembered.
            handoff: with `SaveClass.HANDOFF`, its name.
            scope_tag: of the request's scope, for events.

        Raises:
            UsageFault: the request is released.
        """
        if req.released:
            raise UsageFault("the request is released: its pages may be another's by now; seal before that")
        if req.registered < self._step or not self._known:
            return Pending.of(NOTHING)
        with self._lock:
            batch = self._looked(rank, req, cls, handoff, scope_tag, last=last)
        self._expected.pass_on()
        if batch is None:
            return Pending.of(NOTHING)  # C9
        batch.after = after
        shed = batch.shed_pages > 0
        if shed and last:
            keys = batch.run.keys.copy()
            still = np.ones((len(self._known), len(keys)), np.bool_)
            left = Shed(keys, req.keys.copy(), batch.run.content, batch.run.key, still, after=after)
            self._remember(rank, left)
        self._start(batch)
        if shed and last:
            self._drain(rank)  # pins may have come back before it was remembered
        return batch.report

    def promote(self, landed: Landed, tier: int) -> None:
        """Bring records that came from a lower tier to those above it as well."""
        rank, search = landed.search.rank, landed.search
        above, end = self._above(tier), int(landed.numbers[-1]) + 1
        if not above or not landed.held:
            return
        content = search.record_content(end) if self._tell else None
        pages = search.hold.pages[: end * self._step].reshape(end, self._step)
        run = Run(
            search.records[:end], pages, rank.pool.generation[pages[:, -1]], content, key=search.ask.key
        )
        came = np.zeros(end, np.bool_)
        came[landed.numbers] = True
        self._start_promoted(self._promoted(rank, run, above, came))

    def give_up_shed(self) -> None:
        """Forget what was shed: nothing is saved any more."""
        with self._lock:
            items = [item for line in self._shed.values() for item in line]
            for line in self._shed.values():
                line.clear()
        for item in items:
            item.end()

    # Planning, under the lock

    def _looked(
        self, rank: Rank, req: RequestKv, cls: SaveClass, handoff: str | None, scope_tag: str, *, last: bool
    ) -> Batch | None:
        """What of a request is to be saved now."""
        keys, size = req.record_keys(self._keyer), self._keyer.page_tokens
        count, content = len(keys), None
        pages = req.pages[: count * self._step].reshape(count, self._step)
        if self._tell:
            content = Content(req.tokens[: count * size], scope_tag)
        # What it began with, and what a seal before has dealt with, is looked at again in the end.
        seen = self._sealed.get(req, req.hit_tokens // size)
        first = 0 if last or handoff is not None else min(count, seen)
        generations = rank.pool.generation[pages[first:, -1]]
        run = Run(keys, pages, generations, content, first, self._key_of(req.scope))
        batch = self._planned(rank, run, cls, handoff, retry=last)
        if handoff is None:
            self._sealed[req] = count if batch is None or not batch.shed_pages else first
        return batch

    # What was shed

    def _came_back(self, rank: Berth) -> None:
        # What a tier has room for again may be another rank's.
        for each in self._ranks.values() if self._saving.limited else (self._ranks[rank.name],):
            self._drain(each)

    def _remember(self, rank: Rank, item: Shed) -> None:
        with self._lock:
            line = self._shed[rank.name]
            line.append(item)
            dropped = line.popleft() if len(line) > KEPT_SHED else None
        if dropped is not None:
            dropped.end()

    def _drain(self, rank: Rank) -> None:
        """Try what was shed, oldest first, as far as the budget goes; one at a time."""
        while True:
            with self._lock:
                line = self._shed[rank.name]
                if not self._may_drain(rank, bool(line)):
                    return
                item = line[0]
            try:
                left, begun = self._try_shed(rank, item)
            finally:
                again = self._drained(rank)
            if left and not begun and not again:
                return  # until a tier has room again
            if not left and self._forgotten(rank, item):
                item.end()

    def _forgotten(self, rank: Rank, item: Shed) -> bool:
        with self._lock:
            line = self._shed[rank.name]
            if line and line[0] is item:
                line.popleft()
                return True
        return False

    def _try_shed(self, rank: Rank, item: Shed) -> tuple[bool, bool]:
        """Save what is resident of it; whether something is still left to try, and whether anything began."""
        with rank.pool.match(item.page_keys) as hold:
            count, first = min(hold.hit_pages // self._step, len(item.keys)), item.first
            pages, batch = hold.pages[: count * self._step].reshape(count, self._step).copy(), None
            content = item.cut(count, self._keyer.page_tokens)
            generations = rank.pool.generation[pages[first:, -1]]
            run = Run(item.keys[:count], pages, generations, content, first, item.key)
            with self._lock:
                if count > first:
                    batch = self._planned(rank, run, SaveClass.CACHEABLE, None, retry=True, item=item)
                left = item.tried(first, batch)
                if batch is not None and not len(batch.numbers):
                    del self._open[batch]
                    batch = None
        self._expected.pass_on()
        if batch is None:
            return left, False
        self._tally.count("pages_tried_again", len(batch.pages))
        item.saves.append(batch.done)
        # They were told of when they were shed first.
        batch.shed, batch.capped = batch.shed[:0], batch.capped[:0, :0]
        batch.after = item.after
        self._start(batch)
        return left, True
