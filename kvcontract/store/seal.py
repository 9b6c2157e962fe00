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

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending, all_of, report_uncaught
from kvcontract.pool.events import Content
from kvcontract.pool.keys import Keyer
from kvcontract.pool.request import RequestKv
from kvcontract.store.expect import Expectations
from kvcontract.store.handoffs import Handoff, Handoffs
from kvcontract.store.known import Known
from kvcontract.store.loads import Landed
from kvcontract.store.plan import Plan, chosen
from kvcontract.store.rank import Rank
from kvcontract.store.relay import Relays
from kvcontract.store.saves import NOTHING, Batch, PinBudget, Run, SavingBudgets, SealReport, Shed
from kvcontract.store.stats import Tally
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.store.worker import After
from kvcontract.store.workers import Verdict, Workers
from kvcontract.tiers.base import Clock, Code, SaveClass
from kvcontract.tiers.cipher import KeyId

__all__ = ["NOTHING", "SealReport", "Sealer"]

KEPT_SHED: Final = 256
"""Retired requests whose shed pages are remembered, a rank."""


class Sealer:
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
        self._known = tuple(known)
        self._policies = tuple(policies)
        self._relays = relays
        self._ranks = [rank for rank, _ in ranks.values()]
        self._workers = {name: workers for name, (_, workers) in ranks.items()}
        self._keyer = keyer
        self._step = max(workers.record_pages for workers in self._workers.values())
        self._tally = tally
        self._clock = clock
        self._tell = tell
        self._key_of = key_of
        self._lock = threading.Lock()
        self._open: dict[Batch, None] = {}
        self._budgets = {
            name: PinBudget(rank.pool.pages, max(self._step, int(budget * rank.pool.total)))
            for name, (rank, _) in ranks.items()
        }
        size = max(workers.saved_record_bytes for workers in self._workers.values())
        limits = [policy.most_saving_bytes for policy in policies]
        self._saving = SavingBudgets([limit and limit // size for limit in limits])
        self._expected = Expectations(known, relays, clock)
        self._shed: dict[str, deque[Shed]] = {name: deque() for name in ranks}
        self._draining: set[str] = set()
        self._sealed: WeakKeyDictionary[RequestKv, int] = WeakKeyDictionary()
        shared = [number for number, item in enumerate(known) if item.tier.capabilities.shared]
        self._visible = shared or list(range(len(self._known)))  # where another engine looks
        self.handoffs = Handoffs(len(self._visible), self._step)

    @property
    def saves(self) -> tuple[Pending[None], ...]:
        """Saves in flight, oldest first; what is tried again for one belongs to it (C8)."""
        with self._lock:
            return tuple(batch.done for batch in self._open)

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
            self._remember(rank, Shed(keys, req.keys.copy(), batch.run.content, batch.run.key, still))
        self._start(batch)
        if shed and last:
            self._drain(rank)  # pins may have come back before it was remembered
        return batch.report

    def promote(self, landed: Landed, tier: int) -> None:
        """Bring records that came from a lower tier to those above it as well."""
        rank, search = landed.search.rank, landed.search
        above = [number for number in range(tier) if self._policies[number].promote]
        end = int(landed.numbers[-1]) + 1
        if not above or not landed.held:
            return
        content = search.record_content(end) if self._tell else None
        pages = search.hold.pages[: end * self._step].reshape(end, self._step)
        run = Run(
            search.records[:end], pages, rank.pool.generation[pages[:, -1]], content, key=search.ask.key
        )
        now, came = self._clock(), np.zeros(end, np.bool_)
        came[landed.numbers] = True
        with self._lock:
            plan = self._plan(end)
            for number in above:
                missing = self._known[number].of(rank).missing(run.last, run.generations, now, retry=False)
                plan.of(number)[:] = missing & came
            batch = self._made(rank, run, plan, [SaveClass.WRITE_BACK] * len(self._known), budgeted=True)
        self._expected.pass_on()
        if batch is not None:
            self._start(batch)

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

    def _plan(self, pages: int) -> Plan:
        shape = len(self._known), pages
        return Plan(np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), self._relays.targets)

    def _planned(
        self,
        rank: Rank,
        run: Run,
        cls: SaveClass,
        handoff: str | None,
        *,
        retry: bool,
        item: Shed | None = None,
    ) -> Batch | None:
        now, classes = self._clock(), [cls] * len(self._known)
        plan = self._plan(len(run.generations))
        named: Handoff | None = None
        owed: list[NDArray[np.bool_]] = []
        if handoff is not None:
            named, owed = self.handoffs.begin(handoff, run.keys)
        for number, known in enumerate(self._known):
            if handoff is not None and number in self._visible:
                # Where another process looks, it has to be at once: straight from the device.
                plan.save[number] = owed[self._visible.index(number)]
                continue
            if handoff is not None:
                classes[number] = SaveClass.CACHEABLE  # a private tier keeps nothing for others
            # An item that is looked at again asks for no further try: that would go on for ever (R5).
            again = retry and (item is None or item.fresh)
            marks = known.of(rank)
            plan.of(number)[:] = marks.missing(run.last, run.generations, now, retry=retry, again=again)
        if item is not None:
            plan.keep(item.open[:, run.first : len(run.keys)])
        budgeted = cls is not SaveClass.HANDOFF  # C5
        return self._made(rank, run, plan, classes, budgeted=budgeted, handoff=named)

    def _made(
        self,
        rank: Rank,
        run: Run,
        plan: Plan,
        classes: Sequence[SaveClass],
        *,
        budgeted: bool,
        handoff: Handoff | None = None,
    ) -> Batch | None:
        """Choose what may be pinned, pin it (C1), and mark it as being saved; None if there is nothing."""
        left = self._budgets[rank.name].left // self._step if budgeted else None
        batch = chosen(rank, run, plan.save, classes, self._saving, left=left, handoff=handoff)
        if batch is not None:
            rank.pool.pin(batch.pages)
            if budgeted:
                self._budgets[rank.name].take(batch.pages)
            for number, known in enumerate(self._known):
                mine = batch.of(number)
                if len(mine):
                    generations = run.generations[batch.numbers[mine] - run.first]
                    keys = run.keys[batch.numbers[mine]]
                    batch.savings[number] = known.of(rank).begin(batch.blocks[mine, -1], keys, generations)
                    if handoff is None:
                        self._saving.take(number, len(mine))
            self._open[batch] = None
        for number in plan.back:
            self._expected.add(number, rank, run, np.flatnonzero(plan.relay[number]))
        return batch

    # Saving

    def _start(self, batch: Batch) -> None:
        self._tally.count("pages_sealed", len(batch.pages))
        if batch.shed_pages:
            self._tally.count("pages_not_saved_shed", batch.shed_pages)
        if batch.handoff is not None:
            self.handoffs.watch(batch.handoff, batch.report)
        now, workers = self._clock(), self._workers[batch.rank.name]
        outcomes = []
        for number, saving in batch.savings.items():
            cls = batch.cls[number]
            op = workers.save(
                self._known[number].tier,
                saving.keys,
                batch.blocks[batch.of(number)],
                cls,
                now + self._policies[number].save_deadline_s,
                batch.after,
                handoff=batch.handoff.name if batch.handoff and cls is SaveClass.HANDOFF else None,
                key=batch.run.key,
            )
            outcomes.append(op.map(partial(self._saved, batch, number, now)))
        # C12: all copies are awaited before anything is released
        all_of(outcomes).on_done(lambda _: self._settle(batch))

    def _saved(self, batch: Batch, number: int, begun: float, verdict: Verdict) -> None:
        """One tier has answered; whatever goes wrong here, the save has its terminal (R8)."""
        rows = batch.of(number)
        if batch.handoff is None:
            with self._lock:
                self._saving.give(number, len(rows))
        try:
            self._booked(batch, number, begun, verdict)
            self._relays.arrived(number, batch.savings[number].keys, verdict.codes == Code.OK)
        except Exception as error:  # noqa: BLE001 - reported; pins must come back
            self._tally.count("faults")
            report_uncaught(error)

    def _booked(self, batch: Batch, number: int, begun: float, verdict: Verdict) -> None:
        rows, ok, now = batch.of(number), verdict.codes == Code.OK, self._clock()
        batch.codes[number, rows] = verdict.codes
        chain = batch.run.keys, batch.numbers[rows], batch.run.content
        known = self._known[number]
        again = known.settled(batch.rank, batch.savings[number], ok, now, chain)
        batch.again[number, rows] = again
        if batch.handoff is not None and number in self._visible:
            at = self._visible.index(number)
            self.handoffs.settled(batch.handoff, at, batch.numbers[rows], verdict.codes)
        saved = int(ok.sum())
        size = saved * self._workers[batch.rank.name].saved_record_bytes
        self._tally.moved(known.tier.name, "save", saved * self._step, size, now - begun)

    def _settle(self, batch: Batch) -> None:
        retry = self._once_more(batch)
        batch.rank.pool.unpin(batch.pages)
        report = batch.outcome()
        with self._lock:
            if batch.budgeted:
                self._budgets[batch.rank.name].give(batch.pages)
            del self._open[batch]
        self._tally.count("pages_saved", report.saved)
        for reason, count in report.failed.items():
            if reason != Code.SHED.name.lower():
                self._tally.count(f"pages_not_saved_{reason}", count)
        batch.report.settle(report)
        if retry is None:
            batch.done.settle(None)
        else:
            retry.done.on_done(batch.done.settle)
            self._start(retry)
        # What a tier has room for again may be another rank's.
        for rank in self._ranks if self._saving.limited else (batch.rank,):
            self._drain(rank)

    def _once_more(self, batch: Batch) -> Batch | None:
        """Records that failed although their request was retired meanwhile: tried again, once (C4)."""
        if not batch.again.any():
            return None
        plan = self._plan(len(batch.run.generations))
        for number in range(len(self._known)):
            plan.of(number)[batch.numbers - batch.run.first] = batch.again[number]
        with self._lock:
            self._tally.count("pages_tried_again", int(batch.again.any(axis=0).sum()) * self._step)
            classes = [SaveClass.CACHEABLE] * len(self._known)
            made = self._made(batch.rank, batch.run, plan, classes, budgeted=False)
        self._expected.pass_on()
        return made

    # What was shed

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
                if rank.name in self._draining or not line or self._budgets[rank.name].left < self._step:
                    return
                self._draining.add(rank.name)
                item = line[0]
            try:
                left, begun = self._try_shed(rank, item)
            finally:
                with self._lock:
                    self._draining.discard(rank.name)
            if left and not begun:
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
        item.saves.append(batch.report)
        # They were told of when they were shed first.
        batch.shed, batch.capped = batch.shed[:0], batch.capped[:0, :0]
        self._start(batch)
        return left, True
