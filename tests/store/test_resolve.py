"""Resolve: deadlines, leases, cancellation, waiting for room, and what a hit consists of (A, I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, model_of, prompt, setup

from kvcontract import FleetSecret, KvStore, Rank, Scope
from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane
from kvcontract.store.policy import KvPrefix
from kvcontract.store.search import COLD_MISSES_TO_OPEN
from kvcontract.tiers.base import Code, Lease

TOKENS = prompt(4)
SECRET = FleetSecret(bytes(range(32)))


def release(prefix: KvPrefix) -> int:
    """Give a prefix back; returns its length in pages."""
    prefix.release()
    return prefix.hit_tokens // PAGE


async def until(condition: Any) -> None:
    """Let others run until something has happened."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


@pytest.mark.paged
def test_restores_from_the_tier_what_the_device_lost() -> None:
    """R2, A13, I6: pages come back with their bytes, and the sources name the tier."""
    with setup() as s:
        assert s.stored(TOKENS).saved == 4
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert (prefix.hit_tokens, dict(prefix.sources)) == (4 * PAGE, {"dram": 4 * PAGE})
        assert dict(prefix.valid_tokens) == {"kv": 4 * PAGE}
        assert prefix.degraded == ()
        prefix.release()


@pytest.mark.paged
def test_a1_a_tier_that_never_answers_costs_the_deadline_not_the_request() -> None:
    """A1: after the deadline the result is the device hit alone, with the reason."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS[: 2 * PAGE + 1]))
        s.tier.holding.add("lookup")
        prefix = s.loop.run(s.resolve(TOKENS))
        assert s.loop.time() == pytest.approx(15.0)
        assert (prefix.hit_tokens, prefix.degraded) == (2 * PAGE, ("dram: lookup timed out",))
        assert s.store.stats().degraded == {"dram: lookup timed out": 1}
        prefix.release()


def test_a2_an_answer_after_its_waiter_left_is_given_back() -> None:
    """A2: the settlement releases a late lease."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("lookup")
        assert release(s.loop.run(s.resolve(TOKENS))) == 0
        s.tier.open("lookup")
        assert s.tier.stats()["leases"] == 0


def test_a3_pages_stay_with_a_load_that_nobody_waits_for() -> None:
    """A3: only the wait is abandoned; pages and lease are kept until the copy settles, and it is counted."""
    with setup(pages=8) as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        prefix = s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        assert (prefix.hit_tokens, prefix.degraded) == (0, ("dram: load timed out",))
        assert (s.pool.held, s.tier.stats()["leases"]) == (4, 1)
        assert s.pool.reserve(4) is None
        stats = s.store.stats()
        assert (stats.counters["loads_abandoned"], stats.gauges["loads"]) == (1, 1)
        s.tier.open("load")


def test_a4_a_load_that_lands_late_is_registered() -> None:
    """A4: what arrives after the deadline is findable, whole, and its lease is back."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        assert release(s.loop.run(s.resolve(TOKENS, deadline_s=1.0))) == 0
        s.tier.open("load")
        assert s.store.stats().counters["pages_landed_late"] == 4
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"device": 4 * PAGE}
        s.check_content(TOKENS, prefix)
        prefix.release()


def test_a4_only_the_leading_good_pages_of_a_late_load_are_registered() -> None:
    """A4, R4: a page that failed ends what a late load registers."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        s.tier.codes["load"] = lambda codes: np.where(np.arange(len(codes)) == 2, Code.FAILED, codes)
        s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        s.tier.open("load")
        s.tier.codes.clear()
        assert s.pool.cached == 2


def test_a5_waits_for_room_without_a_lease_and_is_woken_by_a_release() -> None:
    """A5: while there is no room the lease is back; returning pages wake the waiter."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        busy = s.admit(prompt(5, seed=1))  # promised 6 of 8 pages

        async def scenario() -> KvPrefix:
            waiting = asyncio.ensure_future(s.resolve(TOKENS))
            await asyncio.sleep(3.0)
            assert not waiting.done()
            assert s.tier.stats()["leases"] == 0
            busy.release()
            return await waiting

        prefix = s.loop.run(scenario())
        assert s.loop.time() == pytest.approx(3.0)
        assert dict(prefix.sources) == {"dram": 4 * PAGE}
        prefix.release()


def test_a5_gives_up_waiting_for_room_at_the_deadline() -> None:
    """A5, R5: without room until the deadline, the hit is what was there."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        busy = s.admit(prompt(5, seed=1))
        prefix = s.loop.run(s.resolve(TOKENS, full_hit=True))
        assert s.loop.time() == pytest.approx(15.0)
        assert (prefix.hit_tokens, prefix.degraded[0]) == (0, "no room on the device")
        busy.release()


