"""Holds: what they may take, what they are worth, what they become."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import KEYER, Prefix, admitted, cache, chain, decode, prefill, request, reserved

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import BlockPool, Hold


@pytest.fixture
def pool() -> BlockPool:
    """100 usable pages of 4 tokens."""
    return BlockPool(101, 4)


def with_boundary(pool: BlockPool, keys: np.ndarray, key: np.ndarray) -> Hold:
    """A restored prefix of `keys` pages that ends in a partial one, held."""
    names = np.concatenate([keys, key[None]])
    return pool.commit(
        reserved(pool, len(names)), names, len(names), base=pool.match(keys[:0]), boundary=True
    )


def test_b5_holds_taken_late_leave_what_is_promised(pool: BlockPool) -> None:
    """Probes before and after admission, a restore's commit, a late one: every admitted draw succeeds."""
    keys, other = chain(60), chain(20, seed=2)
    cache(pool, keys)
    early = pool.match(keys[:10])
    request_a = admitted(pool, 50)
    staged, late = reserved(pool, 10), reserved(pool, 10)
    cache_hit = pool.match(keys)
    held = pool.commit(staged, other[:10], 10, base=pool.match(other[:0]))
    pool.commit_late(late, other[10:], 10, parent=other[9])
    more = [pool.match(keys), pool.match(other), pool.match(keys[:30])]
    assert pool.available >= pool.entitled == 50
    assert pool.reserve(pool.budget() + 1) is None
    assert len(pool.draw(request_a, 50)) == 50  # B11
    pool.check_books()
    for handle in (early, request_a, cache_hit, held, *more):
        handle.release()
    assert (pool.held, pool.entitled) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(
    cached=st.integers(0, 40), promised=st.integers(0, 40), probes=st.lists(st.integers(0, 40), max_size=5)
)
def test_b5_no_series_of_probes_reaches_the_promise(cached: int, promised: int, probes: list[int]) -> None:
    """However much is matched, available never falls below what is entitled."""
    pool, keys = BlockPool(41, 4), chain(40)
    if cached:
        cache(pool, keys[:cached])
    draws = admitted(pool, promised)
    holds = []
    for count in probes:
        holds.append(pool.match(keys[:count]))
        assert pool.available >= pool.entitled
    assert len(pool.draw(draws, promised)) == promised
    for handle in (*holds, draws):
        handle.release()


def test_b6_credit_is_what_the_hold_pins(pool: BlockPool) -> None:
    """The pool counts; a hold trimmed meanwhile is worth less, one of another pool or spent is an error."""
    keys = chain(30)
    cache(pool, keys)
    hold = pool.match(keys)
    hold.trim(20)
    blocker = admitted(pool, 40)
    assert pool.budget(hold) == 100 - 20 - 40 + 20
    assert pool.try_admit(61, hold) is None
    taken = admitted(pool, 60, hold)
    assert (taken.remaining_pages, pool.entitled) == (40, 80)
    with pytest.raises(UsageFault, match="before"):
        pool.budget(hold)
    with pytest.raises(UsageFault, match="another pool"):
        BlockPool(101, 4).budget(taken)  # type: ignore[arg-type]
    for handle in (blocker, taken):
        handle.release()


def test_b7_a_boundary_page_credits_nothing(pool: BlockPool) -> None:
    """An unaligned prefix of 5 pages and a partial one is worth 5; its partial page becomes a copy source."""
    keys, key = chain(5), chain(1, seed=9)[0]
    with_boundary(pool, keys, key).release()
    hold = pool.match(keys, boundary=key)
    assert (hold.hit_pages, len(hold.pages)) == (5, 6)
    blocker = admitted(pool, 90)
    assert pool.budget() == 4
    assert pool.budget(hold) == 9
    assert pool.try_admit(10, hold) is None
    source = int(hold.pages[5])
    taken = admitted(pool, 9, hold)
    assert (taken.registered_pages, len(taken.pages), pool.entitled) == (5, 6, 90 + 3)
    assert taken.copies == ((source, int(taken.pages[5])),)
    assert source not in taken.pages
    pool.copied(taken)
    assert taken.copies == ()
    with pool.match(keys, boundary=key) as again:
        assert int(again.pages[5]) == source  # it stays matchable
    for handle in (blocker, taken):
        handle.release()
    pool.check_books()
    assert (pool.held, pool.pinned_blocks) == (0, 0)


def test_b7_e4_the_source_stays_until_the_copy_is_made(pool: BlockPool) -> None:
    """Whatever else needs pages, the source is not issued again before `copied` (E4)."""
    keys, key = chain(2), chain(1, seed=9)[0]
    hold = with_boundary(pool, keys, key)
    source = int(hold.pages[2])
    taken = admitted(pool, 3, hold)
    everything = admitted(pool, 96)
    assert source not in pool.draw(everything, 96)
    assert pool.pinned_blocks == 1
    with pytest.raises(UsageFault, match="still to be copied"):
        pool.register(taken, chain(1, seed=3))
    with pytest.raises(UsageFault, match="not yours"):
        pool.retract(taken, taken.pages[2:].copy())
    pool.copied(taken)
    assert (pool.pinned_blocks, pool.cached) == (0, 1)
    for handle in (everything, taken):
        handle.release()
    pool.check_books()


def test_b7_a_request_that_ends_early_lets_its_source_go(pool: BlockPool) -> None:
    """Released with the copy still to be made, nothing stays pinned."""
    hold = with_boundary(pool, chain(2), chain(1, seed=9)[0])
    admitted(pool, 5, hold).release()
    assert (pool.held, pool.pinned_blocks, pool.cached) == (0, 0, 3)
    pool.check_books()


