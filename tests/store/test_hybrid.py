"""State beside full pages, through a store: taken, published, saved, restored, and what failures become."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import bench_store
import numpy as np
import pytest
from bench_store import BLOCKS, PAGE, SCOPE, Setup, prompt, setup

from kvcontract import BlockPool, FleetSecret, KvStore, Rank, WeightIdentity
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.request import RequestKv, admit
from kvcontract.pool.sides import make_sides
from kvcontract.store import snapshots
from kvcontract.store.policy import KvPrefix
from kvcontract.tiers.base import Code, Codes
from kvcontract.tiers.disk import DiskTier

KINDS = ("windowed", "hybrid")
"""What the tests here run with."""

TOKENS = prompt(6)


@pytest.fixture
def kind(model_kind: str) -> str:
    """What the models keep."""
    return model_kind


def hit(s: Setup, tokens: list[int] = TOKENS, **policy: Any) -> int:
    """Resolve, compare every block that the hit holds in every space, give it back."""
    prefix = s.loop.run(s.resolve(tokens, **policy))
    if prefix.hit_tokens:
        s.check_content(tokens, prefix)
    found = prefix.hit_tokens
    release(prefix)
    return found


def release(prefix: KvPrefix) -> None:
    """Give it back."""
    if prefix.hold is not None:
        prefix.hold.release()


def keys_of(s: Setup, tokens: list[int] = TOKENS) -> np.ndarray:
    """Of its pages."""
    return s.store.keyer.chain(tokens[: len(tokens) // PAGE * PAGE], SCOPE)


def slabs(s: Setup) -> list[Any]:
    """Pools of snapshots."""
    return [side.pool for side in s.pool.sides.slots]


# Restores


def test_e5_a_restored_prefix_is_whole_in_every_space() -> None:
    """R2, E5: pages, exactly the window's pages, and the snapshot of that very boundary come back."""
    with setup() as s:
        s.stored(TOKENS)
        assert hit(s) == 6 * PAGE


def test_f5_a_hit_is_cut_to_where_the_state_is() -> None:
    """F5, R2: full pages reach further; the surplus is let go, and told where a checkpoint would help."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        for side in s.pool.sides:
            side.pool.forget(keys_of(s)[4:])
        s.tier.inner.reset(1e9)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert (prefix.hit_tokens, prefix.branches) == (4 * PAGE, (6 * PAGE,))
        assert s.pool.gauges().held == 4
        release(prefix)


def test_r2_parts_of_one_boundary_may_come_from_different_places() -> None:
    """R2: pages from the device, the rest from a tier."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        for side in s.pool.sides:
            side.pool.forget(keys_of(s))
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert (prefix.hit_tokens, dict(prefix.sources)) == (6 * PAGE, {"device": 6 * PAGE})
        release(prefix)


def test_r4_state_that_does_not_come_rewinds_to_the_next_lower_boundary() -> None:
    """R4, F5: a part that fails at one boundary is a shorter hit, never wrong content, and is counted."""
    with setup() as s:
        s.stored(TOKENS)
        loads = []

        def fail_first(codes: Codes) -> Codes:
            loads.append(len(codes))
            return np.full(len(codes), Code.FAILED, np.uint8) if len(loads) == 2 else codes

        s.tier.codes["load"] = fail_first  # the first is of the pages
        found = hit(s)
        assert 0 < found < 6 * PAGE
        s.tier.codes.clear()
        assert hit(s) == 6 * PAGE


