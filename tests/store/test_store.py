"""The store as a whole: what it refuses to be built with, closing, foreign loops, threads (C10, D6, H10)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from bench_store import PAGE, SCOPE, HeldTier, model_of, prompt, row, setup

from kvcontract import BlockPool, FleetSecret, KvStore, Rank, Scope, WeightIdentity, admit
from kvcontract.contract.errors import NotConformant, UsageFault
from kvcontract.contract.layout import layout
from kvcontract.core.lane import InlineLane, ThreadLane
from kvcontract.memory.binding import Binding
from kvcontract.pool.request import RequestKv
from kvcontract.store.loop import StoreLoop
from kvcontract.store.policy import PLAIN, KvPrefix
from kvcontract.tiers.base import Code
from kvcontract.tiers.dram import DramTier

TOKENS = prompt(4)
SECRET = FleetSecret(bytes(range(32)))
CALM_S = 30.0


def rank_of(pages: int = 16, tp: int = 1) -> Rank:
    """A rank over memory of its own."""
    memory = [
        {"full": Binding.allocate(layout(model_of(), number, tp).space("full"), blocks=pages)}
        for number in range(tp)
    ]
    return Rank(BlockPool(pages=pages, page_tokens=PAGE), memory)


@contextmanager
def threaded(**claims: Any) -> Iterator[tuple[KvStore, Rank, HeldTier]]:
    """A store in threads of its own; closed in the end."""
    tier, rank = HeldTier(time.monotonic, **claims), rank_of()
    with KvStore(model_of(), [rank], [tier]) as store:
        yield store, rank, tier


# What is refused


@pytest.mark.paged
@pytest.mark.parametrize("claim", ["persistent", "shared"])
def test_d6_kvc_offload_05_lasting_tiers_need_resolved_weights(claim: str) -> None:
    """D6, KVC-OFFLOAD-05: what outlives the process must name its weights, and needs the fleet's secret."""
    tier = HeldTier(time.monotonic, **{claim: True})
    with pytest.raises(NotConformant, match="KVC-OFFLOAD-05") as caught:
        KvStore(model_of(), [rank_of()], [tier], secret=SECRET)
    assert [finding.path for finding in caught.value.findings] == ["weights.kind"]
    resolved = model_of(weights=WeightIdentity(kind="digest", value="abc"))
    with pytest.raises(UsageFault, match="give the fleet's secret"):
        KvStore(resolved, [rank_of()], [tier])
    with KvStore(resolved, [rank_of()], [tier], secret=SECRET) as store:
        assert store.max_tp == 8


@pytest.mark.paged
def test_kvc_offload_05_tiers_are_served_at_any_degree() -> None:
    """KVC-OFFLOAD-05, E3: several workers with tiers are served; a degree that does not fit is refused."""
    for tp in (1, 2):
        with KvStore(model_of(), [rank_of(tp=tp)], [DramTier(1 << 20, lane=InlineLane())]) as store:
            assert store.max_tp == tp
    with pytest.raises(UsageFault, match="raise max_tp to at least 2"):
        KvStore(model_of(), [rank_of(tp=2)], [DramTier(1 << 20, lane=InlineLane())], max_tp=1)
    with pytest.raises(UsageFault, match="memory of 1 workers for tp 2; give one mapping for each"):
        Rank(BlockPool(pages=4, page_tokens=PAGE), rank_of().bindings, tp=2)


def test_h10_what_a_tier_can_do_is_checked_when_a_store_is_built() -> None:
    """H10, D3: a tier that takes no record, or cannot keep scopes apart, is refused with the figures."""
    with pytest.raises(UsageFault, match=r"at most 64 B; one record of part 'full' needs 176 B"):
        KvStore(model_of(), [rank_of()], [DramTier(64, lane=InlineLane())])
    with pytest.raises(UsageFault, match="cannot keep scopes apart"):
        KvStore(model_of(), [rank_of()], [HeldTier(time.monotonic, scopes=False)])


def test_all_faults_are_named_at_once() -> None:
    """I3: names given twice and no rank at all are told together."""
    tiers = [DramTier(1 << 20, lane=InlineLane()) for _ in range(2)]
    with pytest.raises(UsageFault, match=r"at least one rank; two tiers are named 'dram'"):
        KvStore(model_of(), [], tiers)


