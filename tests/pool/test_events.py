"""Events: what a router hears is what the index does (I7). `test_pool_model.py` replays every verb."""

from __future__ import annotations

import numpy as np
import pytest
from making import KEYER, Prefix, admitted, chain, decode, prefill, request, reserved, resolve

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import BlockPool, Cleared, Content, EventLog, MediaItem, Removed, Stored
from kvcontract.pool.events import OVERFLOW, replay


@pytest.fixture
def log() -> EventLog:
    """What the pool tells."""
    return EventLog()


@pytest.fixture
def pool(log: EventLog) -> BlockPool:
    """20 usable pages of 4 tokens, telling."""
    return BlockPool(21, 4, events=log)


def test_i7_stored_carries_tokens_and_parents(pool: BlockPool, log: EventLog) -> None:
    """A router can hash for itself: token ids, parent keys, one batch of arrays a run, one medium."""
    with request(pool, 10, 4) as req:
        prefill(req)
        (stored,) = log.take()
        assert isinstance(stored, Stored)
        assert np.array_equal(stored.keys, req.keys)
        assert np.array_equal(stored.parents, np.concatenate([np.zeros((1, 2), np.uint64), req.keys[:1]]))
        assert stored.token_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert (stored.epoch, stored.medium, stored.scope, stored.extras) == (0, "device", "", {})
        decode(req)
        (stored,) = log.take()
        assert stored.parents.tolist() == req.keys[1:2].tolist()
        assert stored.token_ids.tolist() == [req.tokens[8:12].tolist()]
    assert log.take() == []  # released, and findable still


def test_i7_a_duplicate_is_no_news(pool: BlockPool, log: EventLog) -> None:
    """A second page of one content, and a page that takes over a name, change nothing that a router knows."""
    with request(pool, 10, 4) as first, request(pool, 10, 4) as second:
        prefill(first)
        log.take()
        prefill(second)
        assert log.take() == []
        first.release()
        assert log.take() == []
        prefix = resolve(pool, 8)
        prefix.hold.trim(1)
    assert log.take() == []
    with request(pool, 10, 4, prefix=Prefix(prefix.hold, 4)) as third:  # rewrites a cached page
        prefill(third)
    assert log.take() == []


def test_i7_removed_says_why(pool: BlockPool, log: EventLog) -> None:
    """Evicted, released without being kept, drained, unreachable: each with its reason and the keys."""
    with request(pool, 16, 4) as req:
        prefill(req)
        keys = req.keys.copy()
    with admitted(pool, 18) as other:
        pool.draw(other, 18)
    pool.set_retention(on=False)
    stored, evicted, drained = log.take()
    assert isinstance(stored, Stored)
    assert isinstance(evicted, Removed)
    assert isinstance(drained, Removed)
    assert (evicted.reason, drained.reason) == ("evicted", "retention off")
    assert evicted.keys.tolist() == keys[:1:-1].tolist()  # tails first
    assert drained.keys.tolist() == keys[1::-1].tolist()
    with request(pool, 8, 4) as req:
        prefill(req)
    assert [event.reason for event in log.take() if isinstance(event, Removed)] == ["released"]
    pool.set_retention(on=True)
    with request(pool, 8, 4) as req:
        prefill(req)
        req.mark_reset()
        with request(pool, 16, 4, prefix=resolve(pool, 8)) as longer:
            prefill(longer)
    assert [event.reason for event in log.take() if isinstance(event, Removed)] == ["released", "unreachable"]


def test_i7_clearing_begins_an_epoch(pool: BlockPool, log: EventLog) -> None:
    """One event says that everything is gone, with its reason; what follows carries the new epoch."""
    with request(pool, 8, 4) as req:
        prefill(req)
        with pytest.raises(UsageFault, match="1 requests, 0 reservations and 2 named"):
            pool.clear()
    log.take()
    assert pool.clear("adapter reloaded") == 2
    (cleared,) = log.take()
    assert isinstance(cleared, Cleared)
    assert (cleared.reason, cleared.epoch) == ("adapter reloaded", 1)
    with request(pool, 8, 4) as req:
        prefill(req)
    assert [event.epoch for event in log.take()] == [1]
    assert BlockPool(5, 4).clear() == 0


def test_i7_names_of_partial_pages_are_never_told(pool: BlockPool, log: EventLog) -> None:
    """A boundary page is restored, copied, evicted without a word; its full pages are told."""
    keys, key = chain(2), chain(1, seed=9)
    names = np.concatenate([keys, key])
    content = Content(np.arange(8))
    staged, nothing = reserved(pool, 3), pool.match(keys[:0])
    with pytest.raises(UsageFault, match="events are on: 2 pages need their 8 token ids, 7 were given"):
        pool.commit(staged, names, 3, base=nothing, boundary=True, content=Content(np.arange(7)))
    pool.commit(staged, names, 3, base=nothing, boundary=True, content=content).release()
    with admitted(pool, 20) as everything:
        pool.draw(everything, 20)
    assert pool.commit_late(reserved(pool, 3), names, 3, parent=None, boundary=True, content=content) == 3
    told = {row.tobytes() for event in log.take() if not isinstance(event, Cleared) for row in event.keys}
    assert told == {row.tobytes() for row in keys}


def test_d4_scopes_are_told_by_a_tag_that_hides_them(pool: BlockPool, log: EventLog) -> None:
    """Neither salt nor adapter can be read; equal scopes have equal tags, others have others."""
    for scope in (Scope(), Scope(salt="tenant-7"), Scope(salt="tenant-8"), Scope(lora="tenant-7")):
        with request(pool, 4, 4, scope=scope) as req:
            prefill(req)
    events = log.take()
    tags = [event.scope for event in events if isinstance(event, Stored)]
    assert tags[0] == ""
    assert len(set(tags)) == 4
    assert "tenant" not in repr(tags)
    assert tags[1] == KEYER.scope_tag(Scope(salt="tenant-7"))


def test_i7_extra_identity_is_told_by_row(pool: BlockPool, log: EventLog) -> None:
    """Media that the tokens do not tell comes with the page it is in."""
    with request(pool, 12, 4, media=[MediaItem(b"i" * 16, 5, 2)]) as req:
        prefill(req)
    (stored,) = log.take()
    assert isinstance(stored, Stored)
    assert list(stored.extras) == [1]
    assert b"i" * 16 in stored.extras[1]


def test_i7_tokens_are_asked_for_where_events_are_on(pool: BlockPool) -> None:
    """Nothing is told by halves: without its tokens a page is not named."""
    entitlement = admitted(pool, 2)
    pool.draw(entitlement, 2)
    with pytest.raises(UsageFault, match="none were given"):
        pool.register(entitlement, chain(2))
    assert entitlement.registered_pages == 0
    entitlement.release()
    with reserved(pool, 1) as staged, pytest.raises(UsageFault, match="none were given"):
        pool.commit_late(staged, chain(1), 1, parent=None)


def test_i7_a_log_nobody_reads_stays_small_and_says_so(log: EventLog) -> None:
    """Beyond its bound the log starts anew: a replay knows too little, never too much."""
    small = EventLog(max_batches=4)
    pool = BlockPool(21, 4, events=small)
    for seed in range(6):
        with request(pool, [seed] * 8, 4) as req:
            prefill(req)
    events = small.take()
    assert isinstance(events[0], Cleared)
    assert events[0].reason == OVERFLOW
    assert {event.epoch for event in events} == {1}
    assert 0 < len(replay(events)) < pool.cached
    assert len(log.take()) == 0
    with pytest.raises(UsageFault, match="1 batches"):
        EventLog(max_batches=1)
