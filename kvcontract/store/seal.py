"""Seal and retire: complete pages on their way to the tiers.

A full page is immutable, so sealing copies it from where it lies: guards pin the page until every copy has
landed (C1), while its owner goes on or is gone.  Nothing here waits: what a save becomes is settled on the
thread that finishes it.

Saves that nobody waits for may pin only a share of the pool (C5).  What is above it is shed: a request that
goes on seals again anyway, and what a retired one leaves behind is tried when pins come back, as long as it
is resident.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending, all_of, report_uncaught
from kvcontract.pool.events import Content
from kvcontract.pool.index import Keys
from kvcontract.pool.request import RequestKv
from kvcontract.store.handoffs import Handoff, Handoffs
from kvcontract.store.known import Known
from kvcontract.store.loads import Landed
from kvcontract.store.rank import Rank
from kvcontract.store.saves import NOTHING, Batch, PinBudget, Run, SealReport
from kvcontract.store.stats import Tally
from kvcontract.store.worker import After
from kvcontract.store.workers import Verdict, Workers
from kvcontract.tiers.base import Clock, Code, SaveClass

__all__ = ["NOTHING", "SealReport", "Sealer"]

SAVE_DEADLINE_S: Final = 60.0
"""A save that has not begun by then is given up and tried again at retire."""

KEPT_SHED: Final = 256
"""Retired requests whose shed pages are remembered, a rank."""


@dataclass(slots=True, eq=False)
class _Shed:
    """Pages of a retired request that still want to be saved; `done` once that has ended, or is given up.

    Each is tried once: one that fails again would keep those behind it waiting for ever.

    Attributes:
        first: number of the first page that has not been tried.
    """

    keys: Keys
    content: Content | None
    first: int = 0
    saves: list[Pending[SealReport]] = field(default_factory=list)
    done: Pending[None] = field(default_factory=Pending)

    def cut(self, pages: int, page_tokens: int) -> Content | None:
        """What the first of its pages hold."""
        told = self.content
        return None if told is None else Content(told.token_ids[: pages * page_tokens], told.scope)

    def end(self) -> None:
        """Nothing more is tried: it is done once what was tried has landed."""
        all_of(self.saves).on_done(lambda _: self.done.settle(None))


class Sealer:
    """Runs saves; knows which are in flight.

    Args:
        known: what is known of each tier, fastest first; each gets every page.
        ranks: name -> rank and its workers.
        tally: where everything is counted.
        clock: the store's.
        budget: share of a pool that saves may pin which may be shed.
        tell: whether somebody is told what pages hold.
    """

    def __init__(
        self,
        known: Sequence[Known],
        ranks: Mapping[str, tuple[Rank, Workers]],
        tally: Tally,
        clock: Clock,
        *,
        budget: float,
        tell: bool,
    ) -> None:
        self._known = tuple(known)
        self._workers = {name: workers for name, (_, workers) in ranks.items()}
        self._tally = tally
        self._clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._open: dict[Batch, None] = {}
        self._budgets = {
            name: PinBudget(rank.pool.pages, max(1, int(budget * rank.pool.total)))
            for name, (rank, _) in ranks.items()
        }
        self._shed: dict[str, deque[_Shed]] = {name: deque() for name in ranks}
        self._draining: set[str] = set()
        self._sealed: WeakKeyDictionary[RequestKv, int] = WeakKeyDictionary()
        shared = [number for number, item in enumerate(known) if item.tier.capabilities.shared]
        self._visible = shared or list(range(len(self._known)))  # where another engine looks
        self.handoffs = Handoffs(len(self._visible))

    @property
    def saves(self) -> tuple[Pending[SealReport], ...]:
        """Saves in flight, oldest first."""
        with self._lock:
            return tuple(batch.report for batch in self._open)

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
        """Save the request's complete pages that are not known to be stored.

        Never blocks and never raises for what befalls a save; the report settles once every copy has landed.

        Args:
            rank: of the request.
            req: the request.
            cls: why.
            after: see `Workers.save`.
            last: nobody will seal it again: pages that failed before are tried too (C4), and those that are
                shed are remembered.
            handoff: with `SaveClass.HANDOFF`, its name.
            scope_tag: of the request's scope, for events.

        Raises:
            UsageFault: the request is released.
        """
        if req.released:
            raise UsageFault("the request is released: its pages may be another's by now; seal before that")
        if not req.registered or not self._known:
            return Pending.of(NOTHING)
        with self._lock:
            batch = self._looked(rank, req, cls, handoff, scope_tag, last=last)
        if batch is None:
            return Pending.of(NOTHING)  # C9
        batch.after = after
        shed = batch.shed
        if shed and last:
            self._remember(rank, _Shed(batch.run.keys.copy(), batch.run.content))
        self._start(batch)
        if shed and last:
            self._drain(rank)  # pins may have come back before it was remembered
        return batch.report

    def write_back(self, landed: Landed, tier: int) -> None:
        """Bring pages that came from a lower tier to those above it as well."""
        rank, search = landed.search.rank, landed.search
        above, end = self._known[:tier], int(landed.numbers[-1]) + 1
        if not above or not landed.held:
            return
        content = search.content(0, end) if self._tell else None
        pages = search.hold.pages[:end]
        run = Run(search.keys[:end], pages, rank.pool.generation[pages], content)
        now = self._clock()
        with self._lock:
            todo = np.zeros((len(self._known), end), np.bool_)
            for number, known in enumerate(above):
                mine = known.of(rank).missing(pages, run.generations, now, retry=False)
                todo[number, landed.numbers] = mine[landed.numbers]
            batch = self._made(rank, run, todo, [SaveClass.WRITE_BACK] * len(self._known), budgeted=True)
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
        count, page = req.registered, rank.pool.page_tokens
        pages, content = req.pages[:count], None
        if self._tell:
            content = Content(req.tokens[: count * page], scope_tag)
        # What it began with, and what a seal before has dealt with, is looked at again in the end.
        seen = self._sealed.get(req, req.hit_tokens // page)
        first = 0 if last or handoff is not None else min(count, seen)
        run = Run(req.keys, pages, rank.pool.generation[pages[first:]], content, first)
        batch = self._planned(rank, run, cls, handoff, retry=last)
        if handoff is None:
            self._sealed[req] = count if batch is None or not batch.shed else first
        return batch

    def _planned(
        self, rank: Rank, run: Run, cls: SaveClass, handoff: str | None, *, retry: bool
    ) -> Batch | None:
        now, classes = self._clock(), [cls] * len(self._known)
        pages = run.pages[run.first :]
        todo = np.zeros((len(self._known), len(pages)), np.bool_)
        named, owed = None, list[NDArray[np.bool_]]()
        if handoff is not None:
            named, owed = self.handoffs.begin(handoff, run.keys)
        for number, known in enumerate(self._known):
            if handoff is not None and number in self._visible:
                todo[number] = owed[self._visible.index(number)]
                continue
            if handoff is not None:
                classes[number] = SaveClass.CACHEABLE  # a private tier keeps nothing for others
            todo[number] = known.of(rank).missing(pages, run.generations, now, retry=retry)
        budgeted = cls is not SaveClass.HANDOFF  # C5
        return self._made(rank, run, todo, classes, budgeted=budgeted, handoff=named)

    def _made(
        self,
        rank: Rank,
        run: Run,
        todo: NDArray[np.bool_],
        classes: Sequence[SaveClass],
        *,
        budgeted: bool,
        handoff: Handoff | None = None,
    ) -> Batch | None:
        """Choose what may be pinned, pin it (C1), and mark it as being saved; None if there is nothing."""
        rows = np.flatnonzero(todo.any(axis=0))
        if not len(rows):
            return None
        budget = self._budgets[rank.name]
        fits = min(len(rows), budget.left) if budgeted else len(rows)
        shed, rows = len(rows) - fits, rows[:fits]
        numbers = rows + run.first
        batch = Batch(rank, run, numbers, todo[:, rows], classes, budgeted, handoff, shed=shed)
        rank.pool.pin(batch.pages)
        if budgeted:
            budget.take(batch.pages)
        for number, known in enumerate(self._known):
            mine = batch.of(number)
            if len(mine):
                generations = run.generations[rows[mine]]
                begun = known.of(rank).begin(batch.pages[mine], run.keys[numbers[mine]], generations)
                batch.savings[number] = begun
        self._open[batch] = None
        return batch

    # Saving

    def _start(self, batch: Batch) -> None:
        self._tally.count("pages_sealed", len(batch.numbers))
        if batch.shed:
            self._tally.count("pages_not_saved_shed", batch.shed)
        if batch.handoff is not None:
            self.handoffs.watch(batch.handoff, batch.report)
        now, workers = self._clock(), self._workers[batch.rank.name]
        outcomes = []
        for number, saving in batch.savings.items():
            cls = batch.cls[number]
            op = workers.save(
                self._known[number].tier,
                saving.keys,
                saving.pages,
                cls,
                now + SAVE_DEADLINE_S,
                batch.after,
                handoff=batch.handoff.name if batch.handoff and cls is SaveClass.HANDOFF else None,
            )
            outcomes.append(op.map(partial(self._saved, batch, number, now)))
        # C12: all copies are awaited before anything is released
        all_of(outcomes).on_done(lambda _: self._settle(batch))

    def _saved(self, batch: Batch, number: int, begun: float, verdict: Verdict) -> None:
        """One tier has answered; whatever goes wrong here, the save has its terminal (R8)."""
        try:
            self._booked(batch, number, begun, verdict)
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
        size = int(ok.sum()) * self._workers[batch.rank.name].saved_page_bytes
        self._tally.moved(known.tier.name, "save", int(ok.sum()), size, now - begun)

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
        if retry is not None:
            self._start(retry)
        self._drain(batch.rank)

    def _once_more(self, batch: Batch) -> Batch | None:
        """Pages that failed although their request was retired meanwhile: tried again, once (C4)."""
        if not batch.again.any():
            return None
        todo = np.zeros((len(self._known), len(batch.run.generations)), np.bool_)
        todo[:, batch.numbers - batch.run.first] = batch.again
        with self._lock:
            self._tally.count("pages_tried_again", int(batch.again.any(axis=0).sum()))
            classes = [SaveClass.CACHEABLE] * len(self._known)
            return self._made(batch.rank, batch.run, todo, classes, budgeted=False)

    # What was shed

    def _remember(self, rank: Rank, item: _Shed) -> None:
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
                if rank.name in self._draining or not line or not self._budgets[rank.name].left:
                    return
                self._draining.add(rank.name)
                item = line[0]
            try:
                left = self._try_shed(rank, item)
            finally:
                with self._lock:
                    self._draining.discard(rank.name)
            if not left and self._forgotten(rank, item):
                item.end()

    def _forgotten(self, rank: Rank, item: _Shed) -> bool:
        with self._lock:
            line = self._shed[rank.name]
            if line and line[0] is item:
                line.popleft()
                return True
        return False

    def _try_shed(self, rank: Rank, item: _Shed) -> bool:
        """Save what is resident of it; whether something is still left to try."""
        with rank.pool.match(item.keys) as hold:
            pages, first = hold.pages.copy(), item.first
            content = item.cut(len(pages), rank.pool.page_tokens)
            generations = rank.pool.generation[pages[first:]]
            run = Run(item.keys[: len(pages)], pages, generations, content, first)
            with self._lock:
                batch = (
                    self._planned(rank, run, SaveClass.CACHEABLE, None, retry=True)
                    if len(pages) > first
                    else None
                )
        if batch is None:
            return False
        self._tally.count("pages_tried_again", len(batch.numbers))
        left, batch.shed = batch.shed > 0, 0
        if len(batch.numbers):
            item.first = int(batch.numbers[-1]) + 1
        item.saves.append(batch.report)
        self._start(batch)
        return left
