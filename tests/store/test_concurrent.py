"""Resolves beside each other: single flight, fair waiting, nobody blocked by another (A14, A16-A19, A22)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, prompt, setup

from kvcontract.pool.request import RequestKv
from kvcontract.store.policy import KvPrefix, ResolvePolicy
from kvcontract.store.resolve import HASHED_AT_ONCE_TOKENS
from kvcontract.tiers.base import Code, Lease

TOKENS = prompt(4)


async def rounds(number: int = 30) -> None:
    """Let everybody go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


def release(prefixes: list[KvPrefix]) -> list[int]:
    """Give prefixes back; their lengths in pages."""
    lengths = [prefix.hit_tokens // PAGE for prefix in prefixes]
    for prefix in prefixes:
        prefix.release()
    return lengths


# A14, A16


@pytest.mark.paged
@pytest.mark.parametrize("stage", ["lookup", "load", None])
def test_a16_one_cold_prefix_is_loaded_once(stage: str | None) -> None:
    """A16: whenever others come, one of them asks and loads, and all of them hit."""
    with setup() as s:
        s.stored(TOKENS)
        asked = s.tier.count("lookup")
        if stage:
            s.tier.holding.add(stage)

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(TOKENS)) for _ in range(5)]
            await rounds()
            tasks += [asyncio.ensure_future(s.resolve(TOKENS)) for _ in range(5)]
            await rounds()
            if stage:
                s.tier.open(stage)
            return await asyncio.gather(*tasks)

        assert release(s.loop.run(scenario())) == [4] * 10
        assert (s.tier.count("lookup") - asked, s.tier.count("load")) == (1, 1)


@pytest.mark.paged
def test_a16_longer_prompts_go_on_from_what_another_loaded() -> None:
    """A16: prompts of several lengths share what they have in common; no page is loaded twice."""
    with setup() as s:
        s.stored(prompt(6))
        s.tier.holding.add("load")

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(prompt(6)[: pages * PAGE + 1])) for pages in (2, 4, 6)]
            await rounds()
            s.tier.open("load")
            return await asyncio.gather(*tasks)

        prefixes = s.loop.run(scenario())
        for prefix, pages in zip(prefixes, (2, 4, 6), strict=True):
            s.check_content(prompt(6)[: pages * PAGE + 1], prefix)
        assert release(prefixes) == [2, 4, 6]
        assert [records for verb, records in s.tier.asked if verb == "load"] == [2, 2, 2]


@pytest.mark.paged
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a16_who_follows_does_not_depend_on_who_leads(how: str) -> None:
    """A16, A11: the leader leaves; the load goes on, and who follows hits what it brings."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")

        async def scenario() -> KvPrefix:
            first = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=1.0))
            await rounds()
            second = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            if how == "cancel":
                first.cancel()
            await asyncio.sleep(2.0)
            s.tier.open("load")
            return await second

        assert release([s.loop.run(scenario())]) == [4]
        assert s.tier.count("load") == 1


@pytest.mark.paged
def test_a16_the_leader_of_a_query_leaves() -> None:
    """A16: a query whose leader was cancelled is asked again by one of the others."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("lookup")

        async def scenario() -> list[KvPrefix]:
            first = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            others = [asyncio.ensure_future(s.resolve(TOKENS)) for _ in range(3)]
            await rounds()
            first.cancel()
            await rounds()
            s.tier.open("lookup")
            return await asyncio.gather(*others)

        assert release(s.loop.run(scenario())) == [4] * 3
        assert s.tier.count("load") == 1


@pytest.mark.paged
def test_a16_two_look_ups_from_different_pages_load_once() -> None:
    """A16: the second began further along the chain; when both are answered, one of them loads."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding |= {"lookup", "load"}

        async def scenario() -> list[KvPrefix]:
            first = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            req = s.compute(TOKENS[: PAGE + 1])  # its first page is resident from now on
            second = asyncio.ensure_future(s.resolve(TOKENS))
            await rounds()
            assert s.tier.count("lookup") == 2
            s.tier.open("lookup")
            await rounds()
            s.tier.open("load")
            found = await asyncio.gather(first, second)
            req.release()
            return found

        assert release(s.loop.run(scenario())) == [4, 4]
        assert [records for verb, records in s.tier.asked if verb == "load"] == [3]


def test_a16_who_follows_a_failed_load_tries_itself() -> None:
    """A16, R4: one load failed; the other resolve asks on its own and hits."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        s.tier.codes["load"] = lambda codes: np.full(len(codes), Code.FAILED, np.uint8)

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(TOKENS)) for _ in range(2)]
            await rounds()
            s.tier.codes.clear()
            s.tier.open("load")
            return await asyncio.gather(*tasks)

        assert release(s.loop.run(scenario())) == [0, 4]


