"""What a store does for parts beside full pages where requests, tiers and handoffs do not go straight on."""

from __future__ import annotations

from typing import Any

import numpy as np
from bench_store import PAGE, SCOPE, Setup, deny, prompt, setup

from kvcontract.pool.request import RequestKv
from kvcontract.store.core import StoreOptions
from kvcontract.store.policy import KvPrefix
from kvcontract.store.tier_policy import TierPolicy
from kvcontract.tiers.base import Lease, SaveClass

KINDS = ("windowed", "hybrid")
"""What the tests here run with."""

TOKENS = prompt(6)


def release(prefix: KvPrefix) -> None:
    """Give it back."""
    if prefix.hold is not None:
        prefix.hold.release()


def step(s: Setup, req: RequestKv) -> None:
    """One step to the next checkpoint, taken."""
    chunk = req.schedule_prefill(99)
    for space, pairs in chunk.copies.items():
        s.memory[0][space].copy_blocks(pairs)
    s.write(TOKENS, chunk)
    req.apply_prefill(chunk, 5 if chunk.emits else None)
    s.store.checkpoint(req)


def test_a20_a_tiers_own_limit_holds_when_it_is_asked_for_states() -> None:
    """A20, R5: a tier that does not answer is given its own time, not all that the resolve has."""
    with setup(options=StoreOptions(tiers={"dram": TierPolicy(load_deadline_s=0.5)})) as s:
        s.stored(TOKENS)
        s.tier.holding.add("lookup")
        begun = s.loop.time()
        prefix = s.loop.run(s.resolve(TOKENS, deadline_s=10.0))
        assert prefix.hit_tokens == 0
        assert s.loop.time() - begun <= 5 * 0.5
        s.tier.open("lookup")


def test_a17_states_that_came_while_a_tier_was_asked_are_not_loaded() -> None:
    """A17: the device is asked again before a load begins."""
    with setup() as s:
        s.stored(TOKENS)
        sides, asked = len(list(s.pool.sides)), 0

        def answer(lease: Lease) -> Lease:
            nonlocal asked
            asked += 1
            if asked == sides + 2:  # after what there is of each, and the full pages: where states are
                s.store.retire(s.compute(TOKENS))
            return lease

        s.tier.answer = answer
        loads = s.tier.count("load")
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert (prefix.hit_tokens, asked) == (6 * PAGE, sides + 2)
        assert s.tier.count("load") == loads + 1  # the full pages
        release(prefix)


def test_r6_room_for_what_is_missing_is_not_made_of_what_is_there() -> None:
    """R2, R6: blocks that the same boundary needs are held while the others are loaded."""
    tokens = TOKENS[: 5 * PAGE + 1]
    with setup() as s:
        s.stored(tokens)
        s.store.retire(s.compute(tokens))
        side = s.pool.sides.windows[0]
        first, *others = s.store.keyer.chain(tokens[:-1], SCOPE)[side.needed(5)]
        side.index.forget(first[None])
        full = side.index.reserve(side.index.gauges().free)
        side.index.demote(np.array(others))  # the next to be evicted
        prefix = s.loop.run(s.resolve(tokens))
        s.check_content(tokens, prefix)
        assert prefix.hit_tokens == 5 * PAGE
        release(prefix)
        full.release()


def test_c7_a_handoff_may_be_sealed_again_when_its_request_has_gone_on() -> None:
    """C7: what counts of its states is the latest checkpoint; nothing is refused, and all of it is stored."""
    with setup() as s:
        tokens = TOKENS[: 5 * PAGE + 1]
        req = s.admit(tokens)
        reports = []
        while req.prefilling:
            step(s, req)
            reports.append(s.store.seal(req, SaveClass.HANDOFF, handoff="a").value)
        assert all(report.saved == report.pages for report in reports)
        s.store.retire(req, SaveClass.HANDOFF, handoff="a")
        told: Any = s.loop.run(s.store.aflush_handoff("a"))
        assert told.confirmed
        needed = sum(len(side.needed(5)) for side in s.pool.sides)
        assert told.pages == 5 + needed
        s.evict()
        prefix = s.loop.run(s.resolve(tokens))
        s.check_content(tokens, prefix)
        assert prefix.hit_tokens == 5 * PAGE
        release(prefix)
        s.store.release_handoff("a")


def test_f6_a_preempted_request_takes_checkpoints_before_where_it_had_begun() -> None:
    """B20, F6: it is resumed with nothing, and its checkpoints lie where nothing is named yet."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        prefix = s.loop.run(s.resolve(TOKENS[: 4 * PAGE + 1]))
        assert prefix.hit_tokens == 4 * PAGE
        req = s.admit(TOKENS, prefix)
        req.preempt()
        s.evict()
        assert req.resume() is None
        assert req.committed_tokens == 0
        while req.prefilling:
            step(s, req)
        assert s.store.stats().counters["checkpoints_taken"] >= 12
        s.store.retire(req)


def test_r2_states_may_be_pieced_together_from_several_tiers() -> None:
    """R2: along whichever tier: one has shard 0 of a state, the other shard 1."""
    with setup(tp=2, tiers=2) as s:
        s.stored(TOKENS)
        for number, tier in enumerate(s.tiers):
            deny(tier, lambda keys, number=number: (keys["part"] > 0) & (keys["shard"] != number))
        before = [tier.count("load") for tier in s.tiers]
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 6 * PAGE
        assert all(tier.count("load") > old for tier, old in zip(s.tiers, before, strict=True))
        release(prefix)


def test_r2_half_a_state_in_two_tiers_is_no_state() -> None:
    """R2: never OR: both have shard 0, none has shard 1."""
    with setup(tp=2, tiers=2) as s:
        s.stored(TOKENS)
        for tier in s.tiers:
            deny(tier, lambda keys: (keys["part"] > 0) & (keys["shard"] == 1))
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0


def test_what_a_lower_tier_gives_is_saved_to_those_above_it() -> None:
    """States as well as full pages; the lower tier has them, and is not given them again (C3)."""
    with setup(tiers=2) as s:
        s.stored(TOKENS)
        s.lose(s.tiers[0], TOKENS)
        below = s.tiers[1].count("save")
        release(s.loop.run(s.resolve(TOKENS)))
        assert s.tiers[1].count("save") == below
        s.evict()
        asked = s.tiers[1].count("load")
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 6 * PAGE
        assert s.tiers[1].count("load") == asked
        release(prefix)


def test_i6_what_is_loaded_beside_full_pages_is_counted_by_its_tier() -> None:
    """I6: blocks and bytes, in the same figures as full pages."""
    with setup() as s:
        s.stored(TOKENS)
        release(s.loop.run(s.resolve(TOKENS)))
        stats = s.store.stats()
        needed = sum(len(side.needed(6)) for side in s.pool.sides)
        assert stats.counters["blocks_loaded_dram"] == needed
        assert stats.moved["dram"]["load"].pages == 6 + needed
