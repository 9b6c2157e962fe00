"""The pool's verbs, clause by clause; `test_pool_model.py` covers their interplay."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from making import admitted, chain, reserved

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.pool import BlockPool, Never


def cache(pool: BlockPool, keys: np.ndarray) -> list[int]:
    """Leave a chain cached; returns its pages."""
    request = admitted(pool, len(keys))
    hit = pool.match(keys)
    pool.adopt(request, hit)
    pool.draw(request, len(keys) - hit.hit_pages)
    pool.register(request, keys[hit.hit_pages :])
    pages = request.pages.tolist()
    pool.release(request)
    pool.check_books()
    return pages


def drop(make: Callable[[], object]) -> None:
    """Make something and forget it."""
    make()
    gc.collect()


@pytest.fixture
def pool() -> BlockPool:
    """100 usable pages of 16 tokens."""
    return BlockPool(101, 16)


def test_b2_a_lost_race_has_no_side_effect(pool: BlockPool) -> None:
    """Refused admission leaves gauges and hold as they were, and may be asked again."""
    keys = chain(10)
    cache(pool, keys)
    first = admitted(pool, 80)
    hold = pool.match(keys)
    before = pool.gauges()
    assert pool.try_admit(60, hold) is None
    assert pool.try_admit(60, hold) is None
    assert pool.gauges() == before
    assert hold.live
    first.release()
    with admitted(pool, 60, hold) as request:
        assert request.pages.tolist() == hold.pages.tolist()


def test_b2_admission_books_what_it_checked(pool: BlockPool) -> None:
    """Promises add up to the pool and no further."""
    first, second = admitted(pool, 60), admitted(pool, 40)
    assert pool.entitled == pool.available == 100
    assert pool.try_admit(1) is None
    first.release()
    second.release()
    assert pool.entitled == 0


def test_b3_a_reservation_takes_what_promises_leave(pool: BlockPool) -> None:
    """reserve(n) needs available >= n + entitled."""
    request = admitted(pool, 90)
    assert pool.reserve(11) is None
    reservation = reserved(pool, 10)
    assert pool.reserve(1) is None
    assert len(pool.draw(request, 90)) == 90  # B11
    reservation.release()
    request.release()
    assert pool.available == 100


def test_b4_pages_and_refund_return_together(pool: BlockPool) -> None:
    """What a waiter sees when room grows is already settled."""
    seen = []
    request = admitted(pool, 50)
    pool.draw(request, 20)
    stop = pool.on_release(lambda: seen.append(pool.gauges()))
    pool.release(request)
    stop()
    admitted(pool, 1).release()
    assert [(each.available, each.entitled) for each in seen] == [(100, 0)]


def test_b5_a_hit_is_cut_to_what_promises_leave(pool: BlockPool) -> None:
    """Pinning cached pages never pushes the promises above what is available."""
    keys = chain(60)
    cache(pool, keys)
    request = admitted(pool, 70)
    hold = pool.match(keys)
    assert hold.hit_pages == 30
    assert pool.available == pool.entitled == 70
    again = pool.match(keys)  # pages that are owned already cost nothing
    assert again.hit_pages == 30
    assert len(pool.draw(request, 70)) == 70  # B11
    for handle in (hold, again, request):
        handle.release()
    pool.check_books()


def test_b6_credit_comes_from_the_hold_once(pool: BlockPool) -> None:
    """The pool counts the hold's pages itself, and a hold serves one request."""
    keys = chain(40)
    cache(pool, keys)
    hold = pool.match(keys)
    request = admitted(pool, 100, hold)
    assert (request.remaining_pages, pool.entitled) == (60, 60)
    assert not hold.live
    for use in (lambda: pool.try_admit(50, hold), hold.take, hold.release, lambda: hold.trim(0)):
        with pytest.raises(UsageFault, match="before"):
            use()
    request.release()


def test_b6_a_hold_of_another_pool_or_too_long_is_refused(pool: BlockPool) -> None:
    """A hold counts in its own pool and for a request at least as long."""
    cache(pool, chain(4))
    with pool.match(chain(4)) as hold:
        with pytest.raises(UsageFault, match="another pool"):
            BlockPool(101, 16).try_admit(5, hold)
        with pytest.raises(UsageFault, match="a hold of 4 pages"):
            pool.try_admit(3, hold)
        with pytest.raises(UsageFault, match="-1 pages"):
            pool.try_admit(-1)
    assert pool.held == 0


