"""What is stored is known per tier, and what is lost, failed or shed is saved again (C3-C5, promotion)."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, prompt, setup

from kvcontract.core.pending import Pending
from kvcontract.store.marks import KNOWN_FOR_S
from kvcontract.store.seal import NOTHING, SealReport
from kvcontract.tiers.base import Code, Codes, SaveClass, record_keys

TOKENS = prompt(4)


def fail(codes: Codes) -> Codes:
    """Nothing is stored."""
    return np.full(len(codes), Code.FAILED, np.uint8)


def saves(s: Setup, tier: int = 0) -> list[int]:
    """Records of every save that a tier was given."""
    return [records for verb, records in s.tiers[tier].asked if verb == "save"]


def again(s: Setup, tokens: list[int]) -> SealReport:
    """Run a prompt again over what is there, and retire it."""
    return s.store.retire(s.compute(tokens, s.loop.run(s.resolve(tokens)))).value


# C3


@pytest.mark.paged
def test_c3_pages_that_the_tier_evicted_are_saved_again() -> None:
    """C3: stored, still on the device, evicted below: the next request that matches them saves them."""
    with setup(pages=32) as s:
        s.store.retire(s.compute(TOKENS))
        assert again(s, TOKENS) == NOTHING
        s.tier.inner._slots.capacity_bytes = s.tier.inner._slots.allocated_bytes  # full from now on
        records = s.tier.stats()["records"]
        for seed in range(1, 40):
            s.store.retire(s.compute(prompt(4, seed=seed)))
        assert s.tier.stats()["evictions"] > records
        assert again(s, TOKENS).saved == 4
        assert again(s, TOKENS) == NOTHING
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


@pytest.mark.paged
def test_c3_only_what_was_lost_is_saved_again() -> None:
    """C3, E7: one page is quarantined below while it is resident: that one is saved."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        _quarantine(s, TOKENS, page=2)
        assert (again(s, TOKENS).saved, saves(s)) == (1, [4, 1])


def _quarantine(s: Setup, tokens: list[int], page: int, tier: int = 0) -> None:
    keys = record_keys(s.store.keyer.chain(tokens, SCOPE), 0, 0, 1)
    with s.tiers[tier].inner.lookup(keys, 1e9).value as lease:
        s.tiers[tier].inner.discard(lease, np.array([page]))


@pytest.mark.paged
def test_c3_what_is_lost_while_it_is_being_saved_is_not_known_to_be_stored() -> None:
    """C3: the tier loses a record before the save of its page has settled: it is saved again."""
    with setup(tp=2) as s:  # shard 0 lands, shard 1 is held back
        s.tier.holding.add("save")
        report = s.store.seal(req := s.compute(TOKENS))
        held = list(s.tier._held)
        s.tier._held.clear()
        held[0][1]()
        keys = record_keys(s.store.keyer.chain(TOKENS, SCOPE), 0, 0, 2)
        with s.tier.inner.lookup(keys, 1e9).value as lease:
            s.tier.inner.discard(lease, np.array([1]))
        s.tier.open("save")
        held[1][1]()
        assert report.value.saved == 4
        assert s.store.retire(req).value.pages == 1


@pytest.mark.paged
def test_c3_c4_what_is_lost_while_it_is_saved_is_saved_again_for_who_retires_meanwhile() -> None:
    """C3, C4: retire relies on a save in flight; the tier loses the record before that save has settled."""
    with setup(tp=2) as s:
        s.tier.holding.add("save")
        req = s.compute(TOKENS)
        s.store.seal(req)
        held = list(s.tier._held)
        s.tier._held.clear()
        held[0][1]()  # shard 0 lands, shard 1 is held back
        assert s.store.retire(req).value == NOTHING
        keys = record_keys(s.store.keyer.chain(TOKENS, SCOPE), 0, 0, 2)
        with s.tier.inner.lookup(keys, 1e9).value as lease:
            s.tier.inner.discard(lease, np.array([2]))
        s.tier.holding.clear()
        held[1][1]()
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


