"""Seal, retire, flush: pins, retries, barriers (C)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from bench_store import PAGE, Setup, prompt, setup

from kvcontract import BlockPool
from kvcontract.contract.errors import UsageFault
from kvcontract.store.seal import NOTHING
from kvcontract.tiers.base import Code, Codes

TOKENS = prompt(4)


def second_fails(codes: Codes) -> Codes:
    """One record of a batch is not stored."""
    return np.where(np.arange(len(codes)) == 1, Code.FULL, codes).astype(np.uint8)


@pytest.mark.paged
def test_c1_pages_are_not_reissued_before_their_copy_has_landed() -> None:
    """C1, C6: retire does not block, and its pages stay resident and untouched until the save settles."""
    with setup(pages=6) as s:
        s.tier.holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        assert not report.done
        assert (s.pool.pinned_blocks, s.store.pinned_blocks) == (4, 4)
        assert s.pool.reserve(2) is None
        s.tier.open("save")
        assert report.value.saved == 4
        assert s.pool.reserve(5).release() is None
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        prefix.release()


@pytest.mark.paged
def test_c2_the_step_is_waited_for_before_the_first_byte_is_read() -> None:
    """C2: `after` is called before the copy; if it fails nothing is stored."""
    with setup() as s:
        calls: list[int] = []
        req = s.compute(TOKENS)
        assert s.store.seal(req, after=lambda: calls.append(s.tier.count("save"))).value.saved == 4
        assert calls == [0]
        req.release()

        def lost() -> None:
            raise OSError("the step failed")

        report = s.store.retire(s.compute(prompt(2, seed=1)), after=lost).value
        assert (report.saved, report.failed) == (0, {"failed": 2})


@pytest.mark.paged
def test_c3_matched_pages_that_are_stored_are_not_saved_again() -> None:
    """C3, C9: neither pages of an earlier request, nor restored ones; re-seal with nothing new is a no-op."""
    with setup() as s:
        req = s.compute(TOKENS)
        assert s.store.seal(req).value.saved == 4
        assert s.store.seal(req).value == NOTHING
        assert s.store.retire(req).value == NOTHING
        again = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(again).value == NOTHING
        s.evict()
        restored = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(restored).value == NOTHING
        assert s.tier.count("save") == 1


@pytest.mark.paged
def test_c3_holes_heal() -> None:
    """C3: a page whose save failed is saved by the next request that matched it."""
    with setup() as s:
        s.tier.codes["save"] = second_fails
        assert s.store.retire(s.compute(TOKENS)).value.failed == {"full": 1}
        s.tier.codes.clear()
        again = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(again).value.saved == 1
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


@pytest.mark.paged
def test_c4_a_failed_page_is_tried_again_at_retire() -> None:
    """C4: the cursor moves on success, page by page."""
    with setup() as s:
        s.tier.codes["save"] = second_fails
        req = s.compute(TOKENS)
        first = s.store.seal(req).value
        assert (first.pages, first.saved, first.failed) == (4, 3, {"full": 1})
        s.tier.codes.clear()
        last = s.store.retire(req).value
        assert (last.pages, last.saved, last.failed) == (1, 1, {})
        assert [records for verb, records in s.tier.asked if verb == "save"] == [4, 1]


@pytest.mark.paged
def test_c6_a_failed_save_is_counted_reported_and_released() -> None:
    """C6, R8: failure changes nothing for the request's pages."""
    with setup() as s:
        s.tier.codes["save"] = lambda codes: np.full(len(codes), Code.FAILED, np.uint8)
        report = s.store.retire(s.compute(TOKENS)).value
        assert (report.pages, report.saved, report.failed) == (4, 0, {"failed": 4})
        assert s.store.stats().counters["pages_not_saved_failed"] == 4
        assert (s.pool.held, s.pool.cached) == (0, 4)