def test_e7_damaged_state_is_never_served() -> None:
    """E7: what a tier gives back damaged is a miss, whatever part it is of."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.codes["load"] = lambda codes: np.full(len(codes), Code.CORRUPT, np.uint8)
        assert hit(s) == 0
        s.tier.codes.clear()


def test_a16_one_load_serves_all_who_want_the_same_state() -> None:
    """A16: two resolves of one cold prefix load each block once."""
    with setup() as s:
        s.stored(TOKENS)
        before = s.tier.count("load")
        alone = hit(s)
        once = s.tier.count("load") - before
        s.evict()

        async def both() -> list[KvPrefix]:
            return list(await asyncio.gather(s.resolve(TOKENS), s.resolve(TOKENS)))

        before = s.tier.count("load")
        found = s.loop.run(both())
        assert [prefix.hit_tokens for prefix in found] == [alone, alone]
        assert s.tier.count("load") - before == once
        for prefix in found:
            s.check_content(TOKENS, prefix)
            release(prefix)


def test_a3_a4_state_that_lands_late_is_found_by_the_next() -> None:
    """A3, A4: only the wait is abandoned."""
    with setup() as s:
        s.stored(TOKENS)
        assert hit(s) == 6 * PAGE
        for side in s.pool.sides:
            side.pool.forget(keys_of(s))
        s.tier.holding.add("load")
        assert hit(s, deadline_s=1.0) == 0
        assert s.store.stats().counters["loads_abandoned"] == 1
        s.tier.open("load")
        loads = s.tier.count("load")
        assert hit(s) == 6 * PAGE
        assert s.tier.count("load") == loads


def test_a11_a_cancelled_resolve_gives_everything_back() -> None:
    """A11: in whatever it was waiting."""
    for verb in ("lookup", "load"):
        with setup() as s:
            s.stored(TOKENS)
            s.tier.holding.add(verb)

            async def cancelled(s: Setup = s) -> None:
                task = asyncio.ensure_future(s.resolve(TOKENS))
                await asyncio.sleep(0.5)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            s.loop.run(cancelled())
            s.tier.open(verb)
            assert hit(s) == 6 * PAGE


def test_c3_what_came_back_is_not_saved_again() -> None:
    """C3: the tier that gave state has it."""
    with setup() as s:
        s.stored(TOKENS)
        prefix = s.loop.run(s.resolve(TOKENS))
        saves = s.tier.count("save")
        req = s.compute(TOKENS, prefix)
        assert s.store.retire(req).value.pages == 0
        assert s.tier.count("save") == saves


def test_c4_state_that_was_not_saved_is_tried_again_at_retire() -> None:
    """C4: a failed save heals when its request ends."""
    with setup() as s:
        req = s.compute(TOKENS)
        s.tier.codes["save"] = lambda codes: np.full(len(codes), Code.FULL, np.uint8)
        assert s.store.seal(req).value.saved == 0
        s.tier.codes.clear()
        report = s.store.retire(req).value
        assert (report.saved, report.failed) == (report.pages, {})
        s.evict()
        assert hit(s) == 6 * PAGE


def test_c11_a_reset_forgets_state_everywhere() -> None:
    """C11: devices and tiers, in every space."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        assert s.loop.run(s.store.areset()).done
        assert hit(s) == 0
        assert [side.pool.cached for side in s.pool.sides] == [0] * len(list(s.pool.sides))


def test_c8_barriers_cover_state() -> None:
    """C8: visible means that the next engine finds all of it."""
    with setup() as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(TOKENS))

        async def waits() -> bool:
            barrier = asyncio.ensure_future(s.store.flush_saves("visible", 5.0))
            await asyncio.sleep(1.0)
            assert not barrier.done()
            s.tier.open("save")
            return await barrier

        assert s.loop.run(waits())


def test_r7_state_survives_a_restart(tmp_path: Path) -> None:
    """R7, D6: a store that is opened again over the same directory continues from the same boundary."""
    model = bench_store.model_of(weights=WeightIdentity(kind="digest", value="0" * 32))
    found = []
    for life in range(2):
        blocks = {space.key: BLOCKS for space in layout(model).spaces}
        pool = BlockPool(BLOCKS, PAGE, sides=make_sides(model, blocks, 64))
        memory = {
            space.key: Binding.allocate(space, blocks=blocks[space.key]) for space in layout(model).spaces
        }
        with KvStore(
            model,
            [Rank(pool, memory)],
            [DiskTier(tmp_path / "store", 1 << 24)],
            secret=FleetSecret(b"s" * 32),
        ) as store:
            prefix = store.resolve("0", TOKENS, SCOPE)
            found.append(prefix.hit_tokens)
            release(prefix)
            if life == 0:
                s = Standing(pool, store, memory, model)
                store.retire(s.compute(TOKENS)).wait(10.0)
                assert store.flush("durable")
    assert found == [0, 6 * PAGE]


class Standing(Setup):
    """Helpers over a store that was made elsewhere."""

    def __init__(self, pool: BlockPool, store: KvStore, memory: dict[str, Binding], model: Any) -> None:
        self.pool, self.store, self.model = pool, store, model
        self.memory, self.bindings = [memory], [memory["full"]]


# Snapshots


def test_f2_a_snapshot_is_found_at_the_boundary_it_was_taken_at_alone(kind: str) -> None:
    """F2: stops in the middle of the prompt; each boundary has its own state, others have none."""
    with setup() as s:
        answer = admit(
            s.pool,
            prompt_tokens=TOKENS,
            max_new_tokens=1,
            keyer=s.store.keyer,
            scope=SCOPE,
            checkpoints=Checkpoints(PAGE, (2 * PAGE, 5 * PAGE)),
        )
        assert isinstance(answer, RequestKv)
        while answer.prefilling:
            chunk = answer.schedule_prefill(99)
            s.write(TOKENS, chunk)
            answer.apply_prefill(chunk, 5 if chunk.emits else None)
            s.store.checkpoint(answer)
        s.store.retire(answer)
        if kind == "hybrid":
            assert slabs(s)[0].present(keys_of(s)).tolist() == [False, True, False, False, True, False]
        s.evict()
        for length, deepest in ((6, 5), (4, 2), (3, 2), (2, 0)):
            found = hit(s, TOKENS[: length * PAGE])
            assert found == deepest * PAGE if kind == "hybrid" else found >= deepest * PAGE


