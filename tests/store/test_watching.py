"""What a store tells: figures, explanations, events; and what it keeps on request (I6-I8, probe, pin)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, prompt, setup

from kvcontract import Scope
from kvcontract.contract.errors import UsageFault
from kvcontract.pool.events import OVERFLOW, Cleared, EventLog, Removed, Stored, replay
from kvcontract.store.events import TierEvents
from kvcontract.store.explain import KEPT
from kvcontract.store.workers import Workers
from kvcontract.tiers.base import Code, record_keys

TOKENS = prompt(4)


# Probe, pin


def test_probe_asks_the_device_and_pins_nothing() -> None:
    """Design: resident tokens by rank; no tier is asked, nothing is held."""
    with setup() as s:
        s.stored(TOKENS)
        s.store.retire(s.compute(TOKENS[: 2 * PAGE + 1]))
        asked = s.tier.count("lookup")
        assert s.store.probe(TOKENS, SCOPE) == {"0": 2 * PAGE}
        assert s.store.probe(TOKENS) == {"0": 0}
        assert (s.pool.held, s.tier.count("lookup")) == (0, asked)


def test_a_pin_keeps_a_prefix_resident_until_its_time_is_over() -> None:
    """Design: pinned pages are not evicted; afterwards they may be."""
    with setup(pages=17, pin_budget=0.5, scope_pin_quota=0.5) as s:
        s.store.retire(s.compute(TOKENS))
        pin = s.store.pin("0", TOKENS, SCOPE, ttl_s=10.0)
        assert (pin.tokens, pin.refused_pages, pin.ends) == (4 * PAGE, 0, 10.0)
        s.evict()
        assert s.store.probe(TOKENS, SCOPE) == {"0": 4 * PAGE}
        assert s.store.stats().gauges["pins"] == 4
        s.loop.run(asyncio.sleep(11.0))
        assert s.store.stats().gauges["pins"] == 0
        s.evict()
        assert s.store.probe(TOKENS, SCOPE) == {"0": 0}
        assert s.store.unpin(pin) is False


def test_pins_stay_within_budget_and_quota() -> None:
    """Design: a scope has its quota, all scopes together the budget; leading pages are kept."""
    other = Scope(salt="other")
    with setup(pages=17, pin_budget=0.5, scope_pin_quota=0.25) as s:
        s.store.retire(s.compute(prompt(6)))
        pin = s.store.pin("0", prompt(6), SCOPE)
        assert (pin.tokens, pin.refused_pages) == (4 * PAGE, 2)
        assert s.store.pin("0", prompt(6), SCOPE).tokens == 0
        assert s.store.pin("0", prompt(6), other).tokens == 0  # nothing of theirs is resident
        assert s.store.unpin(pin.id) is True
        again = s.store.pin("0", prompt(6), SCOPE)
        assert again.tokens == 4 * PAGE
        s.loop.run(s.store.areset())  # ends with it
        assert s.store.stats().gauges["pins"] == 0
        with pytest.raises(UsageFault, match="more than 0"):
            s.store.pin("0", TOKENS, SCOPE, ttl_s=0.0)


# I6


@pytest.mark.paged
def test_i6_bytes_and_seconds_by_tier_and_direction() -> None:
    """I6: what settled, how much of it, and how long it took."""
    with setup() as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(TOKENS))
        s.loop.call_later(2.0, s.tier.open, "save")
        s.loop.run(s.store.flush_saves())
        s.evict()
        s.tier.holding.add("load")
        s.loop.call_later(0.5, s.tier.open, "load")
        s.loop.run(s.resolve(TOKENS)).release()
        moved = s.store.stats().moved["dram"]
        workers: Workers = s.store._core.pages.workers["0"]
        size = 4 * workers.saved_record_bytes
        assert (moved["save"].pages, moved["save"].record_bytes, moved["save"].seconds) == (4, size, 2.0)
        assert (moved["load"].pages, moved["load"].record_bytes, moved["load"].seconds) == (4, size, 0.5)
        assert moved["load"].bytes_per_s == 2 * size


def test_i6_failed_pages_are_not_counted_as_moved() -> None:
    """I6, R8: only what arrived whole counts; the rest is counted by reason."""
    with setup() as s:
        s.stored(TOKENS)
        s.tier.codes["load"] = lambda codes: np.where(np.arange(len(codes)) == 1, Code.SHORT, codes)
        s.loop.run(s.resolve(TOKENS)).release()
        stats = s.store.stats()
        assert stats.counters["pages_short_dram"] >= 1
        loaded = stats.counters["pages_loaded_dram"] + stats.counters.get("blocks_loaded_dram", 0)
        assert stats.moved["dram"]["load"].pages == loaded


# I8


@pytest.mark.paged
def test_i8_a_tier_that_lacks_a_page_is_named() -> None:
    """I8: device and tiers, each with the first page that is missing there, and the groups."""
    with setup(tiers=2) as s:
        s.stored(TOKENS[: 2 * PAGE + 1])
        prefix = s.loop.run(s.resolve(TOKENS))
        explained = s.store.explain(prefix)
        assert [(cut.where, cut.page, cut.why, cut.groups) for cut in explained.cuts] == [
            ("device", 0, "not resident when asked", ("kv",)),
            ("dram", 2, "not there", ("kv",)),
            ("disk", 2, "not there", ("kv",)),
        ]
        assert (explained.hit_tokens, explained.limit_tokens) == (2 * PAGE, 4 * PAGE)
        assert "page 2, dram: not there; groups kv" in str(explained)
        prefix.release()


def test_i8_a_whole_hit_has_no_cut() -> None:
    """I8: nothing cut it; sources and label are told."""
    with setup() as s:
        s.stored(TOKENS)
        prefix = s.loop.run(s.store.resolve_prefix("0", TOKENS, SCOPE, label="req-1"))
        for name in (prefix, prefix.id, "req-1"):
            explained = s.store.explain(name)
            assert (explained.id, explained.label, explained.cuts) == (prefix.id, "req-1", ())
            assert dict(explained.sources) == {"dram": 4 * PAGE}
        prefix.release()


@pytest.mark.parametrize(
    ("scope", "parts"),
    [
        (Scope(salt="other"), ("salt",)),
        (Scope(salt="tenant", lora="x"), ("lora",)),
        (Scope(), ("salt",)),
    ],
)
def test_i8_the_key_part_that_differs_is_named(scope: Scope, parts: tuple[str, ...]) -> None:
    """I8, D4: the same tokens are known under another scope: which field differs, never what it holds."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        s.loop.run(s.resolve(TOKENS)).release()
        prefix = s.loop.run(s.store.resolve_prefix("0", TOKENS, scope))
        explained = s.store.explain(prefix)
        assert explained.key_parts == parts
        assert "tenant" not in str(explained)
        assert f"other {', '.join(parts)}" in str(explained)