def test_a_hold_is_passed_by_value(pool: BlockPool) -> None:
    """take() moves the pages; leaving a spent hold's context does nothing."""
    cache(pool, chain(4))
    with pool.match(chain(4)) as hold:
        taken = hold.take()
        assert not hold.live
    assert taken.pages.tolist() == hold.pages.tolist()
    assert np.array_equal(taken.keys, chain(4))
    taken.release()


def test_a_dropped_handle_is_taken_back_with_a_warning(pool: BlockPool) -> None:
    """A hold, reservation or entitlement that nobody consumes cannot leak."""
    cache(pool, chain(4))
    for make in (lambda: pool.match(chain(4)), lambda: pool.reserve(3), lambda: pool.try_admit(5)):
        with pytest.warns(ResourceWarning, match="was dropped"):
            drop(make)
        assert (pool.held, pool.entitled) == (0, 0)
    pool.match(chain(2, seed=9))  # an empty hold has nothing to lose
    pool.check_books()


def test_b9_pins_are_counted_once_and_by_page(pool: BlockPool) -> None:
    """Two saves of a page make one pinned block, out of available until both are over."""
    keys = chain(3)
    request = admitted(pool, 3)
    pages = pool.draw(request, 3)
    pool.register(request, keys)
    pool.pin(pages)
    pool.pin(pages[:2])
    assert pool.pinned_blocks == 3
    pool.release(request)
    assert (pool.held, pool.cached) == (3, 0)  # C1
    pool.unpin(pages)
    assert (pool.pinned_blocks, pool.cached) == (2, 1)
    pool.unpin(pages[:2])
    assert (pool.pinned_blocks, pool.cached, pool.held) == (0, 3, 0)
    pool.check_books()


def test_c1_a_pinned_page_is_not_issued_again(pool: BlockPool) -> None:
    """Whatever its owner does, a page with a save in flight keeps its occupant."""
    request = admitted(pool, 2)
    pages = pool.draw(request, 2)
    pool.register(request, chain(2))
    pool.pin(pages)
    generation = pool.generation[pages].tolist()
    pool.release(request)
    everything = admitted(pool, 98)
    assert not set(pool.draw(everything, 98).tolist()) & set(pages.tolist())
    assert pool.generation[pages].tolist() == generation
    pool.unpin(pages)
    everything.release()
    pool.check_books()


def test_b10_what_can_never_fit_is_refused(pool: BlockPool) -> None:
    """More than the whole pool is Never; no pages at all never wait."""
    answer = pool.try_admit(101)
    assert isinstance(answer, Never)
    assert "101" in answer.reason
    everything = admitted(pool, 100)
    admitted(pool, 0).release()
    everything.release()


def test_b11_an_admitted_draw_evicts(pool: BlockPool) -> None:
    """A draw within the promise succeeds with no page free; beyond it, it is refused."""
    cache(pool, chain(100))
    request = admitted(pool, 100)
    assert sorted(pool.draw(request, 100).tolist()) == list(range(1, 101))  # B21
    assert pool.probe(chain(100)) == 0
    with pytest.raises(UsageFault, match="0 of 100 remain"):
        pool.draw(request, 1)
    request.release()


def test_b12_retention_is_a_switch_of_its_own(pool: BlockPool) -> None:
    """Off: the cache drains once; complete pages are free on release, a primary behind a duplicate too."""
    keys = chain(5)
    cache(pool, keys)
    pool.set_retention(on=False)
    assert (pool.cached, pool.free) == (0, 100)
    first, second = admitted(pool, 5), admitted(pool, 5)
    for request in (first, second):
        pool.draw(request, 5)
        pool.register(request, keys)
    assert pool.probe(keys) == 5  # matching goes on
    first.release()
    assert (pool.free, pool.probe(keys)) == (95, 5)
    second.release()
    assert (pool.free, pool.probe(keys)) == (100, 0)
    pool.check_books()


def test_b14_tails_go_before_heads(pool: BlockPool) -> None:
    """Eviction shortens chains from their ends, the least recently used chain first."""
    old, new = chain(50, seed=1), chain(50, seed=2)
    cache(pool, old)
    cache(pool, new)
    for taken in (1, 30, 60):
        request = admitted(pool, taken)
        pool.draw(request, taken)
        assert (pool.probe(old), pool.probe(new)) == (max(0, 50 - taken), min(50, 100 - taken))
        request.release()
        cache(pool, old)
        cache(pool, new)


