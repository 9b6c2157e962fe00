"""Write-back: pages go from the device to the tier above, and on from there in the background (C3, C8)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, HeldTier, Setup, model_of, prompt, setup

from kvcontract import FleetSecret, StoreOptions, TierEvents, TierPolicy, WeightIdentity
from kvcontract.pool.events import Stored
from kvcontract.store.relay import BUFFER_BYTES
from kvcontract.tiers.base import Code, Codes, RecordKeys, SaveClass

TOKENS = prompt(4)
BACK = TierPolicy(write="back")


def back(*names: str, **more: Any) -> Any:
    """A set-up of which these tiers are written back."""
    tiers = {"disk": 2, "far": 3}
    options = StoreOptions(tiers=dict.fromkeys(names, BACK) | more.pop("policies", {}))
    return setup(tiers=max([2, *(tiers[name] for name in names)]), options=options, **more)


def fail(codes: Codes) -> Codes:
    """Nothing is done."""
    return np.full(len(codes), Code.FAILED, np.uint8)


def counters(s: Setup) -> dict[str, int]:
    """Of the store."""
    return s.store.stats().counters


def lose(s: Setup, tier: HeldTier) -> None:
    """The tier drops what it has of the prompt, and says so."""
    s.lose(tier, TOKENS[: 4 * PAGE])


def only(s: Setup, number: int) -> dict[str, int]:
    """What is found with nothing on the device, and only one tier answering; its content is checked."""
    s.evict()
    for other, tier in enumerate(s.tiers):
        if other != number:
            lose(s, tier)
    prefix = s.loop.run(s.resolve(TOKENS))
    if prefix.hit_tokens:
        s.check_content(TOKENS, prefix)
    prefix.release()
    return dict(prefix.sources)


@pytest.mark.paged
def test_pages_are_saved_to_the_tier_above_and_relayed_from_there() -> None:
    """The device gives each page once; what was relayed is found, whole, when the tier above is gone."""
    with back("disk") as s:
        assert s.store.retire(s.compute(TOKENS)).value.saved == 4
        assert counters(s)["pages_relayed_disk"] == counters(s)["pages_to_relay_disk"] == 4
        assert s.store.stats().moved["disk"]["save"].pages == 4
        assert only(s, 1) == {"disk": 4 * PAGE}


@pytest.mark.paged
def test_a_chain_of_tiers_is_relayed_step_by_step() -> None:
    """Device to DRAM, DRAM to disk, disk to the far tier: the last has all once the barrier is reached."""
    with back("disk", "far") as s:
        s.store.retire(s.compute(TOKENS))
        assert counters(s)["pages_relayed_far"] == 4
        assert only(s, 2) == {"far": 4 * PAGE}


@pytest.mark.paged
@pytest.mark.parametrize("verb", ["lookup", "load", "save"])
def test_no_device_page_is_pinned_while_a_relay_is_slow(verb: str) -> None:
    """A slow tier holds no page of the pool; `relays` is a gauge that returns to 0 (R8)."""
    with back("disk") as s:
        s.tiers[verb == "save"].holding.add(verb)
        s.store.retire(s.compute(TOKENS))
        assert s.pool.pinned_blocks == 0
        assert s.store.gauges()["relays"] == 4
        s.evict()
        s.tiers[verb == "save"].open(verb)
        assert s.store.gauges()["relays"] == 0
        assert only(s, 1) == {"disk": 4 * PAGE}


@pytest.mark.paged
def test_relays_have_the_lowest_class_and_go_through_one_bounded_buffer() -> None:
    """A batch is never larger than the tier's own limit; batches follow each other."""
    policies = {"disk": TierPolicy(write="back", most_saving_bytes=400)}  # two pages of 176 B
    with back("disk", policies=policies) as s:
        noted = []
        save = s.tiers[1].save

        def wrapped(keys: RecordKeys, buffers: Any, cls: SaveClass, deadline: float, **more: Any) -> Any:
            noted.append((cls, len(keys), buffers.address.min()))
            return save(keys, buffers, cls, deadline, **more)

        s.tiers[1].save = wrapped
        s.store.retire(s.compute(TOKENS))
        assert [(cls, count) for cls, count, _ in noted] == [(SaveClass.WRITE_BACK, 2)] * 2
        assert len({at for *_, at in noted}) == 1
        assert BUFFER_BYTES > 400


