"""Violations to plant, one at a time: each breaks one promise of the store, as somebody might by mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcontract.contract.model import Scope
from kvcontract.core.pending import Pending, wait_until
from kvcontract.pool.keys import Keyer
from kvcontract.pool.pool import BlockPool
from kvcontract.store import (
    answer,
    barriers,
    control,
    fetch,
    loads,
    marks,
    policy,
    saver,
    seal,
    search,
    workers,
)
from kvcontract.tiers.base import Code

Plant = Callable[[pytest.MonkeyPatch], None]


def a2_late_leases_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A look-up that answers after its waiter gave up keeps its lease."""
    kept: list[Any] = []
    patch.setattr(fetch, "Lease", SimpleNamespace(release=kept.append))


def a3_pages_go_back_under_a_running_copy(patch: pytest.MonkeyPatch) -> None:
    """Whoever abandons a load gives its pages and leases back at once."""

    async def finish(self: loads.Loads, load: loads.Load) -> None:
        try:
            verdict = await wait_until(load.op, load.search.deadline)
        except BaseException as error:
            load.owned.close()
            load.op.on_done(lambda _: self._end(load))
            if not isinstance(error, TimeoutError):
                raise
            return
        try:
            self._commit(load, verdict)
        finally:
            self._end(load)

    patch.setattr(loads.Loads, "finish", finish)


def a4_late_loads_are_thrown_away(patch: pytest.MonkeyPatch) -> None:
    """What lands after the deadline is not registered."""
    patch.setattr(loads.Loads, "_late", lambda self, load, _: self._end(load))


def a5_leases_are_kept_while_waiting(patch: pytest.MonkeyPatch) -> None:
    """Who waits for room holds a lease meanwhile."""
    honest = fetch.Fetcher._space

    async def space(self: fetch.Fetcher, asked: search.Search, resident: fetch.Present) -> bool:
        with contextlib.ExitStack() as kept:
            for tier in self._tiers:
                lease = await self._lookup(asked, tier, asked.missing[:1])
                if lease is not None:
                    kept.enter_context(lease)
            return await honest(self, asked, resident)

    patch.setattr(fetch.Fetcher, "_space", space)


def a11_cancelling_is_not_heard_while_waiting(patch: pytest.MonkeyPatch) -> None:
    """A token is only looked at between waits."""
    patch.setattr(policy.CancelToken, "on_cancel", lambda *_: lambda: None)


def a13_one_page_too_many_is_held(patch: pytest.MonkeyPatch) -> None:
    """The hold has a page that the hit does not tell of."""
    honest = answer.Answers.prefix

    def prefix(self: answer.Answers, asked: search.Search) -> policy.KvPrefix:
        found, page = honest(self, asked), asked.rank.pool.page_tokens
        return replace(found, hit_tokens=found.hit_tokens - page) if found.hit_tokens > page else found

    patch.setattr(answer.Answers, "prefix", prefix)


def a16_everybody_loads_for_himself(patch: pytest.MonkeyPatch) -> None:
    """Loads and look-ups of others are not seen."""

    class Blind(dict[Any, Any]):
        def get(self, *_: Any) -> None:
            return None

        def __delitem__(self, key: Any) -> None:
            self.pop(key, None)

    honest = fetch.Fetcher.__init__

    def begin(self: fetch.Fetcher, *args: Any, **more: Any) -> None:
        honest(self, *args, **more)
        self._flights = Blind()

    patch.setattr(fetch.Fetcher, "__init__", begin)
    patch.setattr(loads.Loads, "of", lambda *_: None)
    patch.setattr(loads.Loads, "unclaimed", lambda _self, _rank, keys, *_tiers: len(keys))


def a17_the_device_is_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    """Pages that arrived during a wait, or lie past a hole, are not seen."""

    async def blind(asked: search.Search, records: int) -> fetch.Present:
        return np.zeros((asked.record + records) * asked.step - asked.at, np.bool_)

    patch.setattr(fetch, "_resident", blind)
    patch.setattr(search.Search, "regrow", lambda *_, **__: None)


def b4_the_promise_comes_back_after_the_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages of a request are free before its promise is."""

    def release(self: BlockPool, entitlement: Any) -> None:
        with self._gate() as books:
            run = self._claim(entitlement)
            if len(run.sources):
                books.unpin(run.sources)
            books.release(run.owned)
        with self._gate():
            self._entitled -= run.lifetime - run.count

    patch.setattr(BlockPool, "release", release)


def c1_nothing_pins_what_is_saved(patch: pytest.MonkeyPatch) -> None:
    """Source pages may be issued again while they are copied."""
    patch.setattr(BlockPool, "pin", lambda *_: None)
    patch.setattr(BlockPool, "unpin", lambda *_: None)


def c3_holes_stay(patch: pytest.MonkeyPatch) -> None:
    """What a tier has lost still counts as stored."""
    patch.setattr(marks.Marks, "lost", lambda *_: None)


def c4_failed_pages_are_given_up(patch: pytest.MonkeyPatch) -> None:
    """Retire does not try again what failed before."""
    honest = seal.Sealer._planned

    def planned(self: seal.Sealer, *args: Any, retry: bool) -> Any:
        del retry
        return honest(self, *args, retry=False)

    patch.setattr(seal.Sealer, "_planned", planned)


def c6_a_failed_handoff_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    """The pages of a handoff that failed are never released."""
    honest = seal.Sealer._settle

    def settle(self: seal.Sealer, batch: Any) -> None:
        if batch.handoff is None or not batch.codes.any():
            honest(self, batch)

    patch.setattr(seal.Sealer, "_settle", settle)


def c8_a_barrier_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A barrier asks the tiers at once, whatever was submitted before."""
    honest = barriers.Barriers.__init__

    def begin(self: barriers.Barriers, tiers: Any, _: Any, clock: Any) -> None:
        honest(self, tiers, lambda: (), clock)

    patch.setattr(barriers.Barriers, "__init__", begin)