def test_b7_a_partial_page_is_the_end(pool: BlockPool) -> None:
    """Nothing is restored behind a partial page, and trimming the full pages takes it too."""
    keys, key = chain(3), chain(1, seed=9)[0]
    hold = with_boundary(pool, keys, key)
    with reserved(pool, 1) as staged, pytest.raises(UsageFault, match="partial page"):
        pool.commit(staged, chain(1, seed=4), 1, base=hold)
    with pytest.raises(UsageFault, match="lifetime of 3"):
        pool.try_admit(3, hold)
    taken = hold.take()
    taken.trim(3)
    assert taken.boundary_key is not None
    taken.trim(2)
    assert (taken.boundary_key, taken.hit_pages, len(taken.pages)) == (None, 2, 2)
    taken.release()
    with pool.match(keys[:2], boundary=key) as other:  # a partial page follows its own prefix only
        assert (other.hit_pages, other.boundary_key) == (2, None)
    pool.check_books()


def test_b7_a_whole_prompt_is_taken_over_with_its_anchor(pool: BlockPool) -> None:
    """A prompt of 10 tokens, all resident: the boundary page is copied, the first step runs the anchor."""
    keys = KEYER.chain(range(10), Scope())
    key = KEYER.partial(keys[-1], [8, 9], Scope(), committed_tokens=10, anchor=77)
    hold = with_boundary(pool, keys, key)
    with request(pool, 10, 4, prefix=Prefix(hold, 10), anchor=77) as req:
        assert (req.hit_tokens, req.committed_tokens, req.new_tokens) == (10, 10, 1)
        assert not req.prefilling
        chunk = req.schedule_decode()
        assert chunk.token_ids.tolist() == [77]
        assert len(chunk.copies["full"]) == 1
        assert chunk.copies["full"][0][1] == chunk.pages["full"][2]
        req.revert(chunk)
        assert pool.pinned_blocks == 1
        chunk = req.schedule_speculative([5, 6])
        assert len(chunk.copies["full"]) == 1
        req.apply_speculative(chunk, [5, 9])
        assert pool.pinned_blocks == 0
        assert decode(req)[0].copies == {}
        natural = KEYER.chain(req.tokens[:12], Scope())
        assert np.array_equal(req.keys, natural)  # D7: named as any other page once it is full
    pool.check_books()


def test_b7_an_aligned_whole_prompt_has_no_boundary_page(pool: BlockPool) -> None:
    """A prompt of whole pages is taken over without a copy, and needs its anchor for that (G2, G4)."""
    with request(pool, 8, 4) as req:
        prefill(req)
    keys = KEYER.chain(range(8), Scope())
    with pool.match(keys) as hold, pytest.raises(UsageFault, match="leave a token"):
        request(pool, 8, 4, prefix=Prefix(hold, 8))
    with request(pool, 8, 1, prefix=Prefix(pool.match(keys), 8), anchor=3) as req:
        assert req.finished
        assert req.tokens.tolist() == [*range(8), 3]
    with request(pool, 8, 4) as req:
        req.start(Prefix(pool.match(keys), 8), anchor=3)
        assert req.schedule_decode().copies == {}


def test_d7_a_boundary_page_serves_its_own_anchor_only(pool: BlockPool) -> None:
    """The name covers length and anchor: another anchor, or none, is refused (D1)."""
    keys = KEYER.chain(range(10), Scope())
    key = KEYER.partial(keys[-1], [8, 9], Scope(), committed_tokens=10, anchor=77)
    hold = with_boundary(pool, keys, key)
    with pytest.raises(UsageFault, match="other tokens"):
        request(pool, 10, 4, prefix=Prefix(hold, 10), anchor=78)
    with pytest.raises(UsageFault, match="all of it"):
        request(pool, 12, 4, prefix=Prefix(hold, 10), anchor=77)
    with pytest.raises(UsageFault, match="other tokens"):
        request(pool, 12, 4, prefix=Prefix(hold, 10))
    hold.release()


def test_b9_the_budget_is_available_minus_entitled_plus_credit(pool: BlockPool) -> None:
    """Pins are out of available already: saving a page, once or twice, changes no budget."""
    with request(pool, 40, 40) as req:
        prefill(req)
        before = pool.budget()
        assert before == pool.gauges().budget == 100 - 20
        pages = req.pages.copy()
        pool.pin(pages)
        pool.pin(pages)
        assert (pool.budget(), pool.pinned_blocks) == (before, 10)
    assert (pool.budget(), pool.cached) == (90, 0)
    hold = pool.match(KEYER.chain(range(40), Scope()))
    assert pool.budget(hold) == 100
    admitted(pool, 100, hold).release()
    pool.unpin(pages)
    pool.unpin(pages)
    assert (pool.budget(), pool.pinned_blocks) == (100, 0)


def test_b10_zero_and_too_many(pool: BlockPool) -> None:
    """A branch or a request beyond the whole pool can never be; one of no pages always can."""
    with admitted(pool, 100) as everything, admitted(pool, 0) as nothing:
        assert pool.fork(nothing, 0, shared_pages=0, copied_pages=0) is not None
        assert pool.fork(everything, 1, shared_pages=0, copied_pages=0) is None
        assert "101" in str(pool.fork(nothing, 101, shared_pages=0, copied_pages=0))
