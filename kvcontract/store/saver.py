"""Saves: records of one part on their way to the tiers, whatever they are records of.

A block is pinned until every copy has landed (C1), while its owner goes on or is gone.  Nothing here waits:
what a save becomes is settled on the thread that finishes it.  The last block of a record carries what is
known of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcontract.core.pending import Pending, all_of, report_uncaught
from kvcontract.store.expect import Expectations
from kvcontract.store.handoffs import Handoff, Handoffs
from kvcontract.store.known import Known
from kvcontract.store.plan import Plan, chosen
from kvcontract.store.rank import Berth
from kvcontract.store.relay import Relays
from kvcontract.store.saves import Batch, PinBudget, Run, SavingBudgets, Shed
from kvcontract.store.stats import Tally
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.store.workers import Verdict, Workers
from kvcontract.tiers.base import Clock, Code, SaveClass


class Saver:
    """Runs saves of one part; knows which are in flight.

    Args:
        known: what is known of each tier, fastest first; each gets every record.
        policies: of each tier.
        relays: bring records to the tiers that are written back.
        berths: by name of the rank, where the part's blocks are, and the workers that copy them.
        tally: where everything is counted.
        clock: the store's.
        budget: share of a pool that saves may pin which may be shed.
        growing: see `Handoffs`.
    """

    def __init__(
        self,
        known: Sequence[Known],
        policies: Sequence[TierPolicy],
        relays: Relays,
        berths: Mapping[str, tuple[Berth, Workers]],
        tally: Tally,
        clock: Clock,
        *,
        budget: float,
        growing: bool = True,
    ) -> None:
        self._known = tuple(known)
        self._policies = tuple(policies)
        self._relays = relays
        self._workers = {name: workers for name, (_, workers) in berths.items()}
        self._step = max(workers.record_pages for workers in self._workers.values())
        self._tally = tally
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[Batch, None] = {}
        self._budgets = {
            name: PinBudget(berth.pool.pages, max(self._step, int(budget * berth.pool.total)))
            for name, (berth, _) in berths.items()
        }
        size = max(workers.saved_record_bytes for workers in self._workers.values())
        limits = [policy.most_saving_bytes for policy in policies]
        self._saving = SavingBudgets([limit and limit // size for limit in limits])
        self._expected = Expectations(known, relays, clock)
        self._draining: dict[str, bool] = {}  # by rank, whether somebody has come meanwhile
        shared = [number for number, item in enumerate(known) if item.tier.capabilities.shared]
        self._visible = shared or list(range(len(self._known)))  # where another engine looks
        self.handoffs = Handoffs(len(self._visible), self._step, growing=growing)

    @property
    def saves(self) -> tuple[Pending[None], ...]:
        """Saves in flight, oldest first; what is tried again for one belongs to it (C8)."""
        with self._lock:
            return tuple(batch.done for batch in self._open)

    @property
    def shed(self) -> tuple[Pending[None], ...]:
        """What retired requests left to be saved and waits for its turn."""
        return ()

    def give_up_shed(self) -> None:
        """Forget what was shed: nothing is saved any more."""

    # Planning, under the lock

    def _plan(self, pages: int) -> Plan:
        shape = len(self._known), pages
        return Plan(np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), self._relays.targets)

    def _planned(
        self,
        rank: Berth,
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
        rank: Berth,
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

    # What came from a lower tier

    def _above(self, tier: int) -> list[int]:
        """Numbers of the tiers that want what a lower one has given."""
        return [number for number in range(tier) if self._policies[number].promote]

    def _promoted(self, rank: Berth, run: Run, above: Sequence[int], came: NDArray[np.bool_]) -> Batch | None:
        """Plan to bring records that came, bool[n], to tiers above that lack them."""
        now = self._clock()
        with self._lock:
            plan = self._plan(len(run.generations))
            for number in above:
                missing = self._known[number].of(rank).missing(run.last, run.generations, now, retry=False)
                plan.of(number)[:] = missing & came
            return self._made(rank, run, plan, [SaveClass.WRITE_BACK] * len(self._known), budgeted=True)

    def _start_promoted(self, batch: Batch | None) -> None:
        self._expected.pass_on()
        if batch is not None:
            self._start(batch)

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
        self._came_back(batch.rank)

    def _may_drain(self, rank: Berth, waits: bool) -> bool:
        """Whether to try what was shed, one thread at a time; under the lock."""
        if rank.name in self._draining:
            self._draining[rank.name] = True
            return False
        if not waits or self._budgets[rank.name].left < self._step:
            return False
        self._draining[rank.name] = False
        return True

    def _drained(self, rank: Berth) -> bool:
        """The other end; whether room has come back that nobody has looked at."""
        with self._lock:
            return self._draining.pop(rank.name)

    def _came_back(self, rank: Berth) -> None:
        """Pins of a rank have come back, and the room that its records had in the tiers."""

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
            if made is not None:
                made.after = batch.after
        self._expected.pass_on()
        return made