def test_f1_f3_a_copy_that_fails_publishes_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """F3: nothing is found, nothing stays taken, and the request goes on."""
    if kind == "windowed":
        pytest.skip("nothing is copied")
    with setup() as s:

        def broken(*_: Any) -> None:
            raise RuntimeError("the copy failed")

        told: list[BaseException] = []
        monkeypatch.setattr(snapshots, "take_snapshots", broken)
        monkeypatch.setattr(snapshots, "report_uncaught", told.append)
        req = s.compute(TOKENS)
        monkeypatch.undo()
        assert len(told) == s.store.stats().counters["checkpoints_failed"] == 6
        assert slabs(s)[0].cached == 0
        s.store.retire(req)
        s.evict()
        assert hit(s) == 0


def test_f6_without_room_the_request_goes_on_without_a_checkpoint(kind: str) -> None:
    """F6: a soft miss, counted; nothing is refused."""
    if kind == "windowed":
        pytest.skip("pages need no copy")
    with setup() as s:
        slab = slabs(s)[0]
        kept = slab.reserve(slab.gauges().budget - 1)
        req = s.compute(TOKENS)
        assert s.store.stats().counters["checkpoints_without_room"] == 6
        kept.release()
        s.store.retire(req)
        assert hit(s) == 0


def test_f7_several_workers_have_all_of_it_or_none() -> None:
    """F7, E3: cut over two workers, a boundary whose state one of them lacks is no hit."""
    with setup(tp=2) as s:
        s.stored(TOKENS)
        assert hit(s) == 6 * PAGE


def test_a_pinned_prompt_keeps_its_state_and_leaves_room_for_a_request() -> None:
    """A pin holds what a hit needs in every pool; one that would leave a request no slot is refused."""
    with setup(pin_budget=1.0, scope_pin_quota=1.0) as s:
        s.store.retire(s.compute(TOKENS))
        pin = s.store.pin("0", TOKENS, SCOPE)
        assert pin.tokens == 6 * PAGE
        s.pool.set_retention(False)
        s.pool.set_retention(True)
        s.tier.inner.reset(1e9)
        assert hit(s) == 6 * PAGE
        assert s.store.unpin(pin)
        side = next(iter(s.pool.sides)).pool
        kept = side.reserve(side.gauges().budget)
        assert s.store.pin("0", TOKENS, SCOPE).tokens == 0
        kept.release()


def test_h7_f8_a_rank_without_the_other_pools_is_refused() -> None:
    """A26, F8: what could never hit is refused when the store is made, with what is missing."""
    model = bench_store.model_of()
    with setup() as s, pytest.raises(UsageFault, match="no pool for"):
        KvStore(model, [Rank(BlockPool(8, PAGE), s.memory[0])], loop=s.loop)


# What a review found


def test_c3_a_hole_in_the_tiers_heals_from_where_a_request_began() -> None:
    """C3: state that a tier could not take is saved when a request that began there ends."""
    with setup() as s:
        s.tier.codes["save"] = lambda codes: np.full(len(codes), Code.FULL, np.uint8)
        s.store.retire(s.compute(TOKENS))
        s.tier.codes.clear()
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        s.evict()
        assert hit(s) == 6 * PAGE


def test_a16_who_joins_a_resolve_that_gives_up_is_not_cut_short() -> None:
    """A16, A14: the leader is cancelled in the middle; the follower brings the rest itself."""
    with setup() as s:
        s.stored(TOKENS)

        async def scenario() -> KvPrefix:
            s.tier.holding.add("lookup")
            leader = asyncio.ensure_future(s.resolve(TOKENS))
            await asyncio.sleep(0.1)
            follower = asyncio.ensure_future(s.resolve(TOKENS))
            await asyncio.sleep(0.1)
            leader.cancel()
            s.tier.open("lookup")
            return await follower

        prefix = s.loop.run(scenario())
        assert prefix.hit_tokens == 6 * PAGE
        s.check_content(TOKENS, prefix)
        release(prefix)


