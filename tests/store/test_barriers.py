"""Barriers, handoffs, resets and switches: what is ordered against what, and until when (C7, C8, C11)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, HeldTier, Setup, model_of, prompt, setup

from kvcontract import FleetSecret, WeightIdentity
from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending
from kvcontract.store.policy import KvPrefix
from kvcontract.store.seal import NOTHING
from kvcontract.tiers.base import Code, Codes, Level, SaveClass

TOKENS = prompt(4)


async def rounds(number: int = 30) -> None:
    """Let everybody go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


class Flushes:
    """Holds back the barriers of a tier: (level, pending) of each that was asked for."""

    def __init__(self, tier: HeldTier) -> None:
        self.asked: list[tuple[Level, Pending[bool]]] = []
        tier.flush = self.flush

    def flush(self, level: Level, deadline: float) -> Pending[bool]:
        """Answered by the test."""
        del deadline
        self.asked.append((level, Pending()))
        return self.asked[-1][1]


# C8


def test_c8_a_barrier_asks_the_tiers_after_what_was_submitted_has_settled() -> None:
    """C8: each level covers the saves before it, not those after it."""
    with setup() as s:
        flushes = Flushes(s.tier)
        s.tier.holding.add("save")
        s.store.retire(s.compute(TOKENS))

        async def scenario() -> None:
            task = asyncio.ensure_future(s.store.flush_saves("visible"))
            await rounds()
            assert flushes.asked == []
            s.tier.open("save")
            s.tier.holding.add("save")
            s.store.retire(s.compute(prompt(2, seed=1)))
            await rounds()
            assert [level for level, _ in flushes.asked] == ["visible"]
            flushes.asked[0][1].settle(True)
            assert await task is True
            s.tier.open("save")

        s.loop.run(scenario())


def test_c8_c4_a_barrier_covers_what_is_tried_again() -> None:
    """C8, C4: a save fails once its request is retired; a barrier from before waits for the second."""
    with setup() as s:
        s.tier.holding.add("save")

        def fail(codes: Codes) -> Codes:
            s.tier.holding.add("save")
            s.tier.codes.clear()
            return np.full_like(codes, Code.FAILED)

        s.tier.codes["save"] = fail
        req = s.compute(TOKENS)
        report = s.store.seal(req)
        s.store.retire(req)

        async def scenario() -> None:
            task = asyncio.ensure_future(s.store.flush_saves("landed"))
            await rounds()
            s.tier.open("save")
            await rounds()
            assert report.done
            assert not task.done()
            assert s.store.gauges()["saves"] == 1
            s.tier.open("save")
            assert await task is True
            assert s.store.gauges()["saves"] == 0

        s.loop.run(scenario())
        assert s.store.stats().counters["pages_tried_again"] == 4


def test_c8_barriers_are_ordered() -> None:
    """C8: a later barrier is not answered before an earlier one, nor asked for."""
    with setup() as s:
        flushes, ended = Flushes(s.tier), []

        async def one(name: str) -> None:
            await s.store.flush_saves()
            ended.append(name)

        async def scenario() -> None:
            tasks = [asyncio.ensure_future(one(name)) for name in ("first", "second", "third")]
            await rounds()
            for number in range(3):
                assert (len(flushes.asked), len(ended)) == (number + 1, number)
                flushes.asked[number][1].settle(True)
                await rounds()
            await asyncio.gather(*tasks)

        s.loop.run(scenario())
        assert ended == ["first", "second", "third"]


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_c8_what_an_abandoned_barrier_drained_is_covered_by_the_next(how: str) -> None:
    """C8: the first waiter goes away; the second is told only after the first barrier was answered."""
    with setup() as s:
        flushes = Flushes(s.tier)

        async def scenario() -> None:
            first = asyncio.ensure_future(s.store.flush_saves(deadline_s=1.0))
            await rounds()
            if how == "cancel":
                first.cancel()
            await asyncio.sleep(2.0)
            assert first.done()
            second = asyncio.ensure_future(s.store.flush_saves())
            await rounds()
            assert len(flushes.asked) == 1
            flushes.asked[0][1].settle(True)
            await rounds()
            flushes.asked[1][1].settle(True)
            assert await second is True

        s.loop.run(scenario())


def test_c8_a_barrier_always_calls_back() -> None:
    """C8, R5, A9: a save, tier or earlier barrier that never answers costs each its own deadline."""
    with setup() as s:
        flushes = Flushes(s.tier)

        async def scenario() -> None:
            long = asyncio.ensure_future(s.store.flush_saves(deadline_s=5.0))
            await rounds()
            assert await s.store.flush_saves(deadline_s=2.0) is False
            assert s.loop.time() == pytest.approx(2.0)
            assert await long is False
            assert s.loop.time() == pytest.approx(5.0)
            flushes.asked[0][1].settle(True)
            await rounds()
            assert len(flushes.asked) == 1  # A9: nobody waits for the second any more
            s.tier.flush = lambda *_: 1 / 0
            assert await s.store.flush_saves() is False

        s.loop.run(scenario())