def test_i8_a_failed_load_is_named() -> None:
    """I8: code, page and workers of what did not arrive."""
    with setup(tp=2) as s:
        s.stored(TOKENS)
        s.tier.codes["load"] = lambda codes: np.where(np.arange(len(codes)) == 3, Code.CORRUPT, codes)
        s.tier.answer = lambda lease: lease
        prefix = s.loop.run(s.resolve(TOKENS))
        explained = s.store.explain(prefix)
        assert "dram: corrupt" in explained.reasons
        prefix.release()


def test_i8_only_the_latest_are_kept() -> None:
    """I8: a bounded number; others are an error that says so."""
    with setup(tiers=0) as s:
        first = s.loop.run(s.store.resolve_prefix("0", [1], SCOPE, label="first")).id
        for _ in range(KEPT):
            s.loop.run(s.store.resolve_prefix("0", [1], SCOPE))
        for name in (first, "first"):
            with pytest.raises(UsageFault, match="among the latest"):
                s.store.explain(name)


# I7


def known(events: list[object], medium: str) -> dict[bytes, tuple[bytes, bytes]]:
    """What replaying a medium's events gives."""
    return replay(event for event in events if event.medium == medium)


def in_tier(s: Setup, tokens: list[int], tier: int = 0) -> set[bytes]:
    """Keys of the pages of a prompt that a tier has."""
    keys = s.store.keyer.chain(tokens, SCOPE)
    with s.tiers[tier].inner.lookup(record_keys(keys, 0, 0, 1), 1e9).value as lease:
        return {key.tobytes() for key, there in zip(keys, lease.present.tolist(), strict=True) if there}


