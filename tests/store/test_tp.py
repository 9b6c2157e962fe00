"""Several workers: a page is there, and has arrived, only if it is for every worker and shard (E3, R2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bench_store import PAGE, SCOPE, HeldTier, Setup, deny, model_of, prompt, setup

from kvcontract import BlockPool, FleetSecret, KvStore, Rank, admit
from kvcontract.contract.layout import layout
from kvcontract.memory.binding import Binding
from kvcontract.pool.request import RequestKv
from kvcontract.tiers.base import Code, Codes, Lease, RecordKeys, record_keys
from kvcontract.tiers.dram import DramTier

TOKENS = prompt(4)
SECRET = FleetSecret(bytes(range(32)))


def shard_lost(page: int, shard: int, shards: int) -> Any:
    """An answer without one record."""

    def answer(lease: Lease) -> Lease:
        if len(lease.present) > page * shards + shard:
            lease.present[page * shards + shard] = False
        return lease

    return answer


@pytest.mark.paged
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_e3_pages_come_back_to_every_worker(tp: int, *, sharded: bool) -> None:
    """E3: each worker's share of a restored page is its own; a replicated part is stored once."""
    with setup(tp=tp, model=model_of(4, sharded=sharded)) as s:
        assert s.stored(TOKENS).saved == 4
        assert s.tier.stats()["records"] == 4 * (tp if sharded else 1)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert dict(prefix.sources) == {"dram": 4 * PAGE}
        prefix.release()


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_e3_records_are_restored_at_another_degree(writers: int, readers: int) -> None:
    """E3: what two workers wrote, one and four read, and so on, through the same tier."""
    model = model_of(4)
    with setup(tp=writers, model=model, secret=SECRET, max_tp=4) as s:
        s.stored(TOKENS)
        other = Setup(tp=readers, model=model, secret=SECRET, max_tp=4)
        other.tier.inner = s.tier.inner
        prefix = other.loop.run(other.resolve(TOKENS))
        other.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()
        other.check_idle()
        other.loop.run(other.store.aclose())
        other.loop.close()


@pytest.mark.paged
@pytest.mark.parametrize("shard", [0, 1])
def test_r2_a_page_without_one_shard_is_a_miss(shard: int) -> None:
    """R2, E3: AND over shards: whichever is missing, the hit ends before its page."""
    with setup(tp=2) as s:
        s.stored(TOKENS)
        s.tier.answer = shard_lost(2, shard, 2)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 2 * PAGE
        cut = s.store.explain(prefix).cuts[-1]
        assert (cut.where, cut.page, cut.shards, cut.workers) == ("dram", 2, (shard,), (shard,))
        prefix.release()


@pytest.mark.parametrize("worker", [0, 1])
def test_e3_a_restore_that_reached_only_some_workers_has_failed(worker: int) -> None:
    """E3: a shard that is lost at load time voids its page for all workers, and nothing registers."""
    with setup(tp=2) as s:
        s.stored(TOKENS)
        calls = []

        def lose(codes: Codes) -> Codes:
            calls.append(1)
            if len(calls) - 1 != worker:
                return codes
            return np.where(np.arange(len(codes)) == 0, Code.MISS, codes).astype(np.uint8)

        s.tier.codes["load"] = lose
        prefix = s.loop.run(s.resolve(TOKENS))
        assert (prefix.hit_tokens, s.pool.cached) == (0, 0)
        assert "dram: miss" in prefix.degraded
        explained = s.store.explain(prefix)
        assert explained.cuts[-1].why in {"load: miss", "not there"}


def test_e3_a_late_restore_of_some_workers_registers_nothing() -> None:
    """E3, A4: nobody waits any more, one worker's records fail: no page of theirs becomes findable."""
    with setup(tp=2) as s:
        s.stored(TOKENS)
        s.tier.holding.add("load")
        calls = []

        def lose(codes: Codes) -> Codes:
            calls.append(1)
            return np.full(len(codes), Code.FAILED, np.uint8) if len(calls) == 2 else codes

        s.tier.codes["load"] = lose
        s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        s.tier.open("load")
        assert (s.pool.cached, s.pool.held) == (0, 0)