# Closing


@pytest.mark.paged
def test_c10_close_waits_and_then_says_what_still_runs() -> None:
    """C10: at the deadline a running save keeps its pages, and the report counts it; again: the same."""
    with setup() as s:
        s.tier.holding.add("save")
        report = s.store.retire(s.compute(TOKENS))
        closed = s.loop.run(s.store.aclose(deadline_s=10.0))
        assert s.loop.time() == pytest.approx(10.0)
        assert (closed.drained, closed.loads, closed.saves) == (False, 0, 1)
        assert s.pool.pinned_blocks == 4
        assert s.loop.run(s.store.aclose()) is closed
        s.tier.open("save")
        assert report.value.saved == 4
        s.store._close_task = None  # for the set-up's own close


def test_c10_close_drains_loads_and_saves() -> None:
    """C10: what settles before the deadline has landed and is registered."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.holding |= {"load", "save"}
        s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        s.store.retire(s.compute(prompt(2, seed=1)))
        s.loop.call_later(3.0, s.tier.open, "load")
        s.loop.call_later(5.0, s.tier.open, "save")
        assert s.loop.run(s.store.aclose()).drained
        assert s.loop.time() == pytest.approx(6.0)
        assert s.pool.cached == 6


@pytest.mark.paged
def test_c10_close_drains_what_a_retry_begins() -> None:
    """C10, C4: a save that fails while the store closes is tried again, and close waits for that too."""
    with setup() as s:
        asked = count()
        bad = np.full(4, Code.FAILED, np.uint8)
        s.tier.codes["save"] = lambda codes: bad if next(asked) < 2 else codes  # twice a save
        s.tier.holding.add("save")
        req = s.compute(TOKENS)
        s.store.seal(req)
        s.store.retire(req)

        def answer_the_first() -> None:
            s.tier._held.popleft()[1]()

        s.loop.call_later(3.0, answer_the_first)
        s.loop.call_later(5.0, s.tier.open, "save")
        assert s.loop.run(s.store.aclose()).drained
        assert s.loop.time() == pytest.approx(5.0)
        assert s.store.stats().counters["pages_saved"] == 4


@pytest.mark.parametrize("stage", ["lookup", "load", "producer"])
def test_c10_resolves_under_way_end_with_what_they_hold(stage: str) -> None:
    """C10, R5: close does not wait for a resolve's own deadline, and later ones are refused."""
    with setup() as s:
        s.stored(TOKENS)
        s.store.retire(s.compute(TOKENS[: PAGE + 1]))
        s.tier.holding.add(stage)
        tokens = [*TOKENS[: PAGE + 1], *prompt(3, seed=5)] if stage == "producer" else TOKENS

        async def scenario() -> KvPrefix:
            task = asyncio.ensure_future(s.resolve(tokens, full_hit=True))
            await asyncio.sleep(1.0)
            s.loop.call_later(1.0, s.tier.open, stage)
            assert (await s.store.aclose()).drained
            with pytest.raises(UsageFault, match="closed"):
                await s.resolve(TOKENS)
            with pytest.raises(UsageFault, match="closed"):
                await s.store.flush_saves()
            return await task

        prefix = s.loop.run(scenario())
        assert s.loop.time() <= 2.0
        assert (prefix.hit_tokens, prefix.degraded) == (PAGE, ("the store was closed",))
        prefix.release()


@pytest.mark.paged
def test_c10_a_closed_store_refuses_and_can_be_closed_again() -> None:
    """C10: resolve and flush raise; a seal is refused page by page; retire releases; close is idempotent."""
    with threaded() as (store, rank, _):
        requests = [_computed(store, rank, prompt(2, seed=seed)) for seed in range(2)]
        first = store.close()
        assert first.drained
        assert store.close() is first
        assert asyncio.run(store.aclose()) is first
        for verb in (lambda: store.resolve("0", TOKENS, SCOPE), store.flush):
            with pytest.raises(UsageFault, match="closed"):
                verb()
        with pytest.raises(UsageFault, match="closed"):
            asyncio.run(store.resolve_prefix("0", TOKENS, SCOPE))
        assert store.seal(requests[0]).value.failed == {"refused": 2}
        requests[0].release()
        assert store.retire(requests[1]).value.failed == {"refused": 2}
        assert rank.pool.gauges().held == 0