@pytest.mark.paged
def test_c3_what_is_lost_while_it_is_read_is_not_known_to_be_stored() -> None:
    """C3: a record goes while its page is restored from there: the next retire saves it again."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")

        async def scenario() -> None:
            task = asyncio.ensure_future(s.resolve(TOKENS))
            await asyncio.sleep(1.0)
            held = list(s.tier._held)
            s.tier._held.clear()
            s.tier.holding.clear()
            _quarantine_after(s, held[0][1])
            (await task).release()

        s.loop.run(scenario())
        assert again(s, TOKENS).saved == 1


def _quarantine_after(s: Setup, read: Any) -> None:
    """The bytes have been read; before anybody is told, the tier loses page 2."""
    tier, settle = s.tier.inner, Pending.settle
    told: list[tuple[Any, Any]] = []
    Pending.settle = lambda self, value: told.append((self, value))  # type: ignore[method-assign]
    try:
        read()
    finally:
        Pending.settle = settle  # type: ignore[method-assign]
    _quarantine(s, TOKENS, page=2)
    assert tier.stats()["records"] == 3
    for pending, value in told:
        settle(pending, value)


@pytest.mark.paged
def test_c3_a_tier_that_cannot_tell_is_believed_for_a_while() -> None:
    """C3: where losses are silent, a page is saved again after some minutes; the tier knows if it has it."""
    with setup(silent=True) as s:
        s.store.retire(s.compute(TOKENS))
        assert again(s, TOKENS) == NOTHING
        s.loop.run(asyncio.sleep(KNOWN_FOR_S + 1))
        assert again(s, TOKENS).saved == 4
        assert again(s, TOKENS) == NOTHING


@pytest.mark.paged
def test_c3_marks_die_with_the_content_they_were_made_for() -> None:
    """C3: a page number that holds something else is not taken for what was stored before."""
    with setup(pages=6) as s:
        s.stored(TOKENS)
        assert s.store.retire(s.compute(prompt(4, seed=1))).value.saved == 4


# Per tier


@pytest.mark.paged
def test_each_tier_gets_what_it_lacks() -> None:
    """C3, C4: one tier failed, the other did not: only the one is tried again."""
    with setup(tiers=2) as s:
        s.tiers[1].codes["save"] = fail
        first = s.store.retire(s.compute(TOKENS)).value
        assert (first.saved, first.failed) == (0, {"failed": 4})
        s.tiers[1].codes.clear()
        assert again(s, TOKENS).saved == 4
        assert (saves(s, 0), saves(s, 1)) == ([4], [4, 4])
        assert again(s, TOKENS) == NOTHING


@pytest.mark.paged
def test_pages_from_a_lower_tier_are_written_back_to_those_above() -> None:
    """Promotion: what only the slow tier has is in the fast ones after it was restored once."""
    with setup(tiers=3) as s:
        s.tiers[0].codes["save"] = s.tiers[1].codes["save"] = fail
        s.stored(TOKENS)
        for tier in s.tiers[:2]:
            tier.codes.clear()
        classes = _classes(s)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"far": 4 * PAGE}
        prefix.release()
        assert classes == [("dram", SaveClass.WRITE_BACK), ("disk", SaveClass.WRITE_BACK)]
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert dict(prefix.sources) == {"dram": 4 * PAGE}
        prefix.release()
        assert len(classes) == 2  # the others have it, and are not given it again
        assert again(s, TOKENS) == NOTHING


def _classes(s: Setup) -> list[tuple[str, SaveClass]]:
    """Notes (tier, class) of every save from now on."""
    noted: list[tuple[str, SaveClass]] = []
    for tier in s.tiers:
        _note(tier, noted)
    return noted


def _note(tier: Any, noted: list[tuple[str, SaveClass]]) -> None:
    save = tier.save

    def wrapped(keys: Any, buffers: Any, cls: SaveClass, deadline: float, **more: Any) -> Any:
        noted.append((tier.name, cls))
        return save(keys, buffers, cls, deadline, **more)

    tier.save = wrapped


@pytest.mark.paged
def test_a_write_back_that_is_under_way_is_not_saved_twice() -> None:
    """Promotion, B9: the request that is retired meanwhile leaves it to the write-back."""
    with setup(tiers=2) as s:
        s.tiers[0].codes["save"] = fail
        s.stored(TOKENS)
        s.tiers[0].codes.clear()
        s.tiers[0].holding.add("save")
        req = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(req).value == NOTHING
        assert s.pool.pinned_blocks == 4
        s.tiers[0].open("save")


# C4


@pytest.mark.paged
def test_c4_a_save_that_fails_after_its_request_is_gone_is_tried_once_more() -> None:
    """C4, C6: retire finds the save in flight; it fails; the pages are still pinned and are saved again."""
    with setup() as s:
        asked = count()
        s.tier.codes["save"] = lambda codes: fail(codes) if next(asked) < 2 else codes  # twice a save
        s.tier.holding.add("save")
        req = s.compute(TOKENS)
        report = s.store.seal(req)
        assert s.store.retire(req).value == NOTHING
        s.tier.open("save")
        assert report.value.failed == {"failed": 4}
        assert s.store.stats().counters["pages_tried_again"] == 4
        s.evict()
        s.tier.codes.clear()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


@pytest.mark.paged
def test_c4_a_retry_that_fails_is_the_last() -> None:
    """C4, R5: a tier that never stores anything is not tried for ever."""
    with setup() as s:
        s.tier.codes["save"] = fail
        s.tier.holding.add("save")
        req = s.compute(TOKENS)
        s.store.seal(req)
        s.store.retire(req)
        s.tier.open("save")
        assert saves(s) == [4, 4]


@pytest.mark.paged
def test_c4_a_failed_page_waits_for_retire() -> None:
    """C4: later seals of the request do not try it again and again."""
    with setup() as s:
        s.tier.codes["save"] = fail
        req = s.compute(TOKENS)
        s.store.seal(req)
        assert s.store.seal(req).value == NOTHING
        s.store.retire(req)
        assert saves(s) == [4, 4]


# C5


@pytest.mark.paged
def test_c5_cacheable_saves_are_shed_above_a_quarter_of_the_pool() -> None:
    """C5: the leading pages within the budget are saved, the others reported as shed; pins stay below it."""
    with setup(pages=17, save_budget=0.25) as s:
        s.tier.holding.add("save")
        tokens = prompt(8)
        req = s.compute(tokens)
        report = s.store.seal(req)
        assert (s.pool.pinned_blocks, saves(s)) == (4, [4])
        assert s.store.seal(req).value == SealReport(4, 0, {"shed": 4})
        s.tier.open("save")
        assert report.value == SealReport(8, 4, {"shed": 4})
        assert s.store.seal(req).value.saved == 4
        assert s.store.retire(req).value == NOTHING
        assert s.store.stats().counters["pages_not_saved_shed"] == 8


@pytest.mark.paged
def test_c5_what_a_retired_request_left_is_saved_when_pins_come_back() -> None:
    """C5: as long as it is resident, what was shed is tried again, within the budget each time."""
    with setup(pages=17, save_budget=0.25) as s:
        tokens = prompt(10)
        most: list[int] = []
        save = s.tier.save
        s.tier.save = lambda *args, **more: (most.append(s.pool.pinned_blocks), save(*args, **more))[1]
        assert s.store.retire(s.compute(tokens)).value == SealReport(10, 4, {"shed": 6})
        assert (saves(s), max(most)) == ([4, 4, 2], 4)
        s.evict()
        assert s.loop.run(s.resolve(tokens, full_hit=True)).release() is None
        assert s.store.stats().hit_tokens["dram"] == 10 * PAGE


@pytest.mark.paged
def test_c5_r5_shed_pages_that_fail_are_not_tried_for_ever() -> None:
    """C5, R5: a tier that is full answers at once; each shed page has one turn, and then it is given up."""
    with setup(pages=17, save_budget=0.25) as s:
        s.tier.codes["save"] = lambda codes: np.full(len(codes), Code.FULL, np.uint8)
        s.store.retire(s.compute(prompt(10)))
        assert saves(s) == [4, 4, 4, 2]  # the first four have their second chance with the others
        assert s.store.stats().gauges["shed"] == 0


@pytest.mark.paged
def test_c5_a_barrier_covers_what_was_shed() -> None:
    """C5, C8: flushed means that what was shed before has had its turn."""
    with setup(pages=17, save_budget=0.25) as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(prompt(8)))

        async def scenario() -> None:
            flushed = asyncio.ensure_future(s.store.flush_saves())
            await asyncio.sleep(1.0)
            assert not flushed.done()
            s.tier.open("save")
            assert await flushed

        s.loop.run(scenario())
        assert s.tier.stats()["records"] == 8


@pytest.mark.paged
def test_c5_what_was_shed_and_evicted_is_forgotten() -> None:
    """C5, R8: nothing waits for pages that are gone."""
    with setup(pages=17, save_budget=0.25) as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(prompt(8)))
        s.evict()
        assert s.store.stats().gauges["shed"] == 1
        s.tier.open("save")
        assert s.store.stats().gauges["shed"] == 0
        assert s.tier.stats()["records"] == 4


@pytest.mark.paged
def test_c5_handoff_saves_are_never_shed_and_do_not_eat_the_budget() -> None:
    """C5: a handoff pins what it needs; Cacheable saves beside it have their whole budget."""
    with setup(pages=25, save_budget=0.25) as s:
        s.tier.holding.add("save")
        handed = s.store.seal(one := s.compute(prompt(10)), SaveClass.HANDOFF, handoff="h")
        assert s.pool.pinned_blocks == 10
        cacheable = s.store.seal(two := s.compute(prompt(6, seed=1)))
        assert s.pool.pinned_blocks == 16
        s.tier.open("save")
        assert (handed.value.saved, cacheable.value.saved) == (10, 6)
        for req in (one, two):
            s.store.retire(req)
        s.store.release_handoff("h")


@pytest.mark.paged
def test_c12_every_copy_is_awaited_whatever_the_others_say() -> None:
    """C12: with several tiers and workers, pages stay pinned until the last of all copies has ended."""
    with setup(tiers=2, tp=2) as s:
        for tier in s.tiers:
            tier.holding.add("save")
        s.tiers[0].codes["save"] = fail
        report: Pending[SealReport] = s.store.retire(s.compute(TOKENS))
        s.tiers[0].open("save")
        assert (report.done, s.pool.pinned_blocks) == (False, 4)
        held = list(s.tiers[1]._held)
        s.tiers[1]._held.clear()
        held[0][1]()
        assert (report.done, s.pool.pinned_blocks) == (False, 4)
        held[1][1]()
        assert (report.value.failed, s.pool.pinned_blocks) == ({"failed": 4}, 0)