def test_c8_durable_asks_those_that_last() -> None:
    """C8: with a tier that outlives the process, durable is reached there; the volatile one is not asked."""
    model = model_of(weights=WeightIdentity(kind="digest", value="a"))
    claims = {"disk": {"persistent": True}}
    with setup(tiers=2, claims=claims, model=model, secret=FleetSecret.random()) as s:
        asked: list[tuple[str, Level]] = []
        for tier in s.tiers:
            _answer(tier, asked)
        for level in ("landed", "visible", "durable"):
            assert s.loop.run(s.store.flush_saves(level)) is True
        assert [name for name, level in asked if level == "durable"] == ["disk"]
        assert [name for name, level in asked if level == "visible"] == ["dram", "disk"]


def _answer(tier: HeldTier, asked: list[tuple[str, Level]]) -> None:
    def flush(level: Level, deadline: float) -> Pending[bool]:
        del deadline
        asked.append((tier.name, level))
        return Pending.of(True)

    tier.flush = flush


# C7


@pytest.mark.paged
def test_c7_a_handoff_is_confirmed_when_all_its_pages_are_kept() -> None:
    """C7: P waits for its own saves, not for those of others; then the pages cannot be evicted."""
    with setup() as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")

        async def scenario() -> None:
            early = await s.store.aflush_handoff("h", deadline_s=1.0)
            assert (early.confirmed, early.settled, early.pages, early.saved) == (False, False, 4, 0)
            assert early.failed == {"not settled": 4}
            task = asyncio.ensure_future(s.store.aflush_handoff("h"))
            await rounds()
            s.tier.open("save")
            report = await task
            assert (report.confirmed, report.pages, report.saved, report.failed) == (True, 4, 4, {})

        s.loop.run(scenario())
        assert s.loop.time() == pytest.approx(1.0)
        assert s.tier.stats()["handoffs"] == 1
        s.store.release_handoff("h")
        s.store.release_handoff("h")
        assert s.tier.stats()["handoffs"] == 0