def test_a5_is_not_woken_into_asking_the_tier_by_less_than_it_needs() -> None:
    """A5: releases that do not make enough room do not cause further queries."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        busy = [s.admit(prompt(2, seed=seed)) for seed in (1, 2)]  # 3 + 3 of 8

        async def scenario() -> KvPrefix:
            waiting = asyncio.ensure_future(s.resolve(TOKENS))
            await asyncio.sleep(1.0)
            asked = s.tier.count("lookup")
            tiny = s.admit(prompt(0, seed=3))
            tiny.release()
            await asyncio.sleep(1.0)
            assert (waiting.done(), s.tier.count("lookup")) == (False, asked)
            busy[0].release()
            return await waiting

        assert release(s.loop.run(scenario())) == 4
        busy[1].release()


def test_r6_what_can_never_fit_is_not_waited_for() -> None:
    """R6, A18: a hit larger than the pool ends at once where all is wanted; else what fits is loaded."""
    with setup(secret=SECRET) as big:
        big.stored(TOKENS)
        small = Setup(pages=4, secret=SECRET)
        small.tier.inner = big.tier.inner  # what one engine stored, seen by one with fewer pages
        prefix = small.loop.run(small.resolve(TOKENS, full_hit=True, deadline_s=0.001))
        assert (prefix.hit_tokens, prefix.degraded[0]) == (0, "no room on the device")
        assert release(small.loop.run(small.resolve(TOKENS))) == 3
        assert small.loop.time() == 0.0
        small.check_idle()
        small.loop.run(small.store.aclose())
        small.loop.close()


def test_a6_every_branch_that_does_not_load_releases_its_lease() -> None:
    """A6: a hole at the first page, and no room: the lease is back in both."""
    with setup(pages=9) as s:
        s.stored(TOKENS)

        def without_first(lease: Lease) -> Lease:
            lease.present[0] = False
            return lease

        s.tier.answer = without_first
        assert release(s.loop.run(s.resolve(TOKENS))) == 0
        assert s.tier.stats()["leases"] == 0
        s.tier.answer = lambda lease: lease
        busy = s.admit(prompt(5, seed=1))
        assert release(s.loop.run(s.resolve(TOKENS, deadline_s=1.0, full_hit=True))) == 0
        assert s.tier.stats()["leases"] == 0
        busy.release()


@pytest.mark.paged
def test_r2_a_hole_ends_the_hit() -> None:
    """R2: presence is per key; what lies behind a hole is not hit."""
    with setup() as s:
        s.stored(TOKENS)

        def hole(lease: Lease) -> Lease:
            lease.present[2] = False
            return lease

        s.tier.answer = hole
        assert release(s.loop.run(s.resolve(TOKENS))) == 2
        assert s.tier.asked[1:] == [("lookup", 4), ("load", 2)]


@pytest.mark.paged
def test_a7_plain_mode_concludes_on_a_miss_at_once() -> None:
    """A7: no waiting in plain mode."""
    with setup() as s:
        assert release(s.loop.run(s.resolve(TOKENS))) == 0
        assert (s.loop.time(), s.tier.count("lookup")) == (0.0, 1)


@pytest.mark.parametrize("there", [0, 2])
def test_a7_full_hit_mode_waits_for_a_producer(there: int) -> None:
    """A7: a miss, or a partial hit, means not landed yet; what lands meanwhile is hit."""
    with setup() as s:
        if there:
            s.stored(TOKENS[: there * PAGE + 1])

        async def scenario() -> KvPrefix:
            waiting = asyncio.ensure_future(s.resolve(TOKENS, full_hit=True))
            await asyncio.sleep(2.0)
            req = s.compute(TOKENS)
            await s.store.flush_saves()
            s.store.retire(req)
            return await waiting

        prefix = s.loop.run(scenario())
        assert 2.0 <= s.loop.time() < 2.2
        assert release(prefix) == 4


def test_a7_full_hit_mode_ends_at_the_deadline() -> None:
    """A7, R5: the wait for a producer ends with the partial hit and the reason."""
    with setup() as s:
        s.stored(TOKENS[: 2 * PAGE + 1])
        prefix = s.loop.run(s.resolve(TOKENS, full_hit=True, deadline_s=2.0))
        assert 1.8 < s.loop.time() <= 2.0
        assert prefix.degraded == ("full hit did not land in time",)
        assert release(prefix) == 2


def test_a8_cold_producers_are_not_waited_for_again_and_again() -> None:
    """A8: three waits in vain open the breaker; a first-shot hit closes it."""
    with setup() as s:
        wait = {"full_hit": True, "deadline_s": 1.0}
        for _ in range(COLD_MISSES_TO_OPEN):
            s.loop.run(s.resolve(TOKENS, **wait))
        opened = s.loop.time()
        s.loop.run(s.resolve(TOKENS, **wait))
        assert s.loop.time() == opened
        s.stored(TOKENS)
        assert release(s.loop.run(s.resolve(TOKENS, **wait))) == 4
        s.loop.run(s.resolve(prompt(4, seed=9), **wait))
        assert s.loop.time() > opened


def test_a8_a_hit_between_them_makes_misses_not_consecutive() -> None:
    """A8: only consecutive cold misses open the breaker."""
    with setup() as s:
        s.stored(TOKENS)
        wait = {"full_hit": True, "deadline_s": 1.0}
        for _ in range(COLD_MISSES_TO_OPEN + 1):
            before = s.loop.time()
            s.loop.run(s.resolve(prompt(4, seed=9), **wait))
            assert s.loop.time() > before
            release(s.loop.run(s.resolve(TOKENS, **wait)))
            s.evict()


def test_a9_nothing_is_asked_after_the_deadline() -> None:
    """A9: with no time left the device hit is all, and no tier hears of it."""
    with setup() as s:
        s.stored(TOKENS)
        prefix = s.loop.run(s.resolve(TOKENS, deadline_s=0.0))
        assert (prefix.hit_tokens, prefix.degraded, s.tier.count("lookup")) == (0, ("deadline",), 0)


@pytest.mark.parametrize("raises", [True, False])
def test_a10_a_tier_that_fails_does_not_hide_the_next(raises: bool) -> None:
    """A10: an error ends that tier's part; the next tier is still asked."""
    with setup(tiers=2) as s:
        s.stored(TOKENS)

        def broken(*_: Any) -> Any:
            raise OSError("gone")

        if raises:
            s.tier.lookup = broken
        else:
            s.tier.inner._slots.find = broken
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"disk": 4 * PAGE}
        assert prefix.degraded == ("dram: lookup failed",)
        prefix.release()