@pytest.mark.paged
def test_c3_what_the_tier_above_loses_before_is_saved_anew() -> None:
    """C3: the loss is counted, and whoever retires the pages next heals both tiers."""
    with back("disk") as s:
        s.tiers[1].holding.add("save")
        s.store.retire(s.compute(prompt(2, seed=1)))  # keeps the relay busy
        s.store.retire(s.compute(TOKENS))
        s.tiers[0].inner.reset(float("inf"))  # silently
        s.tiers[1].open("save")
        assert counters(s)["relays_lost_dram"] == 4
        assert counters(s)["pages_not_relayed_miss_disk"] == 4
        assert s.store.retire(s.compute(TOKENS)).value.saved == 4
        assert only(s, 1) == {"disk": 4 * PAGE}


def test_c3_what_the_tier_above_has_is_relayed_when_the_tier_below_lost_it() -> None:
    """C3: a hole below is filled from above; the device saves nothing."""
    with back("disk") as s:
        s.store.retire(s.compute(TOKENS))
        lose(s, s.tiers[1])
        before = s.tiers[0].count("save")
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        assert s.tiers[0].count("save") == before
        assert only(s, 1) == {"disk": 4 * PAGE}


@pytest.mark.paged
@pytest.mark.parametrize(("tier", "verb"), [(0, "load"), (1, "save")])
def test_c4_a_relay_that_fails_is_tried_again_at_retire(tier: int, verb: str) -> None:
    """C4, R8: it has one counted end; the next retire relays what is missing."""
    with back("disk") as s:
        s.tiers[tier].codes[verb] = fail
        s.store.retire(s.compute(TOKENS))
        assert counters(s)["pages_not_relayed_failed_disk"] == 4
        s.tiers[tier].codes.clear()
        s.store.retire(s.compute(TOKENS))
        assert counters(s)["pages_relayed_disk"] == 4


@pytest.mark.paged
def test_a_save_that_fails_above_ends_what_waits_for_it() -> None:
    """R8: pages that never reach the tier above are no relays any more, however long the chain is."""
    with back("disk", "far") as s:
        s.tiers[0].codes["save"] = fail
        report = s.store.retire(s.compute(TOKENS)).value
        assert report.failed == {"failed": 4}
        assert s.store.gauges()["relays"] == 0
        assert counters(s)["pages_not_relayed_miss_far"] == 4
        s.tiers[0].codes.clear()
        s.store.retire(s.compute(TOKENS))
        assert only(s, 2) == {"far": 4 * PAGE}


@pytest.mark.paged
def test_pages_are_relayed_once_whoever_asks() -> None:
    """Two requests with the same pages, the second while the relay is under way: one copy."""
    with back("disk") as s:
        s.tiers[1].holding.add("save")
        for _ in range(3):
            s.store.retire(s.compute(TOKENS))
        assert s.store.gauges()["relays"] == 4
        s.tiers[1].open("save")
        assert s.tiers[1].count("save") == 1


@pytest.mark.parametrize("level", ["landed", "visible", "durable"])
def test_c8_barriers_cover_relays_of_what_was_submitted_before(level: Any) -> None:
    """C8: a barrier is reached when the relays have ended, also those that had not begun."""
    with back("disk") as s:
        s.tiers[0].holding.add("save")
        s.store.retire(s.compute(TOKENS))

        async def scenario() -> None:
            task = asyncio.ensure_future(s.store.flush_saves(level))
            s.tiers[1].holding.add("save")
            s.tiers[0].open("save")
            await asyncio.sleep(0.1)
            assert not task.done()
            s.tiers[1].open("save")
            assert await task is (level != "durable")  # no tier of these lasts

        s.loop.run(scenario())


@pytest.mark.paged
def test_c10_close_drains_relays_and_counts_those_that_were_not_made() -> None:
    """C10: under the deadline they end; after it none begins, and the report tells how many are left."""
    for held in (False, True):
        s = Setup(
            tiers=2, options=StoreOptions(tiers={"disk": TierPolicy(write="back", most_saving_bytes=176)})
        )
        s.tiers[1].holding.add("save")
        s.store.retire(s.compute(TOKENS))
        if not held:
            s.loop.call_later(1.0, s.tiers[1].open, "save")
        report = s.loop.run(s.store.aclose(5.0))
        assert (report.drained, report.relays) == ((False, 4) if held else (True, 0))
        s.tiers[1].open("save")
        assert s.tiers[1].count("save") == (1 if held else 4)
        assert s.store.gauges()["relays"] == 0
        s.loop.close()


def test_c11_a_reset_waits_for_relays() -> None:
    """C11: nothing is copied from before a reset to after it."""
    with back("disk") as s:
        s.tiers[1].holding.add("save")
        s.store.retire(s.compute(TOKENS))

        async def scenario() -> None:
            task = asyncio.ensure_future(s.store.areset())
            await asyncio.sleep(0.1)
            assert not task.done()
            s.tiers[1].open("save")
            assert (await task).done

        s.loop.run(scenario())