@pytest.mark.paged
def test_a16_a_miss_is_a_miss_for_all_who_wait() -> None:
    """A16: a cold prefix that is nowhere is asked for once by many."""
    with setup() as s:
        s.tier.holding.add("lookup")

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(TOKENS)) for _ in range(20)]
            await rounds()
            s.tier.open("lookup")
            return await asyncio.gather(*tasks)

        assert release(s.loop.run(scenario())) == [0] * 20
        assert s.tier.count("lookup") == 1


def test_a14_labels_may_repeat() -> None:
    """A14: two different prompts under one label, at once: each gets its own pages."""
    with setup() as s:
        other = prompt(3, seed=1)
        s.stored(TOKENS)
        s.stored(other)
        s.tier.holding.add("load")

        async def scenario() -> list[KvPrefix]:
            tasks = [
                asyncio.ensure_future(s.store.resolve_prefix("0", tokens, SCOPE, label="same"))
                for tokens in (TOKENS, other)
            ]
            await rounds()
            s.tier.open("load")
            return await asyncio.gather(*tasks)

        prefixes = s.loop.run(scenario())
        for prefix, tokens in zip(prefixes, (TOKENS, other), strict=True):
            s.check_content(tokens, prefix)
        assert len({prefix.id for prefix in prefixes}) == 2
        assert release(prefixes) == [4, 3]


# A17


def _resident_past_hole(s: Setup) -> None:
    """Pages 1 to 3 live on the pins of a save to the second tier; page 0 is in the first tier alone."""
    s.stored(TOKENS[: PAGE + 1])
    prefix = s.loop.run(s.resolve(TOKENS[: PAGE + 1]))
    s.tiers[1].holding.add("save")
    s.store.retire(s.compute(TOKENS, prefix))
    s.evict()
    keys = s.store.keyer.chain(TOKENS, SCOPE)
    assert (s.pool.probe(keys), s.pool.probe(keys[1:])) == (0, 3)


def test_a17_pages_resident_past_a_hole_are_not_loaded_again() -> None:
    """A17: page 0 is missing, those after it are resident: only the one is loaded."""
    with setup(tiers=2) as s:
        _resident_past_hole(s)
        before = [records for verb, records in s.tier.asked if verb == "load"]
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert [records for verb, records in s.tier.asked if verb == "load"] == [*before, 1]
        assert dict(prefix.sources) == {"dram": PAGE, "device": 3 * PAGE}
        prefix.release()
        s.tiers[1].open("save")


@pytest.mark.parametrize("waits", [True, False])
def test_a17_what_is_resident_past_a_hole_stays_while_the_hole_is_filled(*, waits: bool) -> None:
    """A17, R3, B14: the save lets go of the pages past the hole meanwhile, and the resolver perhaps too."""
    with setup(tiers=2) as s:
        _resident_past_hole(s)
        s.tier.holding.add("load")

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=1.0))
            await rounds()
            s.tiers[1].open("save")
            await asyncio.sleep(0.5 if waits else 2.0)
            s.tier.open("load")
            return await task

        prefix = s.loop.run(scenario())
        assert prefix.hit_tokens == (4 * PAGE if waits else 0)
        prefix.release()
        s.pool.check_books()
        assert s.pool.cached == 4
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert dict(prefix.sources) == {"device": 4 * PAGE}
        prefix.release()


def test_a13_a17_pages_that_arrive_past_a_hole_meanwhile_are_held_once() -> None:
    """A13, A17: while holes before and after resident pages are filled, another computes all of them."""
    tokens = prompt(6)
    with setup(pages=32, tiers=2) as s:
        s.stored(tokens[: PAGE + 1])
        s.tiers[1].codes["save"] = lambda codes: np.full(len(codes), Code.FAILED, np.uint8)
        s.stored(tokens)
        s.tiers[1].codes.clear()
        s.tiers[1].holding.add("save")
        s.store.retire(s.compute(tokens[: 4 * PAGE + 1], s.loop.run(s.resolve(tokens[: 4 * PAGE + 1]))))
        s.evict()  # pages 1 to 3 live on their pins
        s.tier.holding.add("load")

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(tokens))
            await rounds()
            other = s.compute(tokens)
            s.tier.open("load")
            prefix = await task
            other.release()
            return prefix

        prefix = s.loop.run(scenario())
        s.check_content(tokens, prefix)
        assert prefix.hit_tokens == 6 * PAGE
        assert [records for verb, records in s.tier.asked if verb == "load"][-1] == 3
        prefix.release()
        s.tiers[1].open("save")