@pytest.mark.paged
def test_i7_replaying_the_events_gives_what_the_tiers_hold() -> None:
    """I7: stored, evicted, quarantined and cleared, by medium; a small tier under a random load."""
    events = TierEvents()
    with setup(pages=32, tiers=2, events=events) as s:
        rng = np.random.default_rng(0)
        slots = s.tiers[0].inner._slots
        told: list[object] = []
        for step in range(120):
            tokens = prompt(int(rng.integers(1, 5)), seed=int(rng.integers(30)))
            s.store.retire(s.compute(tokens, s.loop.run(s.resolve(tokens))))
            if step == 40:
                slots.capacity_bytes = slots.allocated_bytes  # full from now on
            if step == 80:
                s.evict()
                s.loop.run(s.store.areset(["disk"]))
            told += [event for _, event in s.store.take_events()]
            for number, tier in enumerate(s.tiers):
                mine = known(told, tier.name)
                assert in_tier(s, tokens, number) == in_tier(s, tokens, number) & set(mine)
        assert s.tiers[0].stats()["evictions"] > 0
        for number, tier in enumerate(s.tiers):
            present = {key for seed in range(30) for key in in_tier(s, prompt(4, seed=seed), number)}
            assert present == set(known(told, tier.name))
        assert any(isinstance(event, Cleared) for event in told)


def test_i7_events_carry_tokens_and_parents_and_no_salt() -> None:
    """I7, D4: routers hash for themselves; the scope is a tag."""
    events = TierEvents()
    with setup(events=events) as s:
        s.store.retire(s.compute(TOKENS))
        ((name, event),) = s.store.take_events()
        assert (name, event.medium, event.epoch) == ("", "dram", 0)
        assert isinstance(event, Stored)
        assert event.token_ids.ravel().tolist() == TOKENS[: 4 * PAGE]
        assert (event.parents[1:] == event.keys[:-1]).all()
        assert not event.parents[0].any()
        assert event.scope == s.store.keyer.scope_tag(SCOPE)
        assert "tenant" not in repr(event)


def test_i7_a_page_that_lost_one_record_is_removed() -> None:
    """I7, R2: with two shards, the loss of one is told as the loss of the page; healing tells it again."""
    events = TierEvents()
    with setup(tp=2, events=events) as s:
        s.store.retire(s.compute(TOKENS))
        keys = record_keys(s.store.keyer.chain(TOKENS, SCOPE), 0, 1, 2)
        with s.tier.inner.lookup(keys, 1e9).value as lease:
            s.tier.inner.discard(lease, np.array([2]))
        _, removed = (event for _, event in s.store.take_events())
        assert isinstance(removed, Removed)
        assert (removed.reason, len(removed.keys)) == ("quarantined", 1)
        s.store.retire(s.compute(TOKENS, s.loop.run(s.resolve(TOKENS))))
        ((_, stored),) = s.store.take_events()
        assert isinstance(stored, Stored)
        assert stored.keys.tolist() == removed.keys.tolist()
        assert stored.token_ids.ravel().tolist() == TOKENS[2 * PAGE : 3 * PAGE]


def test_i7_device_events_of_restored_pages_replay_to_the_index() -> None:
    """I7: pages that came from a tier are told by the pool, with their tokens; late ones too."""
    log = EventLog()
    with setup(log=log) as s:
        s.stored(TOKENS)
        s.loop.run(s.resolve(TOKENS)).release()
        s.evict()
        s.tier.holding.add("load")
        s.loop.run(s.resolve(TOKENS, deadline_s=1.0))
        s.tier.open("load")
        told = [event for name, event in s.store.take_events() if name == "0"]
        keys = s.store.keyer.chain(TOKENS, SCOPE)
        assert set(known(told, "device")) == {key.tobytes() for key in keys}
        last = [event for event in told if isinstance(event, Stored)][-1]
        assert last.token_ids.ravel().tolist() == TOKENS[: 4 * PAGE]


def test_i7_a_reader_that_is_too_slow_starts_anew() -> None:
    """I7: what nobody took is dropped as a whole, and the stream says so for each medium."""
    events = TierEvents(max_batches=2)
    for number in range(3):
        events.removed("dram", np.full((1, 2), number, np.uint64), "evicted")
    (cleared,) = events.take()
    assert isinstance(cleared, Cleared)
    assert (cleared.reason, cleared.medium, cleared.epoch) == (OVERFLOW, "dram", 1)
    with pytest.raises(UsageFault, match="2 or more"):
        TierEvents(max_batches=1)