def test_c7_a_handoff_goes_straight_to_where_another_process_looks() -> None:
    """C7: a shared tier gets a handoff from the device, although other pages are written back to it."""
    lasting = {
        "model": model_of(weights=WeightIdentity(kind="digest", value="abc")),
        "secret": FleetSecret(bytes(32)),
        "claims": {"far": {"shared": True}},
        "max_tp": 1,
    }
    with back("disk", "far", **lasting) as s:
        classes = _classes(s)
        s.store.retire(s.compute(TOKENS), SaveClass.HANDOFF, handoff="request")
        assert s.loop.run(s.store.aflush_handoff("request")).confirmed
        assert ("far", SaveClass.HANDOFF) in classes
        assert ("disk", SaveClass.WRITE_BACK) in classes
        assert ("disk", SaveClass.CACHEABLE) not in classes
        s.store.release_handoff("request")


def _classes(s: Setup) -> list[tuple[str, SaveClass]]:
    """Notes (tier, class) of every save from now on."""
    noted: list[tuple[str, SaveClass]] = []
    for tier in s.tiers:
        _note(tier, noted)
    return noted


def _note(tier: HeldTier, noted: list[tuple[str, SaveClass]]) -> None:
    save = tier.save

    def wrapped(keys: Any, buffers: Any, cls: SaveClass, deadline: float, **more: Any) -> Any:
        noted.append((tier.name, cls))
        return save(keys, buffers, cls, deadline, **more)

    tier.save = wrapped  # type: ignore[method-assign]


@pytest.mark.paged
def test_r5_a_look_up_that_never_answers_ends_its_relay() -> None:
    """R5, A2: at the tier's own deadline; the late lease is given back."""
    policies = {"disk": TierPolicy(write="back", save_deadline_s=3.0)}
    with back("disk", policies=policies) as s:
        s.tiers[0].holding.add("lookup")
        s.store.retire(s.compute(TOKENS))
        s.loop.advance(4.0)
        assert counters(s)["pages_not_relayed_expired_disk"] == 4
        assert s.store.gauges()["relays"] == 0
        s.tiers[0].open("lookup")


@pytest.mark.paged
def test_a_relay_waits_for_the_loads_before_it() -> None:
    """Restores go first: a relay begins when they have ended, or after a while."""
    with back("disk") as s:
        other = prompt(2, seed=5)
        s.stored(other)
        s.tiers[0].holding.add("load")

        async def scenario() -> None:
            task = asyncio.ensure_future(s.resolve(other))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            before = s.tiers[0].count("lookup")
            s.store.retire(s.compute(TOKENS))
            assert s.tiers[0].count("lookup") == before
            s.tiers[0].open("load")
            (await task).release()
            assert s.tiers[0].count("lookup") == before + 1

        s.loop.run(scenario())


def test_i7_relayed_pages_are_told() -> None:
    """I7: a tier that is written back tells what it has when it has it."""
    events = TierEvents()
    with back("disk", events=events) as s:
        s.store.retire(s.compute(TOKENS))
        told = [event for _, event in s.store.take_events() if isinstance(event, Stored)]
        assert [(event.medium, len(event.keys)) for event in told] == [("dram", 4), ("disk", 4)]
        assert np.array_equal(told[0].token_ids, told[1].token_ids)


def test_promotion_goes_through_the_tier_above() -> None:
    """What comes from the far tier is saved to DRAM, and relayed to the disk."""
    with setup(tiers=3, options=StoreOptions(tiers={"disk": BACK})) as s:
        s.store.retire(s.compute(TOKENS))
        assert only(s, 2) == {"far": 4 * PAGE}
        assert only(s, 1) == {"disk": 4 * PAGE}


@pytest.mark.paged
@pytest.mark.parametrize("tp", [1, 2])
def test_e3_all_shards_of_a_page_are_relayed(tp: int) -> None:
    """E3: with several workers a page is there below when every shard is."""
    with back("disk", tp=tp, max_tp=2) as s:
        s.store.retire(s.compute(TOKENS))
        assert counters(s)["pages_relayed_disk"] == 4
        assert only(s, 1) == {"disk": 4 * PAGE}


@pytest.mark.paged
def test_records_of_several_pages_are_relayed_whole() -> None:
    """Marks are on the last page of a record; counters are of pages."""
    with back("disk", "far", model=model_of(key_tokens=2 * PAGE)) as s:
        assert s.store.retire(s.compute(TOKENS)).value.saved == 4
        assert counters(s)["pages_to_relay_far"] == counters(s)["pages_relayed_far"] == 4
        lose(s, s.tiers[1])
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        assert only(s, 1) == {"disk": 4 * PAGE}