def test_b14_a_shared_head_outlives_its_branches(pool: BlockPool) -> None:
    """A head released long ago stays while any branch of it is resident."""
    head = chain(10)
    left, right = (np.concatenate([head, chain(20, seed)]) for seed in (2, 3))
    cache(pool, left)
    cache(pool, right)
    request = admitted(pool, 80)
    pool.draw(request, 80)
    assert (pool.probe(left), pool.probe(right)) == (10, 20)
    pool.check_books()
    request.release()


def test_b14_a_page_outlived_by_its_pin_is_not_left_unreachable(pool: BlockPool) -> None:
    """A save that ends after the pages before it were evicted frees its page."""
    keys = chain(3)
    request = admitted(pool, 3)
    pages = pool.draw(request, 3)
    pool.register(request, keys)
    pool.pin(pages[1:2])
    pool.release(request)
    others = admitted(pool, 99)
    pool.draw(others, 99)
    pool.unpin(pages[1:2])
    assert (pool.free, pool.cached) == (1, 0)
    pool.check_books()
    others.release()


def test_b15_one_primary_a_key(pool: BlockPool) -> None:
    """A second page of one content is private; it takes over when the first is given up."""
    keys = chain(2)
    first, second = admitted(pool, 2), admitted(pool, 3)
    pool.draw(first, 2)
    pool.draw(second, 3)
    pool.register(first, keys)
    pool.register(second, keys)
    with pool.match(keys) as hold:
        assert hold.pages.tolist() == first.pages.tolist()
    first.release()
    assert pool.free == 97  # the first's pages are of no use to anyone
    with pool.match(keys) as hold:
        assert hold.pages.tolist() == second.pages[:2].tolist()
    second.release()
    assert (pool.cached, pool.probe(keys)) == (2, 2)
    pool.check_books()


def test_b15_a_rewritten_cached_page_gives_way(pool: BlockPool) -> None:
    """Recomputing a cached page replaces it, so that no cached page has an owned descendant."""
    keys = chain(3)
    old = cache(pool, keys[:2])
    request = admitted(pool, 3, pool.match(keys[:1]))
    pool.draw(request, 2)
    pool.register(request, keys[1:])
    assert (pool.cached, pool.free) == (0, 97)
    assert request.pages[0] == old[0]
    with pool.match(keys) as hold:
        assert hold.pages.tolist() == request.pages.tolist()
    request.release()
    pool.check_books()


def test_b16_wrong_releases_do_no_harm(pool: BlockPool) -> None:
    """Twice in a list, twice in time, another's pages, named or pinned ones: refused, and nothing changes."""
    request, other = admitted(pool, 6), admitted(pool, 2)
    pages, foreign = pool.draw(request, 4), pool.draw(other, 2)
    pool.register(request, chain(1))
    pool.pin(pages[3:])
    before = pool.gauges()
    wrong = [pages[[2, 2]], pages[:1], pages[[1, 2]], pages, foreign, pages[3:], np.array([0, 101], np.int32)]
    for listed in wrong:
        with pytest.raises(UsageFault, match="pages"):
            pool.retract(request, listed)
    for listed in (pages[:1], pages[[3, 3]], np.array([0], np.int32)):
        with pytest.raises(UsageFault, match="pages"):
            pool.unpin(listed)
    assert pool.gauges() == before
    pool.check_books()
    pool.unpin(pages[3:])
    pool.retract(request, pages[:1:-1])
    assert request.pages.tolist() == pages[:2].tolist()
    assert (request.remaining_pages, pool.entitled) == (4, 4)
    request.release()
    with pytest.raises(UsageFault, match="before"):
        request.release()
    other.release()
    assert pool.available == 100


def test_b16_only_owned_pages_can_be_pinned(pool: BlockPool) -> None:
    """Free, cached and staged pages, and page 0, have nothing to save."""
    cached = cache(pool, chain(1))
    staged = reserved(pool, 1)
    for page in (cached[0], staged.pages[0], 0, 50):
        with pytest.raises(UsageFault, match="pages"):
            pool.pin(np.array([page], np.int32))
    staged.release()