@pytest.mark.paged
def test_c7_pages_that_are_stored_already_are_kept_for_the_handoff_too() -> None:
    """C7, G7: stored as a cache before; the handoff must hold them against eviction all the same."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        req = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        s.store.retire(req, SaveClass.HANDOFF, handoff="h")
        report = s.loop.run(s.store.aflush_handoff("h"))
        assert (report.confirmed, report.pages) == (True, 4)
        assert len(next(iter(s.tier.inner._work.handoffs.values())).slots) == 4
        s.store.release_handoff("h")


@pytest.mark.paged
def test_c7_a_failed_handoff_says_why_and_a_later_seal_tries_again() -> None:
    """C7, C4, G9: what failed is told by reason; sealing under the same name saves what is missing."""
    with setup() as s:
        s.tier.codes["save"] = lambda codes: np.where(np.arange(len(codes)) == 1, Code.FULL, codes)
        req = s.compute(TOKENS)
        s.store.seal(req, SaveClass.HANDOFF, handoff="h")
        report = s.loop.run(s.store.aflush_handoff("h"))
        assert (report.confirmed, report.settled, report.saved, report.failed) == (
            False,
            True,
            3,
            {"full": 1},
        )
        s.tier.codes.clear()
        s.store.retire(req, SaveClass.HANDOFF, handoff="h")
        assert s.loop.run(s.store.aflush_handoff("h")).confirmed
        assert [records for verb, records in s.tier.asked if verb == "save"] == [4, 1]
        s.store.release_handoff("h")


def test_c7_a_handoff_goes_where_others_look() -> None:
    """C7: with a shared tier, that one decides; a private tier keeps a plain copy and no lease."""
    with _one_shared() as s:
        s.tiers[0].codes["save"] = lambda codes: np.full(len(codes), Code.FULL, np.uint8)
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")
        assert s.loop.run(s.store.aflush_handoff("h")).confirmed
        assert (s.tiers[0].stats()["handoffs"], s.tiers[1].stats()["handoffs"]) == (0, 1)
        s.store.release_handoff("h")


@contextmanager
def _one_shared() -> Iterator[Setup]:
    """Two tiers, of which only the second is seen by others."""
    model = model_of(weights=WeightIdentity(kind="digest", value="a"))
    claims = {"disk": {"shared": True}}
    with setup(tiers=2, model=model, secret=FleetSecret.random(), claims=claims) as s:
        yield s


def test_c7_a_handoff_has_a_name() -> None:
    """C7: a handoff without a name, or a name without a handoff, is refused; an unknown one has no pages."""
    with setup() as s:
        req = s.compute(TOKENS)
        for cls, name in ((SaveClass.HANDOFF, None), (SaveClass.CACHEABLE, "h")):
            with pytest.raises(UsageFault, match="a handoff has a name"):
                s.store.seal(req, cls, handoff=name)
        req.release()
        assert s.loop.run(s.store.aflush_handoff("nobody")).pages == 0


# C11


@pytest.mark.paged
def test_c7_a_handoff_is_one_requests() -> None:
    """C7: a name that stands for other pages is refused; once released, it is free."""
    with _one_shared() as s:
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")
        req = s.compute(prompt(2, seed=1))
        with pytest.raises(UsageFault, match="'h' is another request's"):
            s.store.seal(req, SaveClass.HANDOFF, handoff="h")
        s.store.release_handoff("h")
        s.store.retire(req, SaveClass.HANDOFF, handoff="h")
        report = s.loop.run(s.store.aflush_handoff("h"))
        assert (report.pages, report.confirmed) == (2, True)
        s.store.release_handoff("h")


@pytest.mark.paged
def test_c7_a_name_is_taken_again_while_the_old_saves_still_run() -> None:
    """C7: what the first handoff of that name saved says nothing about the second."""
    with _one_shared() as s:
        tier = s.tiers[1]
        tier.holding.add("save")
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")
        s.store.release_handoff("h")
        s.store.retire(s.compute(prompt(2, seed=1)), SaveClass.HANDOFF, handoff="h")
        tier._held.popleft()[1]()  # the first one's
        report = s.loop.run(s.store.aflush_handoff("h", deadline_s=1.0))
        assert (report.pages, report.saved, report.settled) == (2, 0, False)
        tier.open("save")
        assert s.loop.run(s.store.aflush_handoff("h")).confirmed
        s.store.release_handoff("h")


@pytest.mark.paged
def test_c11_a_reset_reaches_devices_and_tiers_and_says_which() -> None:
    """C11: afterwards nothing is found; a tier that cannot forget is named."""
    with setup(tiers=2) as s:
        s.store.retire(s.compute(TOKENS))
        report = s.loop.run(s.store.areset())
        assert (report.done, report.pages, report.tiers) == (True, 4, ("dram", "disk"))
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0
        assert s.store.retire(s.compute(TOKENS)).value.saved == 4  # nothing is thought to be stored


def test_c11_a_tier_that_cannot_forget_is_named() -> None:
    """C11: the report says which tiers were not reached, and why."""
    with setup(silent=True) as s:
        s.store.retire(s.compute(TOKENS))
        report = s.loop.run(s.store.areset())
        assert (report.done, report.tiers, report.missed) == (True, (), {"dram": "it cannot forget"})
        with pytest.raises(UsageFault, match="no tier tape"):
            s.loop.run(s.store.areset(["tape"]))


def test_c11_some_tiers_only() -> None:
    """C11: told otherwise, only those tiers are emptied."""
    with setup(tiers=2) as s:
        s.store.retire(s.compute(TOKENS))
        assert s.loop.run(s.store.areset(["dram"])).tiers == ("dram",)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"disk": 4 * PAGE}
        prefix.release()


@pytest.mark.parametrize("what", ["resolve", "save", "load", "request", "prefix"])
def test_c11_a_reset_waits_for_what_was_submitted_before_it(what: str) -> None:
    """C11: with something going on it does not run; the moment that ends, it does."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding |= {"resolve": {"lookup"}, "save": {"save"}, "load": {"load"}}.get(what, set())

        async def scenario() -> None:
            end = await _going_on(s, what)
            task = asyncio.ensure_future(s.store.areset(deadline_s=50.0))
            await asyncio.sleep(3.0)
            assert not task.done()
            end()
            report = await task
            assert (report.done, report.tiers) == (True, ("dram",))
            assert s.loop.time() < 6.0

        s.loop.run(scenario())
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0


async def _going_on(s: Setup, what: str) -> Any:
    """Begin something; returns what ends it."""
    if what == "resolve":
        task = asyncio.ensure_future(s.resolve(TOKENS))
        task.add_done_callback(lambda done: done.result().release())
        await rounds()
        return lambda: s.tier.open("lookup")
    if what == "load":
        (await s.resolve(TOKENS, deadline_s=1.0)).release()
        return lambda: s.tier.open("load")
    if what == "save":
        s.store.retire(s.compute(prompt(2, seed=1)))
        return lambda: s.tier.open("save")
    if what == "prefix":
        return (await s.resolve(TOKENS)).release
    return s.admit(prompt(2, seed=1)).release