@pytest.mark.paged
def test_e3_a_save_is_stored_when_every_worker_has_stored_it() -> None:
    """E3, C4: one worker's failure leaves the page unsaved; the retry writes what is missing."""
    with setup(tp=2) as s:
        calls = []

        def fail(codes: Codes) -> Codes:
            calls.append(1)
            return np.full(len(codes), Code.FULL, np.uint8) if len(calls) in {1, 2} else codes

        # `codes` is asked twice a save: what is kept, and what is said.
        s.tier.codes["save"] = fail
        req = s.compute(TOKENS)
        first = s.store.seal(req).value
        assert (first.saved, first.failed) == (0, {"full": 4})
        assert s.store.retire(req).value.saved == 4
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


def only_shard(shard: int, shards: int, pages: slice) -> Any:
    """An answer that has one shard of some pages."""

    def answer(lease: Lease) -> Lease:
        table = lease.present.reshape(-1, shards)
        kept = table[pages, shard].copy()
        table[pages] = False
        table[pages, shard] = kept
        return lease

    return answer


def test_r2_a_page_may_be_pieced_together_from_several_tiers() -> None:
    """R2: along whichever tier: one has shard 0, the other shard 1; together they are the page."""
    with setup(tp=2, tiers=2) as s:
        s.stored(TOKENS)
        s.tiers[0].answer = only_shard(0, 2, slice(None))
        s.tiers[1].answer = only_shard(1, 2, slice(None))
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        assert sum(prefix.sources.values()) == 4 * PAGE
        prefix.release()


def test_r2_two_tiers_with_the_same_shard_are_no_page() -> None:
    """R2: never OR: both have shard 0, none has shard 1."""
    with setup(tp=2, tiers=2) as s:
        s.stored(TOKENS)
        for tier in s.tiers:
            tier.answer = only_shard(0, 2, slice(None))
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0
        assert all(tier.count("load") == 0 for tier in s.tiers)


def test_r2_pieces_and_whole_pages_make_one_hit() -> None:
    """R2: whole pages of one tier, then pieces of two."""
    with setup(tp=2, tiers=2) as s:
        s.stored(TOKENS)
        names = [key["page_key"].copy() for key in _keys_of(s, TOKENS)]
        last = {tuple(name) for name in names[2:]}
        for number, tier in enumerate(s.tiers):
            _hide(tier, last, shard=1 - number)
        prefix = s.loop.run(s.resolve(TOKENS))
        s.check_content(TOKENS, prefix)
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


def _keys_of(s: Setup, tokens: list[int]) -> RecordKeys:
    return record_keys(s.store.keyer.chain(tokens, SCOPE), 0, 0, 2)


def _hide(tier: HeldTier, pages: set[tuple[int, ...]], shard: int) -> None:
    """Have a tier deny one shard of some pages."""
    deny(
        tier,
        lambda keys: np.array([tuple(key["page_key"]) in pages and key["shard"] == shard for key in keys]),
    )


@pytest.mark.paged
def test_e3_workers_in_threads_of_their_own() -> None:
    """E3: without a lane each worker has its own thread; the rank ANDs what they say."""
    model, tp = model_of(4), 4
    spaces = [layout(model, number, tp).space("full") for number in range(tp)]
    rank = Rank(BlockPool(9, PAGE), [{"full": Binding.allocate(space, 9)} for space in spaces])
    with KvStore(model, [rank], [DramTier(1 << 20)], save_budget=1.0) as store:
        req = admit(rank.pool, prompt_tokens=TOKENS, max_new_tokens=1, keyer=store.keyer, scope=SCOPE)
        assert isinstance(req, RequestKv)
        chunk = req.schedule_prefill(len(TOKENS))
        for number, memory in enumerate(rank.memory):
            for view in memory["full"].views.values():
                view[:] = torch.arange(9, dtype=torch.uint8)[:, None, None, None] + 16 * number
        req.apply_prefill(chunk, 5)
        first = req.pages[:4].tolist()
        assert store.retire(req).wait(30.0).saved == 4
        rank.pool.clear()
        for memory in rank.memory:
            for view in memory["full"].views.values():
                view.fill_(0xEE)
        prefix = store.resolve("0", TOKENS, SCOPE)
        assert prefix.hold is not None
        for number, memory in enumerate(rank.memory):
            for view in memory["full"].views.values():
                for mine, other in zip(prefix.hold.pages.tolist(), first, strict=True):
                    assert (view[mine] == other + 16 * number).all()
        prefix.release()