def test_b21_page_0_is_never_given_out() -> None:
    """A pool of n pages has n - 1 to use, and none of them is 0; one of 1 page is refused."""
    pool = BlockPool(4, 16)
    request = admitted(pool, 3)
    assert pool.draw(request, 3).tolist() == [1, 2, 3]
    request.release()
    for pages, page_tokens in ((1, 16), (4, 0)):
        with pytest.raises(UsageFault, match="page 0"):
            BlockPool(pages, page_tokens)


def test_b22_every_arena_that_is_too_small_is_named(pool: BlockPool) -> None:
    """The pool is at most as large as what is bound, page 0 included."""
    pool.check_capacity({"k": 101, "v": 200})
    with pytest.raises(UsageFault, match=r"101 pages.*k: 100, v: 7$"):
        pool.check_capacity({"k": 100, "v": 7, "w": 101})


def test_commit_names_the_leading_complete_pages(pool: BlockPool) -> None:
    """A restore with a hole counts up to the hole; the rest is free again."""
    keys = chain(6)
    cache(pool, keys[:2])
    staged = reserved(pool, 4)
    hold = pool.commit(staged, keys[2:], np.array([True, True, False, True]), base=pool.match(keys[:2]))
    assert (hold.hit_pages, pool.free, pool.probe(keys)) == (4, 96, 4)
    assert np.array_equal(hold.keys, keys[:4])
    hold.release()
    with pytest.raises(UsageFault, match="before"):
        staged.release()
    pool.check_books()


def test_a17_commit_prefers_pages_that_came_meanwhile(pool: BlockPool) -> None:
    """Keys registered while the load ran are held where they are; the loaded copies are free."""
    keys = chain(4)
    staged = reserved(pool, 4)
    there = cache(pool, keys[:3])
    hold = pool.commit(staged, keys, 4, base=pool.match(keys[:0]))
    assert hold.pages[:3].tolist() == there
    assert pool.free == 96
    hold.release()
    pool.check_books()


def test_a4_a_late_restore_is_cached(pool: BlockPool) -> None:
    """What lands when nobody waits any more is findable; not so if what it continues is gone (B14)."""
    keys = chain(4)
    cache(pool, keys[:2])
    assert pool.commit_late(reserved(pool, 2), keys[2:], 2, parent=keys[1]) == 2
    assert (pool.held, pool.cached, pool.probe(keys)) == (0, 4, 4)
    pool.check_books()
    other = chain(4, seed=2)
    assert pool.commit_late(reserved(pool, 2), other[2:], 2, parent=other[1]) == 0
    assert pool.commit_late(reserved(pool, 2), other[:2], 1, parent=None) == 1
    assert (pool.free, pool.probe(other)) == (95, 1)
    pool.check_books()


def test_wrong_shapes_are_refused_without_harm(pool: BlockPool) -> None:
    """Keys of another shape, or not one for each staged page, change nothing."""
    staged, base = reserved(pool, 2), pool.match(chain(1))
    with pytest.raises(UsageFault, match="2 staged pages, 3 keys"):
        pool.commit(staged, chain(3), 2, base=base)
    with pytest.raises(UsageFault, match="uint64"):
        pool.match(np.zeros((2, 2)))
    with pytest.raises(UsageFault, match="uint64"):
        pool.probe(np.zeros(4, np.uint64))
    with pytest.raises(UsageFault, match="reservation of 0"):
        pool.reserve(0)
    assert (staged.live, base.live) == (True, True)
    staged.release()


def test_generation_tells_occupants_apart(pool: BlockPool) -> None:
    """A page's generation rises each time it is given out, and only then."""
    before = pool.generation.copy()
    pages = cache(pool, chain(2))
    with pool.match(chain(2)):
        assert (pool.generation[pages] - before[pages]).tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        pool.generation[0] = 1


def test_r8_the_auditor_sees_damage(pool: BlockPool) -> None:
    """check_books names a counter, a reference and a list that disagree."""
    pages = cache(pool, chain(3))
    damages = [
        (lambda books: books.refs.__setitem__(pages[0], 1), "references"),
        (lambda books: books.order.__setitem__((0, 0), pages[0]), "eviction order"),
        (lambda books: books.index.remove(np.array(pages[:1], np.int32)), "unreachable"),
        (lambda books: setattr(books, "cached", 7), "cached is 7"),
    ]
    for damage, named in damages:
        damage(pool._books)
        with pytest.raises(InternalFault, match=named):
            pool.check_books()
