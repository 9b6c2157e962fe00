"""Policies of single tiers: what is refused, limits in bytes and in time, promotion (A20, C5, H7, H10)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from bench_store import PAGE, HeldTier, model_of, prompt, setup
from test_relay import lose
from test_store import rank_of

from kvcontract import FleetSecret, KvStore, StoreOptions, TierPolicy, WeightIdentity
from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane
from kvcontract.tiers.base import SaveClass
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.dram import DramTier
from kvcontract.tiers.shared import SharedTier

TOKENS = prompt(4)
NAMED = model_of(weights=WeightIdentity(kind="digest", value="abc"))


def options(**policies: TierPolicy) -> StoreOptions:
    """Policies by name."""
    return StoreOptions(tiers=policies)


# What is refused


def test_h10_all_faults_of_policies_and_tiers_are_told_at_once() -> None:
    """H10, I3: unknown names, values out of range, write-back below nothing, unnamed weights: one fault."""
    given = {
        "dram": TierPolicy(write="back"),
        "dsk": TierPolicy(),
        "disk": TierPolicy(write="later", most_saving_bytes=8, load_deadline_s=0, save_deadline_s=-1.0),  # type: ignore[arg-type]
    }
    tiers = [HeldTier(time.monotonic), HeldTier(time.monotonic, "disk", persistent=True)]
    with pytest.raises(UsageFault) as caught:
        KvStore(model_of(), [rank_of()], tiers, options=StoreOptions(tiers=given))
    text = str(caught.value)
    for part in (
        "tier 'dram' is written back, and no tier is above it",
        "a policy for tier 'dsk', which there is not; did you mean 'disk'?",
        "write 'later': expected through or back",
        "load_deadline_s 0: expected seconds above 0",
        "save_deadline_s -1.0: expected seconds above 0",
        "most_saving_bytes 8 is less than one record",
        "KVC-OFFLOAD-05",
    ):
        assert part in text, part


@pytest.mark.paged
def test_h7_a_tier_that_no_record_fits_into_is_left_alone() -> None:
    """H7: the others serve; what would be copied from it comes from the one above, or the device."""
    small = DramTier(64, lane=InlineLane(), name="small")
    for order in (0, 1):
        tiers = [DramTier(1 << 20, lane=InlineLane()), HeldTier(time.monotonic, "disk")]
        tiers.insert(order, small)
        policy = {"disk": TierPolicy(write="back")}
        with KvStore(model_of(), [rank_of()], tiers, options=StoreOptions(tiers=policy)) as store:
            assert store.too_small_tiers == ("small",)
            assert "small" in store.tier_stats()


# Bytes


@pytest.mark.paged
def test_c5_a_tier_takes_no_more_bytes_at_a_time_than_its_limit() -> None:
    """C5: the rest is shed for that tier alone, counted, and saved when there is room again."""
    with setup(tiers=2, options=options(disk=TierPolicy(most_saving_bytes=400))) as s:
        s.tiers[1].holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        assert s.tiers[0].asked == [("save", 4)]
        assert s.tiers[1].asked == [("save", 2)]
        assert s.store.gauges()["shed"] == 1
        s.tiers[1].open("save")
        assert report.value.failed == {"shed": 2}
        assert s.tiers[1].asked == [("save", 2), ("save", 2)]
        assert s.store.stats().counters["pages_not_saved_shed"] == 2
        assert s.tiers[1].inner.stats()["records"] == 4


@pytest.mark.paged
def test_c5_what_is_shed_is_tried_once_however_often_it_fails() -> None:
    """C5, R5: a tier that fails everything does not make the line go round for ever."""
    with setup(tiers=2, options=options(disk=TierPolicy(most_saving_bytes=176))) as s:
        s.tiers[0].codes["save"] = s.tiers[1].codes["save"] = lambda codes: codes + 9
        s.store.retire(s.compute(TOKENS))
        assert s.tiers[0].count("save") == 2
        assert s.tiers[1].count("save") == 5


def answer_all(tier: HeldTier) -> None:
    """What the tier holds back now is answered; what comes of it is held back again."""
    held = list(tier._held)
    tier._held.clear()
    for _, answer in held:
        answer()


@pytest.mark.paged
def test_c4_who_waits_for_room_does_not_ask_for_the_same_try_again_and_again() -> None:
    """C4, R5: what is in flight while others wait is tried once more if it fails, not once for each look."""
    with setup(options=options(dram=TierPolicy(most_saving_bytes=176))) as s:
        s.stored(TOKENS[: 2 * PAGE + 1])
        req = s.compute(TOKENS, s.loop.run(s.resolve(TOKENS)))
        s.tier.codes["save"] = lambda codes: codes + 9
        s.tier.holding.add("save")
        s.store.seal(req)  # the third page is under way
        lose(s, s.tier)
        s.store.retire(req)  # the first two are to be saved anew, and wait for it
        before = s.tier.count("save")
        for _ in range(30):
            answer_all(s.tier)
        assert s.tier.count("save") - before == 1 + 3
        s.tier.open("save")


@pytest.mark.paged
def test_c4_a_limit_leaves_nothing_out_of_what_is_tried_again() -> None:
    """C4: what failed as its request was retired is tried once more, all of it: nobody else would."""
    with setup(options=options(dram=TierPolicy(most_saving_bytes=176))) as s:
        told = iter((9, 9, 0, 0))  # of each save, what is kept and what is said of it
        s.tier.codes["save"] = lambda codes: codes + next(told)
        s.tier.holding.add("save")
        req = s.compute(TOKENS)
        s.store.seal(req, SaveClass.HANDOFF, handoff="h")
        s.store.retire(req)
        answer_all(s.tier)
        s.tier.open("save")
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        assert prefix.hit_tokens == 4 * PAGE
        s.check_content(TOKENS, prefix)
        prefix.release()
        s.store.release_handoff("h")


# Time


@pytest.mark.paged
def test_a20_a_tier_has_its_own_time_and_the_next_is_asked() -> None:
    """A1, A20: a look-up ends at the tier's limit, not at the resolve's deadline."""
    with setup(tiers=2, options=options(dram=TierPolicy(load_deadline_s=0.5))) as s:
        s.stored(TOKENS)
        s.tiers[0].holding.add("lookup")
        begun = s.loop.time()
        prefix = s.loop.run(s.resolve(TOKENS, deadline_s=15.0))
        assert dict(prefix.sources) == {"disk": 4 * PAGE}
        assert s.loop.time() - begun < 1.5  # asked a second time after the other had something
        s.check_content(TOKENS, prefix)
        prefix.release()
        s.tiers[0].open("lookup")


@pytest.mark.paged
def test_a3_a_load_that_takes_too_long_gives_way_to_another_tier() -> None:
    """A3, A16, A20: pages stay with the slow load until it settles; its tier is not asked for them again."""
    with setup(tiers=2, options=options(dram=TierPolicy(load_deadline_s=0.5))) as s:
        s.stored(TOKENS)
        s.tiers[0].holding.add("load")

        async def scenario() -> None:
            first = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=15.0))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(s.resolve(TOKENS, deadline_s=15.0))
            for task in (first, second):
                prefix = await task
                assert dict(prefix.sources).keys() <= {"disk", "device"}
                assert prefix.hit_tokens == 4 * PAGE
                s.check_content(TOKENS, prefix)
                prefix.release()
            assert s.loop.time() < 2.0

        s.loop.run(scenario())
        assert s.tiers[0].count("load") == s.tiers[1].count("load") == 1
        assert s.store.gauges()["loads"] == 1
        s.tiers[0].open("load")


# Promotion


def test_a_tier_may_be_left_out_of_promotion() -> None:
    """What comes from below is saved only to the tiers that want it."""
    with setup(tiers=3, options=options(dram=TierPolicy(promote=False))) as s:
        s.stored(TOKENS)
        for tier in s.tiers[:2]:
            lose(s, tier)
        before = [tier.count("save") for tier in s.tiers]
        s.loop.run(s.resolve(TOKENS)).release()
        given = [tier.count("save") - old for tier, old in zip(s.tiers, before, strict=True)]
        assert given == [0, 1 + len(list(s.pool.sides)), 0]


# The fleet's secret


def disk(path: Path) -> DiskTier:
    """A small one."""
    return DiskTier(path, 1 << 22)


def store_of(*tiers: Any, secret: FleetSecret | None = None) -> KvStore:
    """A store over lasting tiers."""
    return KvStore(NAMED, [rank_of()], tiers, secret=secret)


def test_a_store_takes_the_secret_that_its_tiers_keep(tmp_path: Path) -> None:
    """Made at the first opening, and the same ever after; both directories have it."""
    ids = []
    for _ in range(2):
        tiers = disk(tmp_path / "disk"), SharedTier(tmp_path / "shared", 1 << 22)
        with store_of(*tiers) as store:
            ids.append(store.keyer.secret_id)
            assert {tier.kept_secret().id for tier in tiers} == {ids[0]}
    assert len(set(ids)) == 1


def test_a_given_secret_is_kept_and_must_be_theirs(tmp_path: Path) -> None:
    """A fresh directory keeps it; another one is refused by the ids, and shows neither."""
    mine, other = FleetSecret(b"m" * 32), FleetSecret(b"o" * 32)
    with store_of(disk(tmp_path), secret=mine) as store:
        assert store.keyer.secret_id == mine.id
    tier = disk(tmp_path)
    with pytest.raises(UsageFault) as caught:
        store_of(tier, secret=other)
    assert f"given is {other.id}, tier 'disk' keeps {mine.id}" in str(caught.value)
    assert "mmmm" not in str(caught.value)
    with store_of(tier) as store:
        assert store.keyer.secret_id == mine.id


def test_tiers_that_keep_different_secrets_are_refused_together(tmp_path: Path) -> None:
    """Records of one would never be found with the other's keys."""
    for name in ("disk", "shared"):
        tier = disk(tmp_path / name) if name == "disk" else SharedTier(tmp_path / name, 1 << 22)
        store_of(tier).close()
    tiers = disk(tmp_path / "disk"), SharedTier(tmp_path / "shared", 1 << 22)
    with pytest.raises(
        UsageFault, match=r"the fleet's secrets differ: tier 'disk' keeps .*, tier 'shared' keeps"
    ):
        store_of(*tiers)
    for tier in tiers:
        tier.close(time.monotonic() + 10)


def test_a_store_that_is_refused_leaves_no_secret_behind(tmp_path: Path) -> None:
    """A directory gets its secret with the first store that is really made over it."""
    tier = disk(tmp_path)
    with pytest.raises(UsageFault):
        KvStore(NAMED, [], [tier])
    assert tier.kept_secret() is None
    tier.close(time.monotonic() + 10)
