"""The admission queue: order, shedding, bounded passing, no deadlock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import admitted, cache, chain, reserved

from kvcontract.contract.errors import UsageFault
from kvcontract.pool import AdmissionQueue, BlockPool, Entitlement, Hold, Waiter


@pytest.fixture
def pool() -> BlockPool:
    """100 usable pages of 16 tokens."""
    return BlockPool(101, 16)


@pytest.fixture
def queue(pool: BlockPool) -> AdmissionQueue[str]:
    """A queue of names."""
    return AdmissionQueue(pool, most_passes=2)


def held(pool: BlockPool, pages: int, seed: int) -> Hold:
    """A cached prefix, held."""
    keys = chain(pages, seed)
    if pool.probe(keys) < pages:
        cache(pool, keys)
    return pool.match(keys)


def begin(pool: BlockPool, queue: AdmissionQueue[str], waiter: Waiter[str]) -> Entitlement:
    """Admit whose turn it is."""
    request = admitted(pool, waiter.lifetime_pages, waiter.hold)
    queue.admitted(waiter)
    return request


def turn(queue: AdmissionQueue[str]) -> Waiter[str]:
    """Somebody's turn."""
    waiter = queue.next()
    assert waiter is not None
    return waiter


def test_b8_two_prefixes_that_block_each_other(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """100 pages, two of 80 with prefixes of 40: the second is shed, stays matchable, is held again later."""
    first = queue.push("first", 80, held(pool, 40, 1))
    second = queue.push("second", 80, held(pool, 40, 2))
    assert pool.budget() == 20
    assert turn(queue) is first
    assert (second.hold, pool.budget()) == (None, 60)
    assert pool.probe(chain(40, 2)) == 40
    request = begin(pool, queue, first)
    assert queue.next() is None
    assert second.hold is not None
    assert second.hold.hit_pages == 20  # B5: as far as promises leave room
    pool.draw(request, 40)
    request.release()
    assert turn(queue) is second
    begin(pool, queue, second).release()
    assert (len(queue), pool.held, pool.entitled) == (0, 0, 0)


def test_b8_the_last_holds_are_shed_and_no_more_than_needed(
    pool: BlockPool, queue: AdmissionQueue[str]
) -> None:
    """From the back, and only as many as let the head in."""
    head = queue.push("head", 50)
    behind = [queue.push(str(seed), 50, held(pool, 20, seed)) for seed in range(4)]
    assert pool.budget() == 20
    assert turn(queue) is head
    assert [waiter.hold is None for waiter in behind] == [False, False, True, True]
    for waiter in behind[:2]:
        waiter.hold.release()


def test_b8_pages_in_two_holds_come_free_with_the_second(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """Shedding one of two holds of the same pages gives nothing: both go, or none."""
    head = queue.push("head", 100)
    both = [queue.push(str(number), 50, held(pool, 30, 7)) for number in range(2)]
    assert pool.rooms_without([each.hold for each in both]) == [70, 70, 100]
    assert turn(queue) is head
    assert [each.hold for each in both] == [None, None]


def test_b8_nothing_is_shed_in_vain(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """While active requests keep the head out, the others keep what they hold."""
    request = admitted(pool, 70)
    queue.push("head", 60)
    behind = queue.push("behind", 20, held(pool, 20, 1))
    assert queue.next() is None
    assert behind.hold is not None
    assert queue.stuck() is None
    request.release()
    assert turn(queue).item == "head"
    assert behind.hold is not None
    behind.hold.release()


def test_b8_a_hold_that_must_stay_lets_its_request_pass_a_bounded_number_of_times(
    pool: BlockPool, queue: AdmissionQueue[str]
) -> None:
    """With the head stalled by active requests, two may pass it, then no more."""
    request = admitted(pool, 40)
    head = queue.push("head", 100)
    for number in range(3):
        queue.push(f"kept {number}", 15, held(pool, 10, number), keep=True)
    running = []
    for number in range(2):
        waiter = turn(queue)
        assert waiter.item == f"kept {number}"
        running.append(begin(pool, queue, waiter))
    assert head.passed == 2
    assert queue.next() is None
    for each in (request, *running):
        each.release()
    waiter = turn(queue)  # nobody is active: the head waits for this hold alone
    assert waiter.item == "kept 2"
    begin(pool, queue, waiter).release()
    assert turn(queue) is head


def test_b8_plain_requests_never_pass(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """A small request behind a big head waits for its turn (A19)."""
    request = admitted(pool, 40)
    head = queue.push("head", 80)
    small = queue.push("small", 1)
    assert queue.next() is None
    request.release()
    assert turn(queue) is head
    running = begin(pool, queue, head)
    assert turn(queue) is small
    begin(pool, queue, small).release()
    running.release()


def test_b8_holds_that_must_all_stay_are_told(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """Two that block each other for good: the last of them is named, once nothing else will make room."""
    first = queue.push("first", 80, held(pool, 40, 1), keep=True)
    second = queue.push("second", 80, held(pool, 40, 2), keep=True)
    assert queue.next() is None
    with reserved(pool, 1):
        assert queue.stuck() is None  # a restore will settle
    with pool.match(chain(10, 1)):
        assert queue.stuck() is None  # somebody is resolving
    assert queue.stuck() is second
    queue.remove(second)
    second.hold.release()
    assert queue.stuck() is None
    assert turn(queue) is first
    begin(pool, queue, first).release()
    assert queue.stuck() is None
    with pytest.raises(UsageFault, match="not queued"):
        queue.remove(second)


def test_b10_a_request_without_pages_never_waits(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """Already finished: it passes a stalled head at once, and that counts for nothing."""
    request = admitted(pool, 100)
    head = queue.push("head", 50)
    nothing = queue.push("nothing", 0)
    assert turn(queue) is nothing
    begin(pool, queue, nothing).release()
    assert head.passed == 0
    assert queue.next() is None
    request.release()


def test_b10_what_can_never_fit_is_not_queued(pool: BlockPool, queue: AdmissionQueue[str]) -> None:
    """More than the pool, less than nothing, a spent hold, or a bound that is none: refused."""
    for pages in (101, -1):
        with pytest.raises(UsageFault, match="the pool has 100"):
            queue.push("never", pages)
    hold = held(pool, 3, 1)
    hold.release()
    with pytest.raises(UsageFault, match="before"):
        queue.push("spent", 5, hold)
    with pytest.raises(UsageFault, match="most_passes"):
        AdmissionQueue(pool, most_passes=-1)
    assert len(queue) == len(list(queue)) == 0


SPECS = st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 40), st.booleans(), st.booleans())


@settings(max_examples=60, deadline=None)
@given(most_passes=st.integers(0, 3), specs=st.lists(SPECS, min_size=1, max_size=8))
def test_b8_every_request_gets_its_turn(
    most_passes: int, specs: list[tuple[int, int, int, bool, bool]]
) -> None:
    """Any mix of lifetimes, shared prefixes and kept holds drains, unless kept holds alone fill the pool."""
    pool = BlockPool(41, 16)
    queue: AdmissionQueue[int] = AdmissionQueue(pool, most_passes=most_passes)
    chains = [chain(12, seed) for seed in range(3)]
    for number, (which, count, extra, keep, resident) in enumerate(specs):
        if pool.budget() > 12 and resident:
            cache(pool, chains[which])
        hold = pool.match(np.ascontiguousarray(chains[which][:count]))
        queue.push(number, min(40, hold.hit_pages + extra), hold, keep=keep)
    running: list[Entitlement] = []
    arrivals, order = list(queue), []
    while len(queue):
        waiter = queue.next()
        if waiter is not None:
            order.append(waiter.number)
            running.append(admitted(pool, waiter.lifetime_pages, waiter.hold))
            queue.admitted(waiter)
            pool.draw(running[-1], running[-1].remaining_pages)
        elif running:
            running.pop(0).release()
        else:
            stuck = queue.stuck()
            assert stuck is not None
            assert stuck.keep
            queue.remove(stuck)
            stuck.hold.release()
        pool.check_books()
    plain = [each.number for each in arrivals if not each.keep and each.lifetime_pages]
    assert [number for number in order if number in plain] == plain  # first come, first served
    for each in running:
        each.release()
    assert (pool.held, pool.entitled) == (0, 0)