# A18, A19, R6


def test_a18_only_a_prefix_of_the_hit_fits() -> None:
    """A18: shortly before the deadline plain mode takes what fits instead of nothing."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        busy = s.admit(prompt(5, seed=1))  # promised 6 of 8
        prefix = s.loop.run(s.resolve(TOKENS, deadline_s=10.0))
        assert s.loop.time() == pytest.approx(8.0)
        assert (prefix.hit_tokens, prefix.degraded) == (2 * PAGE, ("no room on the device",))
        s.check_content(TOKENS, prefix)
        prefix.release()
        busy.release()


def test_r6_who_waits_for_room_holds_nothing() -> None:
    """R6, B8: two resolves whose pages together fill the pool do not wait for each other."""
    with setup(pages=9) as s:
        one, two = prompt(6), prompt(6, seed=1)
        for tokens in (one, two):
            s.stored(tokens)
        for tokens in (one, two):
            s.loop.run(s.resolve(tokens[: 3 * PAGE + 1])).release()
        busy = s.admit(prompt(1, seed=2))  # promised 2 of 8: no room for 6 beside 3 that are held

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(tokens)) for tokens in (one, two)]
            await rounds()
            busy.release()
            first = await tasks[0]
            assert first.hit_tokens == 6 * PAGE
            first.release()
            return [await tasks[1]]

        assert release(s.loop.run(scenario())) == [6]
        assert s.loop.time() < 15.0


def _stage_waiters(s: Setup, sizes: list[int]) -> list[list[int]]:
    prompts = [prompt(pages, seed=10 + number) for number, pages in enumerate(sizes)]
    for tokens in prompts:
        s.stored(tokens)
    return prompts


def test_a19_waiters_are_served_in_order_and_a_big_one_is_not_starved() -> None:
    """A19: small ones that come later and would fit do not pass a big one that waits."""
    with setup(pages=9) as s:
        big, small = _stage_waiters(s, [6, 2])
        busy = [s.admit(prompt(2, seed=seed)) for seed in (1, 2)]  # 3 + 3 of 8: room for 2
        ended: list[str] = []

        async def one(name: str, tokens: list[int]) -> None:
            prefix = await s.resolve(tokens)
            ended.append(f"{name} {prefix.hit_tokens // PAGE}")
            prefix.release()

        async def scenario() -> None:
            tasks = [asyncio.ensure_future(one("big", big))]
            await rounds()
            tasks += [asyncio.ensure_future(one(f"small {n}", small)) for n in range(2)]
            await rounds()
            assert ended == []
            busy[0].release()  # room for 5: not enough for the first in line
            await rounds()
            assert ended == []
            busy[1].release()
            await asyncio.gather(*tasks)

        s.loop.run(scenario())
        assert ended == ["big 6", "small 0 2", "small 1 2"]
        assert s.loop.time() == 0.0


def test_a19_releases_wake_nobody_but_the_first() -> None:
    """A19: no polling: nothing happens between releases, and who waits behind is not asked to look."""
    with setup(pages=9) as s:
        first, second = _stage_waiters(s, [6, 6])
        busy = s.admit(prompt(6, seed=1))

        async def scenario() -> list[KvPrefix]:
            tasks = [asyncio.ensure_future(s.resolve(tokens)) for tokens in (first, second)]
            await rounds()
            asked = s.tier.count("lookup")
            await asyncio.sleep(5.0)
            assert s.tier.count("lookup") == asked
            busy.release()
            found = [await tasks[0]]
            await rounds()
            assert not tasks[1].done()
            found[0].release()
            return [await tasks[1]]

        assert release(s.loop.run(scenario())) == [6]


def test_a19_who_gives_up_lets_the_next_one_look() -> None:
    """A19, A11: the first in line is cancelled; the next one fits and goes on at once."""
    with setup(pages=9) as s:
        big, small = _stage_waiters(s, [6, 2])
        busy = s.admit(prompt(4, seed=1))  # promised 5 of 8

        async def scenario() -> KvPrefix:
            first = asyncio.ensure_future(s.resolve(big))
            await rounds()
            second = asyncio.ensure_future(s.resolve(small))
            await rounds()
            assert not second.done()
            first.cancel()
            return await second

        assert release([s.loop.run(scenario())]) == [2]
        assert s.loop.time() == 0.0
        busy.release()


def test_a19_admission_passes_those_who_wait() -> None:
    """A19, R6: a restore takes what is left: who waits does not keep a request from being admitted."""
    with setup(pages=9) as s:
        (tokens,) = _stage_waiters(s, [6])
        busy = s.admit(prompt(2, seed=1))  # promised 3 of 8

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(tokens))
            await rounds()
            second = s.admit(prompt(4, seed=2))
            assert isinstance(second, RequestKv)
            busy.release()
            await rounds()
            assert not task.done()
            second.release()
            return await task

        assert release([s.loop.run(scenario())]) == [6]


# A22


def test_a22_hashing_a_long_prompt_blocks_nobody() -> None:
    """A22: while a prompt of many slices is being named, a short one begins and ends."""
    with setup(pages=4) as s:
        s.store.retire(s.compute(prompt(2)))
        long = np.zeros(20 * HASHED_AT_ONCE_TOKENS, np.int32)
        order: list[str] = []

        async def one(name: str, tokens: Any) -> None:
            prefix = await s.store.resolve_prefix("0", tokens, SCOPE, ResolvePolicy())
            order.append(name)
            prefix.release()

        async def scenario() -> None:
            await asyncio.gather(one("long", long), one("short", prompt(2)))

        s.loop.run(scenario())
        assert order == ["short", "long"]


def test_a22_names_do_not_depend_on_slices() -> None:
    """A22, D1: a prompt longer than a slice hits what it stored under the names of one pass."""
    page_slices = HASHED_AT_ONCE_TOKENS // PAGE
    tokens = np.arange(2 * HASHED_AT_ONCE_TOKENS + 3 * PAGE, dtype=np.int64) % 1000
    with setup(pages=2) as s:
        asked: list[Any] = []
        lookup = s.tier.lookup
        s.tier.lookup = lambda keys, deadline: (asked.append(keys["page_key"]), lookup(keys, deadline))[1]
        s.loop.run(s.store.resolve_prefix("0", tokens, SCOPE))
        expected = s.store.keyer.chain(tokens[:-1], SCOPE)
        assert len(expected) == 2 * page_slices + 2
        assert (asked[0] == expected).all()


def test_two_hundred_resolves_make_progress_together() -> None:
    """A25: many cold ones behind a slow tier do not hold up one that needs nothing."""
    with setup(pages=64) as s:
        s.store.retire(s.compute(TOKENS))
        s.tier.holding.add("lookup")

        async def scenario() -> None:
            cold = [asyncio.ensure_future(s.resolve(prompt(2, seed=seed))) for seed in range(100, 300)]
            await rounds(3)
            warm = await asyncio.wait_for(s.resolve(TOKENS), 0.001)
            assert warm.hit_tokens == 4 * PAGE
            warm.release()
            s.tier.open("lookup")
            assert [prefix.hit_tokens for prefix in await asyncio.gather(*cold)] == [0] * 200

        s.loop.run(scenario())


@pytest.mark.paged
def test_a7_a_tier_that_has_news_is_asked_when_it_says_so() -> None:
    """A7: where the tier tells when something has come, nobody polls it."""
    with setup() as s:
        from kvcontract.core.pending import Pending  # noqa: PLC0415

        news: Pending[None] = Pending()

        def with_news(lease: Lease) -> Lease:
            lease.pending = news
            return lease

        s.tier.answer = with_news

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(TOKENS, full_hit=True))
            await asyncio.sleep(0.7)
            assert s.tier.count("lookup") == 1
            s.store.retire(s.compute(TOKENS))
            s.evict()
            s.tier.answer = lambda lease: lease
            news.settle(None)
            return await task

        assert release([s.loop.run(scenario())]) == [4]
        assert s.loop.time() == pytest.approx(0.7)


@pytest.mark.paged
def test_a7_only_the_last_page_is_asked_for_while_waiting() -> None:
    """A7: a parked resolve asks for the last key alone until it is there."""
    with setup() as s:

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(TOKENS, full_hit=True))
            await asyncio.sleep(1.0)
            s.store.retire(s.compute(TOKENS))
            s.evict()
            return await task

        assert release([s.loop.run(scenario())]) == [4]
        asked = [records for verb, records in s.tier.asked if verb == "lookup"]
        assert (asked[0], set(asked[1:-2]), asked[-1]) == (4, {1}, 4)