def c8_barriers_overtake(patch: pytest.MonkeyPatch) -> None:
    """A later barrier does not wait for an earlier one."""
    honest = barriers.Barriers.ask

    def ask(self: barriers.Barriers, level: Any, deadline: float) -> Pending[bool]:
        self._last = Pending.of(None)
        return honest(self, level, deadline)

    patch.setattr(barriers.Barriers, "ask", ask)


def c12_the_first_copy_ends_it(patch: pytest.MonkeyPatch) -> None:
    """A save counts as ended when the first of its copies is."""

    def first_of(pendings: Any) -> Pending[Any]:
        out: Pending[Any] = Pending()
        if not pendings:
            out.settle(())
        for pending in pendings:
            pending.on_done(lambda value: out.done or out.settle((value,)))
        return out

    patch.setattr(saver, "all_of", first_of)


def r2_one_worker_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A page counts as arrived when any worker has its share: OR for AND."""
    honest = workers.Workers._merged

    def merged(self: workers.Workers, *args: Any) -> workers.Verdict:
        by_worker = honest(self, *args).by_worker
        return workers.Verdict(by_worker.min(axis=0), by_worker)

    patch.setattr(workers.Workers, "_merged", merged)


def b12_switching_off_does_nothing(patch: pytest.MonkeyPatch) -> None:
    """With prefix caching off, resolves go on hitting."""
    patch.setattr(control.Switches, "set_prefix_cache", lambda *_: None)


def c11_a_reset_leaves_a_tier(patch: pytest.MonkeyPatch) -> None:
    """A reset says that a tier has forgotten, and has not asked it."""
    honest = control.Resetter._forget

    async def forget(self: control.Resetter, chosen: Any, pages: int, deadline: float) -> control.ResetReport:
        report = await honest(self, chosen[:-1], pages, deadline)
        return replace(report, tiers=tuple(known.tier.name for known in chosen))

    patch.setattr(control.Resetter, "_forget", forget)


def c11_a_reset_leaves_the_device(patch: pytest.MonkeyPatch) -> None:
    """A reset empties the tiers, and keeps what lies on the device."""

    def cleared(self: control.Resetter, _: list[int]) -> bool:
        self._pages_back.clear()
        return not self._going_on()

    patch.setattr(control.Resetter, "_cleared", cleared)


def d2_the_scope_is_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """Equal tokens of two tenants have one name."""
    honest = Keyer.chain

    def chain(self: Keyer, tokens: Any, scope: Scope, **more: Any) -> Any:
        del scope
        return honest(self, tokens, Scope(), **more)

    patch.setattr(Keyer, "chain", chain)


def e7_corrupt_pages_are_committed(patch: pytest.MonkeyPatch) -> None:
    """A page whose checksum is wrong is taken for whole, when it lands after its deadline."""
    honest = loads.Loads._late

    def late(self: loads.Loads, load: loads.Load, verdict: workers.Verdict) -> None:
        codes = np.where(verdict.codes == Code.CORRUPT, np.uint8(Code.OK), verdict.codes)
        honest(self, load, workers.Verdict(codes, verdict.by_worker))

    patch.setattr(loads.Loads, "_late", late)


PLANTS: tuple[Plant, ...] = (
    a2_late_leases_are_kept,
    a3_pages_go_back_under_a_running_copy,
    a4_late_loads_are_thrown_away,
    a5_leases_are_kept_while_waiting,
    a11_cancelling_is_not_heard_while_waiting,
    a13_one_page_too_many_is_held,
    a16_everybody_loads_for_himself,
    a17_the_device_is_not_asked_again,
    b4_the_promise_comes_back_after_the_pages,
    b12_switching_off_does_nothing,
    c1_nothing_pins_what_is_saved,
    c3_holes_stay,
    c4_failed_pages_are_given_up,
    c6_a_failed_handoff_keeps_its_pages,
    c8_a_barrier_waits_for_nothing,
    c8_barriers_overtake,
    c11_a_reset_leaves_a_tier,
    c11_a_reset_leaves_the_device,
    c12_the_first_copy_ends_it,
    d2_the_scope_is_not_in_the_key,
    e7_corrupt_pages_are_committed,
    r2_one_worker_is_enough,
)