@pytest.mark.parametrize("stage", ["lookup", "load", "room", "producer"])
def test_a11_cancelling_gives_everything_back(stage: str) -> None:
    """A11: in every wait a cancel is prompt; what was submitted settles in the background."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        s.store.retire(s.compute(TOKENS[: PAGE + 1]))
        busy = s.admit(prompt(5, seed=1)) if stage == "room" else None
        s.tier.holding.add(stage)
        tokens = prompt(4, seed=7) if stage == "producer" else TOKENS

        async def scenario() -> None:
            task = asyncio.ensure_future(s.resolve(tokens, full_hit=True))
            await asyncio.sleep(1.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        s.loop.run(scenario())
        assert s.loop.time() == pytest.approx(1.0)
        assert s.store.stats().counters["resolves_cancelled"] == 1
        for verb in ("lookup", "load"):
            s.tier.open(verb)
        if busy is not None:
            busy.release()
        s.check_idle()


@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
def test_a12_a_token_stays_to_compute(extra: int) -> None:
    """A12: the hit is page * floor((n - 1) / page) unless whole prompts are asked for."""
    tokens = prompt(3, extra=extra)
    with setup() as s:
        s.stored(prompt(3, extra=PAGE))
        assert release(s.loop.run(s.resolve(tokens))) == (len(tokens) - 1) // PAGE
        assert release(s.loop.run(s.resolve(tokens, full_pages=True))) == 3


def test_a12_a_prompt_of_one_page_asks_no_tier() -> None:
    """A12: there is nothing that could be hit."""
    with setup() as s:
        assert s.loop.run(s.resolve(prompt(1, extra=0))).hold is None
        assert s.loop.run(s.resolve([])).hit_tokens == 0
        assert s.tier.asked == []


def test_a13_the_hold_pins_exactly_the_hit() -> None:
    """A13: not one page more, however the hit came about."""
    with setup() as s:
        s.stored(TOKENS)
        s.store.retire(s.compute(TOKENS[: 2 * PAGE + 1]))
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"device": 2 * PAGE, "dram": 2 * PAGE}
        assert s.pool.held == prefix.hold.hit_pages == 4
        prefix.release()


@pytest.mark.paged
@pytest.mark.parametrize("wrong", ["longer", "shorter", "table"])
def test_a15_an_answer_of_another_shape_is_refused(wrong: str) -> None:
    """A15: an answer for more or fewer records than asked for is not believed; nothing is committed."""
    with setup() as s:
        s.stored(TOKENS)
        shapes = {
            "longer": np.ones(5, np.bool_),
            "shorter": np.ones(3, np.bool_),
            "table": np.ones((4, 2), np.bool_),
        }

        def lie(lease: Lease) -> Lease:
            return Lease("dram", shapes[wrong], receipt=lease.receipt, release=lease.release)

        s.tier.answer = lie
        prefix = s.loop.run(s.resolve(TOKENS))
        assert (prefix.hit_tokens, s.pool.cached) == (0, 0)
        assert s.store.stats().counters["tier_answers_refused"] == 1
        assert len(prefix.degraded) == 1


def test_a17_pages_that_arrived_during_the_query_are_not_loaded() -> None:
    """A17: the device is asked again before loading."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("lookup")

        async def scenario() -> KvPrefix:
            waiting = asyncio.ensure_future(s.resolve(TOKENS))
            await until(lambda: s.tier.count("lookup"))
            s.store.retire(s.compute(TOKENS[: 3 * PAGE + 1]))
            s.tier.open("lookup")
            return await waiting

        prefix = s.loop.run(scenario())
        assert dict(prefix.sources) == {"device": 3 * PAGE, "dram": PAGE}
        s.check_content(TOKENS, prefix)
        prefix.release()