def test_c6_retire_releases_whatever_seal_says() -> None:
    """C6: a request of a foreign pool is an error, and still released; a released one is an error."""
    with setup() as s:
        other = Setup()
        req = other.compute(TOKENS)
        with pytest.raises(UsageFault, match="no rank of this store"):
            s.store.retire(req)
        assert req.released
        other.check_idle()
        other.loop.run(other.store.aclose())
        other.loop.close()
        done = s.compute(TOKENS)
        s.store.retire(done)
        for verb in (s.store.seal, s.store.retire):
            with pytest.raises(UsageFault, match="is released"):
                verb(done)


@pytest.mark.paged
def test_a_page_that_is_being_saved_is_not_saved_twice() -> None:
    """B9: a page in two requests is in one save; the other request has nothing to do."""
    with setup() as s:
        s.tier.holding.add("save")
        first = s.compute(TOKENS)
        report = s.store.seal(first)
        second = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        assert s.store.retire(second).value == NOTHING
        assert s.store.retire(first).value == NOTHING
        assert s.pool.pinned_blocks == 4
        s.tier.open("save")
        assert report.value.saved == 4


def test_c9_nothing_complete_is_nothing_to_do() -> None:
    """C9: a prompt shorter than a page reaches no tier."""
    with setup() as s:
        assert s.store.retire(s.compute(prompt(0, extra=3))).value == NOTHING
        assert s.tier.asked == []


@pytest.mark.paged
def test_c12_all_copies_are_awaited_before_anything_is_released() -> None:
    """C12: one tier fails at once, the other still reads the pages: they stay pinned."""
    with setup(tiers=2) as s:
        s.tiers[0].codes["save"] = lambda codes: np.full(len(codes), Code.FAILED, np.uint8)
        s.tiers[1].holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        assert (report.done, s.pool.pinned_blocks) == (False, 4)
        s.tiers[1].open("save")
        assert report.value.failed == {"failed": 4}
        assert s.pool.pinned_blocks == 0


def test_c8_flush_covers_what_was_submitted_before_and_has_a_deadline() -> None:
    """C8: landed when all saves have settled; False at the deadline; DRAM is never durable."""
    with setup() as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(TOKENS))
        assert s.loop.run(s.store.flush_saves(deadline_s=2.0)) is False
        assert s.loop.time() == pytest.approx(2.0)

        async def scenario() -> bool:
            flushed = asyncio.ensure_future(s.store.flush_saves())
            await asyncio.sleep(1.0)
            s.tier.open("save")
            return await flushed

        assert s.loop.run(scenario()) is True
        assert s.loop.run(s.store.flush_saves("durable")) is False


def test_flush_loads_waits_for_abandoned_loads() -> None:
    """A4, C8: after it, what landed late is registered."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        assert s.loop.run(s.store.flush_loads(1.0)) is False
        s.loop.call_later(1.0, s.tier.open, "load")
        assert s.loop.run(s.store.flush_loads()) is True
        assert s.pool.cached == 4


@pytest.mark.paged
def test_b12_without_retention_saves_still_land() -> None:
    """B12, C1: pages of a pool that keeps nothing stay pinned for their save, then are free."""
    with setup() as s:
        s.pool.set_retention(False)
        s.tier.holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        assert s.pool.pinned_blocks == 4
        s.tier.open("save")
        assert report.value.saved == 4
        assert (s.pool.free, s.pool.cached) == (s.pool.total, 0)


def test_a_pool_with_other_pages_is_refused() -> None:
    """B22: page size and capacity of a pool must fit the declaration and the memory."""
    with setup() as s:
        with pytest.raises(UsageFault, match="differs from 4 tokens"):
            _with_pool(s, BlockPool(pages=16, page_tokens=PAGE + 1))
        with pytest.raises(UsageFault, match="too small"):
            _with_pool(s, BlockPool(pages=17, page_tokens=PAGE))


def _with_pool(s: Setup, pool: BlockPool) -> None:
    from kvcontract import KvStore, Rank  # noqa: PLC0415

    KvStore(s.model, [Rank(pool, {"full": s.binding})], loop=s.loop)