def test_c11_what_comes_after_a_reset_waits_for_it() -> None:
    """C11: a resolve that is submitted later finds nothing of before; it may give up at its deadline."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        busy = s.admit(prompt(2, seed=1))

        async def scenario() -> KvPrefix:
            reset = asyncio.ensure_future(s.store.areset())
            await rounds()
            hasty = await s.resolve(TOKENS, deadline_s=1.0)
            assert (hasty.hit_tokens, hasty.degraded) == (0, ("a reset was under way",))
            later = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            assert not later.done()
            busy.release()
            assert (await reset).done
            return await later

        assert s.loop.run(scenario()).hit_tokens == 0


def test_c11_what_comes_after_several_resets_waits_for_all_of_them() -> None:
    """C11: the last of two resets gives up; the first still waits, and a later resolve does not pass it."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        busy = s.admit(prompt(2, seed=1))

        async def scenario() -> KvPrefix:
            first = asyncio.ensure_future(s.store.areset(deadline_s=30.0))
            await rounds()
            second = asyncio.ensure_future(s.store.areset(deadline_s=1.0))
            await rounds()
            later = asyncio.ensure_future(s.resolve(TOKENS))
            assert not (await second).done
            await rounds()
            assert not later.done()
            busy.release()
            assert (await first).done
            return await later

        assert s.loop.run(scenario()).hit_tokens == 0


def test_c11_a_reset_waits_for_a_resolve_that_waited_for_an_earlier_one() -> None:
    """C11: it was submitted before; in the moment the first reset ends, it is under way."""
    with setup() as s:
        busy = s.admit(prompt(2, seed=1))
        s.tier.holding.add("lookup")

        async def scenario() -> None:
            first = asyncio.ensure_future(s.store.areset())
            await rounds()
            resolve = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=5.0))
            await rounds()
            second = asyncio.ensure_future(s.store.areset())
            await rounds()
            busy.release()
            assert (await first).done
            await rounds()
            assert not second.done()
            s.tier.open("lookup")
            await resolve
            assert (await second).done

        s.loop.run(scenario())


def test_c11_resets_that_find_no_idle_moment_have_not_run() -> None:
    """C11, R5: at its deadline it says what it waited for, and everything is as before."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        busy = s.admit(prompt(2, seed=1))
        report = s.loop.run(s.store.areset(deadline_s=4.0))
        assert (report.done, report.waited_for, s.loop.time()) == (False, ("rank 0",), 4.0)
        busy.release()
        prefix = s.loop.run(s.resolve(TOKENS))
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


def test_c11_close_ends_a_reset_that_waits() -> None:
    """C10, C11: it has not run, and nobody hangs."""
    with setup() as s:
        busy = s.admit(prompt(2, seed=1))

        async def scenario() -> None:
            task = asyncio.ensure_future(s.store.areset())
            await rounds()
            await s.store.aclose()
            assert not (await task).done

        s.loop.run(scenario())
        busy.release()


# Switches


def test_prefix_caching_off_finds_saves_and_keeps_nothing() -> None:
    """B12, design: off in resolve, match and release; on again it starts empty on the device."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        s.store.set_prefix_cache(False)
        assert s.pool.cached == 0
        prefix = s.loop.run(s.resolve(TOKENS))
        assert (prefix.hit_tokens, prefix.degraded) == (0, ("prefix caching is off",))
        assert s.store.retire(s.compute(prompt(2, seed=1))).value == NOTHING
        assert s.pool.cached == 0
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="h")  # promised to somebody
        assert s.loop.run(s.store.aflush_handoff("h")).confirmed
        s.store.release_handoff("h")
        s.store.set_prefix_cache(True)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"dram": 4 * PAGE}
        prefix.release()
        assert s.pool.cached == 4


@pytest.mark.paged
def test_retention_off_with_tiers_is_pure_tier_mode() -> None:
    """B12, design: devices keep nothing, tiers serve; the two switches do not disturb each other."""
    with setup() as s:
        s.store.set_retention(False)
        s.store.retire(s.compute(TOKENS))
        for _ in range(2):
            prefix = s.loop.run(s.resolve(TOKENS))
            s.check_content(TOKENS, prefix)
            assert dict(prefix.sources) == {"dram": 4 * PAGE}
            prefix.release()
            assert s.pool.cached == 0
        s.store.set_prefix_cache(False)
        s.store.set_prefix_cache(True)
        assert s.store.retire(s.compute(TOKENS)).value == NOTHING or s.pool.cached == 0
        assert s.pool.cached == 0
        s.store.set_retention(True)
        s.store.retire(s.compute(TOKENS))
        assert s.pool.cached == 4


@pytest.mark.paged
def test_resolves_under_way_finish_under_the_old_setting() -> None:
    """Design: switched off while a restore is under way: it ends with what it restores, not kept after."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            s.store.set_prefix_cache(False)
            s.tier.open("load")
            return await task

        prefix = s.loop.run(scenario())
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()
        assert (s.pool.cached, s.pool.held) == (0, 0)