def test_a20_nested_waits_share_one_deadline() -> None:
    """A20: a slow query and a slow load together do not take longer than allowed."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding |= {"lookup", "load"}

        async def scenario() -> KvPrefix:
            waiting = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=5.0))
            await asyncio.sleep(3.0)
            s.tier.open("lookup")
            return await waiting

        prefix = s.loop.run(scenario())
        assert s.loop.time() == pytest.approx(5.0)
        assert prefix.degraded == ("dram: load timed out",)
        s.tier.open("load")


def test_a26_ranks_are_known_and_distinct() -> None:
    """A26: an unknown rank, a rank or a pool given twice are refused with their names."""
    with setup() as s:
        with pytest.raises(UsageFault, match="no rank 'x'"):
            s.loop.run(s.store.resolve_prefix("x", TOKENS))
        twice = [Rank(s.pool, {"full": s.binding}), Rank(s.pool, {"full": s.binding})]
        with pytest.raises(UsageFault, match=r"two ranks are named '0'.*share a pool"):
            KvStore(model_of(), twice, loop=s.loop, lane=InlineLane())


def test_r4_records_that_fail_shorten_the_hit() -> None:
    """R4: a page that does not arrive whole ends the hit there, with the code as the reason."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.codes["load"] = lambda codes: np.where(np.arange(len(codes)) == 1, Code.CORRUPT, codes)
        prefix = s.loop.run(s.resolve(TOKENS[: 3 * PAGE + 1]))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == PAGE
        assert "dram: corrupt" in prefix.degraded
        prefix.release()


def test_a10_the_next_tier_continues_where_one_ends() -> None:
    """R2: a hit may be pieced together from several tiers, in whatever order they have it."""
    with setup(tiers=2) as s:
        s.stored(TOKENS)
        s.evict()

        def first_only(lease: Lease) -> Lease:
            lease.present[1:] = False
            return lease

        s.tier.answer = first_only
        prefix = s.loop.run(s.resolve(TOKENS))
        assert sum(prefix.sources.values()) == prefix.hit_tokens == 4 * PAGE
        assert prefix.sources["disk"]
        s.check_content(TOKENS, prefix)
        prefix.release()


def test_i6_sources_and_computed_tokens_make_up_the_prompts() -> None:
    """I6: local + tier + computed = prompt, over any mix of outcomes."""
    with setup() as s:
        s.stored(TOKENS)
        total = 0
        for tokens in (TOKENS, TOKENS, prompt(2, seed=4), TOKENS[: 2 * PAGE], [1, 2]):
            release(s.loop.run(s.resolve(tokens)))
            total += len(tokens)
        hits = s.store.stats().hit_tokens
        assert sum(hits.values()) == total
        assert hits["dram"] == 4 * PAGE
        assert hits["device"] == 5 * PAGE


def test_d2_scopes_never_meet() -> None:
    """D2: equal tokens in another scope are not found, neither on the device nor in a tier."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        for scope in (Scope(), Scope(lora="tenant"), Scope(salt="")):
            assert s.loop.run(s.store.resolve_prefix("0", TOKENS, scope)).hit_tokens == 0
        assert release(s.loop.run(s.store.resolve_prefix("0", TOKENS, SCOPE))) == 4