@pytest.mark.paged
def test_c10_many_threads_may_close_while_others_resolve() -> None:
    """C10: every resolve ends, with a prefix or the refusal; every close gets the one report."""
    with threaded() as (store, _, tier):
        tier.holding.add("lookup")
        ended: list[object] = []

        def resolve() -> None:
            try:
                while True:
                    ended.append(store.resolve("0", TOKENS, SCOPE).degraded)
            except UsageFault as fault:
                ended.append(str(fault))

        def close() -> None:
            ended.append(store.close())

        threads = [threading.Thread(target=target) for target in (resolve, resolve, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CALM_S)
        assert not any(thread.is_alive() for thread in threads)
        reports = [item for item in ended if not isinstance(item, str | tuple)]
        assert reports == [store.close()] * 2
        assert ended.count("the store is closed: it takes no more work") == 2
        tier.open("lookup")


def test_the_facade_does_not_block_the_loop_it_needs() -> None:
    """R5: waiting on the loop that does the work is refused, not a deadlock."""
    with setup() as s:
        for verb in (lambda: s.store.resolve("0", TOKENS), s.store.flush, s.store.close):
            with pytest.raises(UsageFault, match="would block the event loop"):
                verb()


# Foreign loops


@pytest.mark.paged
def test_a11_cancelled_on_a_foreign_loop_gives_everything_back() -> None:
    """A11: cancelling there cancels the resolve here; a late lease goes back."""
    with threaded() as (store, rank, tier):
        store.retire(_computed(store, rank, TOKENS[: PAGE + 1]))
        asked, lookup = threading.Event(), tier.lookup
        tier.lookup = lambda *args: (lookup(*args), asked.set())[0]
        tier.holding.add("lookup")

        async def scenario() -> None:
            task = asyncio.ensure_future(store.resolve_prefix("0", TOKENS, SCOPE))
            assert await asyncio.to_thread(asked.wait, CALM_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(scenario())
        tier.open("lookup")
        store.close()
        assert store.stats().counters["resolves_cancelled"] == 1
        assert (rank.pool.gauges().held, tier.stats()["leases"]) == (0, 0)


def test_a11_a_result_on_its_way_to_a_caller_who_left_is_undone() -> None:
    """A11, A6: cancelled between the result and its arrival, nothing stays taken."""
    loop, undone, sent = StoreLoop(None), [], threading.Event()

    async def work() -> str:
        loop.soon(lambda: loop.soon(sent.set))  # after the result has left
        return "prefix"

    async def scenario() -> None:
        task = asyncio.ensure_future(loop.run(work(), undone.append))
        await asyncio.sleep(0)
        assert sent.wait(CALM_S)  # blocks this loop: the result cannot arrive
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert undone == ["prefix"]
    loop.stop()


@pytest.mark.paged
def test_resolves_from_several_loops_and_threads() -> None:
    """The store's verbs work from its own façade and from any loop."""
    with threaded() as (store, rank, _):
        store.retire(_computed(store, rank, TOKENS)).wait(CALM_S)

        async def scenario() -> list[int]:
            found = [await store.resolve_prefix("0", TOKENS, SCOPE) for _ in range(2)]
            assert await store.flush_saves()
            assert await store.flush_loads()
            for prefix in found:
                prefix.release()
            return [prefix.hit_tokens for prefix in found]

        assert asyncio.run(scenario()) == [4 * PAGE] * 2
        with store.resolve("0", TOKENS, SCOPE).hold as hold:
            assert hold.hit_pages == 4
    assert rank.pool.gauges().held == 0


def test_the_prefix_without_a_store() -> None:
    """An engine without a store runs the same code on the empty prefix."""
    prefix = KvPrefix.none("0")
    prefix.release()
    assert (prefix.hit_tokens, prefix.hold, dict(prefix.sources)) == (0, None, {})
    assert (PLAIN.full_hit, PLAIN.full_pages, PLAIN.deadline_s) == (False, False, 15.0)


# Everything at once


@pytest.mark.paged
def test_r8_threads_over_a_real_dram_tier_end_with_nothing_taken() -> None:
    """R8, R3, A6, C1: engines over a tier that evicts: bytes are right, gauges end at 0."""
    lane, rank = ThreadLane("copies", workers=2), rank_of(pages=24)
    tier = DramTier(24 * 176, lane=lane)
    wrong: list[str] = []
    with KvStore(model_of(), [rank], [tier]) as store:
        engines = [threading.Thread(target=_engine, args=(store, rank, seed, wrong)) for seed in range(3)]
        for thread in engines:
            thread.start()
        for thread in engines:
            thread.join(CALM_S)
        assert store.flush()
        rank.pool.check_books()
        assert not any(store.stats().gauges.values())
        hits = store.stats().hit_tokens
        assert hits["dram"] > 0
        assert hits["device"] > 0
        stats = tier.stats()
        assert (stats["leases"], stats["operations"], stats["faults"]) == (0, 0, 0)
        assert store.close().drained
    assert wrong == []
    gauges = rank.pool.gauges()
    assert (gauges.held, gauges.pinned, gauges.entitled) == (0, 0, 0)
    assert lane.close(CALM_S)


def _engine(store: KvStore, rank: Rank, seed: int, wrong: list[str]) -> None:
    rng = np.random.default_rng(seed)
    for step in range(60):
        family, pages = int(rng.integers(5)), int(rng.integers(1, 6))
        tokens = prompt(6, seed=family)[: pages * PAGE + int(rng.integers(PAGE))]
        prefix = store.resolve("0", tokens, SCOPE)
        if prefix.hold is not None:
            wrong += _wrong_rows(rank, tokens, prefix.hold.pages.tolist())
        req = admit(
            rank.pool,
            prompt_tokens=tokens,
            max_new_tokens=1,
            keyer=store.keyer,
            scope=SCOPE,
            prefix=prefix,
        )
        if isinstance(req, RequestKv):
            _write(rank, req)
            if rng.random() < 0.5:
                store.seal(req)
            wrong += _wrong_rows(rank, tokens, req.pages.tolist()[: len(tokens) // PAGE])
            store.retire(req)
        else:
            prefix.release()
        if step % 8 == 7:
            rank.pool.set_retention(False)
            rank.pool.set_retention(True)


def _computed(store: KvStore, rank: Rank, tokens: list[int]) -> RequestKv:
    req = admit(rank.pool, prompt_tokens=tokens, max_new_tokens=1, keyer=store.keyer, scope=SCOPE)
    assert isinstance(req, RequestKv)
    _write(rank, req)
    return req


def _write(rank: Rank, req: RequestKv) -> None:
    while req.committed_tokens < req.prompt_len:
        chunk = req.schedule_prefill(7)
        for at in range(chunk.start, chunk.end):
            content = torch.from_numpy(row(req.tokens[: at + 1].tolist()).copy())
            for layer in range(2):
                view = rank.bindings["full"].views[f"layer.{layer}", "kv"]
                view[int(chunk.pages["full"][at // PAGE]), at % PAGE] = content[layer]
        req.apply_prefill(chunk, 5 if chunk.emits else None)


def _wrong_rows(rank: Rank, tokens: list[int], pages: list[int]) -> list[str]:
    views = [rank.bindings["full"].views[f"layer.{layer}", "kv"].numpy() for layer in range(2)]
    return [
        f"token {at} of {len(tokens)}, layer {layer}"
        for at in range(len(pages) * PAGE)
        for layer in range(2)
        if (views[layer][pages[at // PAGE], at % PAGE] != row(tokens[: at + 1])[layer]).any()
    ]


@pytest.mark.paged
def test_scope_defaults_to_nobody_in_particular() -> None:
    """D2: no scope is the empty scope."""
    with threaded() as (store, rank, _):
        req = admit(rank.pool, prompt_tokens=TOKENS, max_new_tokens=1, keyer=store.keyer, scope=Scope())
        assert isinstance(req, RequestKv)
        _write(rank, req)
        store.retire(req).wait(CALM_S)
        prefix = store.resolve("0", TOKENS)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()