def test_f3_b23_a_branch_that_has_not_copied_publishes_nothing(kind: str) -> None:
    """F3, B23: a branch is retired before its state is copied: what lies in its slot is nobody's."""
    if kind == "windowed":
        pytest.skip("nothing is copied")
    with setup() as s:
        req = s.admit(TOKENS, new=8)
        while req.prefilling:
            chunk = req.schedule_prefill(99)
            s.write(TOKENS, chunk)
            req.apply_prefill(chunk, 5 if chunk.emits else None)
        branch = req.fork()
        assert isinstance(branch, RequestKv)
        with pytest.raises(UsageFault, match="a branch has not copied its state yet"):
            req.schedule_decode()
        s.store.retire(branch)
        assert slabs(s)[0].cached == 0
        req.apply_decode(req.schedule_decode(), 5)
        s.store.retire(req)
        s.evict()
        assert hit(s) == 0


def test_b20_after_a_preemption_checkpoints_are_taken_anew() -> None:
    """B20: what was evicted meanwhile is recomputed, and can be gone on from again."""
    with setup() as s:
        req = s.admit(TOKENS, new=2)

        def prefill() -> None:
            while req.prefilling:
                chunk = req.schedule_prefill(99)
                for space, pairs in chunk.copies.items():
                    s.memory[0][space].copy_blocks(pairs)
                s.write([*TOKENS, 5, 5], chunk)
                req.apply_prefill(chunk, 5 if chunk.emits else None)
                s.store.checkpoint(req)

        prefill()
        s.store.seal(req)
        req.preempt()
        s.evict()
        s.tier.inner.reset(1e9)
        assert req.resume() is None
        assert req.committed_tokens == 0
        prefill()
        s.store.retire(req)
        s.evict()
        assert hit(s) == 6 * PAGE


def test_r6_without_room_beside_a_long_prompt_is_given_up_at_once() -> None:
    """R6, A22: thousands of boundaries are not tried one by one, and the reason is told once."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        kept = [side.index.reserve(side.index.gauges().budget) for side in s.pool.sides]
        prefix = s.loop.run(s.resolve(TOKENS))
        assert prefix.hit_tokens == 0
        assert len(prefix.degraded) <= 3
        for reservation in kept:
            assert reservation is not None
            reservation.release()


def test_b2_what_no_space_is_called_is_refused() -> None:
    """A misspelt space would leave the real one at its default."""
    model = bench_store.model_of()
    blocks = {space.key: BLOCKS for space in layout(model).spaces}
    with pytest.raises(UsageFault, match="there is no such space; spaces: full"):
        make_sides(model, {**blocks, "slots-misspelt": 5}, 64)


def test_c5_state_that_was_shed_is_saved_when_pins_come_back() -> None:
    """C5: three requests retire beside a slow tier; what was over budget follows, and barriers wait."""
    prompts = [prompt(6, seed=seed) for seed in range(3)]
    with setup(save_budget=0.05, pages=64) as s:
        s.tier.holding.add("save")
        for each in prompts:
            s.store.retire(s.compute(each))
        assert s.store.gauges()["shed"] > 0

        async def landed() -> bool:
            barrier = asyncio.ensure_future(s.store.flush_saves("visible", 30.0))
            await asyncio.sleep(0.1)
            s.tier.open("save")
            return await barrier

        assert s.loop.run(landed())
        assert s.store.gauges()["shed"] == 0
        s.evict()
        assert [hit(s, each) for each in prompts] == [6 * PAGE] * 3


def test_c5_what_was_shed_of_state_is_told() -> None:
    """C5: the report of a retire counts it, whether some of it began or nothing did."""
    prompts = [prompt(6, seed=seed) for seed in range(3)]
    with setup(save_budget=0.05, pages=600) as s:
        s.tier.holding.add("save")
        reports = [s.store.retire(s.compute(each)) for each in prompts]
        s.tier.open("save")
        for report in reports[1:]:
            told = report.value
            assert told.failed["shed"] > 0
            assert told.pages == told.saved + told.failed["shed"]


def test_c8_c5_a_barrier_covers_the_saves_of_state_that_was_shed() -> None:
    """C8, C5: they begin after it was asked for; it waits until each of them has ended."""
    prompts = [prompt(6, seed=seed) for seed in range(3)]
    with setup(save_budget=0.05, pages=600) as s:  # of full pages none is

        def shut(codes: Codes) -> Codes:
            s.tier.holding.add("save")
            return codes

        s.tier.codes["save"] = shut
        s.tier.holding.add("save")
        for each in prompts:
            s.store.retire(s.compute(each))
        assert s.store.gauges()["shed"] > 0

        async def landed() -> int:
            barrier, rounds = asyncio.ensure_future(s.store.flush_saves("landed", 30.0)), 0
            while not barrier.done():
                s.tier.open("save")
                await asyncio.sleep(1.0)  # whatever can end does
                rounds += 1
            assert await barrier
            assert (s.store.gauges()["saves"], s.store.gauges()["shed"]) == (0, 0)
            return rounds

        assert s.loop.run(landed()) > 1
