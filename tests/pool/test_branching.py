"""Fork, preempt and resume, reset marks: what becomes of pages that several requests have to do with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import KEYER, Prefix, admitted, cache, chain, decode, prefill, request, reserved, resolve

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import BlockPool, Later, RequestKv


@pytest.fixture
def pool() -> BlockPool:
    """40 usable pages of 4 tokens."""
    return BlockPool(41, 4)


def forked(req: RequestKv, last_token: int | None = None) -> RequestKv:
    """A branch that must fit."""
    answer = req.fork(last_token)
    assert isinstance(answer, RequestKv)
    return answer


# B23


def test_b23_full_pages_are_shared_and_the_partial_one_is_copied(pool: BlockPool) -> None:
    """N = 3 after a prompt of 10: two full pages in common, the third page copied before the first write."""
    with request(pool, 10, 6) as req:
        prefill(req)
        with forked(req, 501) as second, forked(req, 502) as third:
            for branch, token in ((second, 501), (third, 502)):
                assert branch.tokens.tolist() == [*range(10), token]
                assert branch.pages[:2].tolist() == req.pages[:2].tolist()
                assert branch.pages[2] not in req.pages
                assert branch.committed_tokens == 10
                chunk = branch.schedule_decode()
                assert chunk.copies == {"full": ((int(req.pages[2]), int(branch.pages[2])),)}
                assert chunk.token_ids.tolist() == [token]
                branch.apply_decode(chunk, 600)
                chunk = branch.schedule_decode()
                assert chunk.copies == {}
                branch.revert(chunk)
            assert len({int(each.pages[2]) for each in (req, second, third)}) == 3
            assert pool.held == 2 + 3
            pool.check_books()
    assert (pool.held, pool.entitled, pool.pinned_blocks) == (0, 0, 0)


def test_b23_an_aligned_branch_copies_nothing(pool: BlockPool) -> None:
    """At a page boundary everything is shared."""
    with request(pool, 8, 6) as req:
        prefill(req)
        with forked(req) as branch:
            assert branch.tokens.tolist() == req.tokens.tolist()
            chunk = branch.schedule_decode()
            assert chunk.copies == {}
            branch.revert(chunk)


def test_b23_each_branch_releases_its_own(pool: BlockPool) -> None:
    """Shared pages stay until the last branch ends, whichever that is; then they are cached once."""
    req = request(pool, 10, 9)
    prefill(req)
    branches = [forked(req, 500 + n) for n in range(3)]
    for branch in branches:
        decode(branch)
    keys = [branch.keys.copy() for branch in branches]
    req.release()
    for branch in branches:
        assert pool.probe(KEYER.chain(range(8), Scope())) == 2
        branch.release()
        pool.check_books()
    assert (pool.held, pool.entitled) == (0, 0)
    assert [pool.probe(each) for each in keys] == [4, 4, 4]
    assert pool.cached == 2 + 3 * 2


def test_b23_the_source_outlives_its_owner_until_the_copy_is_made(pool: BlockPool) -> None:
    """The parent goes on, and ends, before the branch has run: what it will copy is not issued again."""
    with request(pool, 10, 4) as req:
        prefill(req)
        branch = forked(req, 501)
        source = int(req.pages[2])
        decode(req)
    rest = admitted(pool, pool.budget())
    assert source not in pool.draw(rest, rest.remaining_pages)
    chunk = branch.schedule_decode()
    assert chunk.copies["full"][0][0] == source
    branch.apply_decode(chunk, 9)
    assert pool.pinned_blocks == 0
    for handle in (rest, branch):
        handle.release()
    pool.check_books()


def test_b23_a_branch_has_a_promise_of_its_own(pool: BlockPool) -> None:
    """Without room it is Later, with the pages that are short, and nothing has changed (B2)."""
    with request(pool, 10, 60) as req, request(pool, 60, 20):
        prefill(req)
        before = pool.gauges()
        assert req.fork() == Later(18 - 2 - 2)
        assert pool.gauges() == before


def test_b23_beams_fork_from_branches(pool: BlockPool) -> None:
    """A beam that is taken further forks again, and its losers end."""
    live = [request(pool, 6, 12)]
    prefill(live[0])
    for step in range(8):
        best = live[step % len(live)]
        live.append(forked(best, 700 + step))
        if len(live) > 3:
            live.pop(0).release()
        for branch in live:
            decode(branch, 1)
        pool.check_books()
    for branch in live:
        branch.release()
    assert (pool.held, pool.entitled, pool.pinned_blocks) == (0, 0, 0)
    pool.check_books()


def test_b23_forks_that_cannot_be_are_refused(pool: BlockPool) -> None:
    """In a step, with copies of its own to be made, when finished, or without a token to replace."""
    with request(pool, 10, 2) as req:
        with pytest.raises(UsageFault, match="no sampled token"):
            req.fork(5)
        chunk = req.schedule_prefill(4)
        with pytest.raises(UsageFault, match="outstanding"):
            req.fork()
        req.apply_prefill(chunk, None)
        prefill(req)
        with forked(req, 8) as branch, pytest.raises(UsageFault, match="to be copied"):
            branch.fork(9)
        with pytest.raises(UsageFault, match="-1 at position 0"):
            req.fork(-1)
        decode(req)
        with pytest.raises(UsageFault, match="finished"):
            req.fork()
    entitlement = admitted(pool, 2)
    with pytest.raises(UsageFault, match="cannot share 1"):
        pool.fork(entitlement, 2, shared_pages=1, copied_pages=0)
    entitlement.release()


# B20


def test_b20_preempt_gives_everything_back_and_resume_goes_on(pool: BlockPool) -> None:
    """Tokens stay; resident pages are kept; the rest is prefilled again, then decoding goes on."""
    with request(pool, 10, 12) as plain:
        prefill(plain)
        decode(plain)
        expected, keys = plain.tokens.tolist(), plain.keys.copy()
    pool.set_retention(on=False)
    pool.set_retention(on=True)
    with request(pool, 10, 12) as req:
        prefill(req)
        decode(req, 5)
        req.preempt()
        assert (pool.held, pool.entitled, pool.cached) == (0, 0, 3)
        assert (req.preempted, req.released, req.pages.size, req.registered) == (True, True, 0, 0)
        assert req.resume() is None
        assert (req.committed_tokens, req.registered, pool.entitled) == (12, 3, 6 - 3)
        assert req.prefilling
        chunks = prefill(req, 3)
        assert [(chunk.token_ids.tolist(), chunk.emits) for chunk in chunks] == [(expected[12:15], False)]
        assert decode(req)[0].token_ids.tolist() == expected[15:16]
        assert req.tokens.tolist() == expected
        assert np.array_equal(req.keys, keys)
    pool.check_books()


def test_b20_what_was_evicted_is_recomputed(pool: BlockPool) -> None:
    """With nothing resident any more, resume starts from the first token."""
    with request(pool, 10, 12) as req:
        prefill(req)
        decode(req, 5)
        expected = req.tokens.tolist()
        req.preempt()
        with admitted(pool, 40) as other:
            pool.draw(other, 40)
        assert req.resume() is None
        assert (req.committed_tokens, req.registered) == (0, 0)
        assert req.schedule_prefill(99).token_ids.tolist() == expected


def test_b20_resume_is_all_or_nothing(pool: BlockPool) -> None:
    """Without room for the whole lifetime nothing is taken, and asking again later works."""
    req = request(pool, 10, 12)
    prefill(req)
    req.preempt()
    with admitted(pool, 37):
        before = pool.gauges()
        assert req.resume() == Later(6 - 3)
        assert pool.gauges() == before
        with pytest.raises(UsageFault, match="preempted; resume it"):
            req.schedule_prefill(1)
    assert req.resume() is None
    req.release()
    assert (pool.held, pool.entitled) == (0, 0)


def test_b20_a_store_may_give_the_prefix(pool: BlockPool) -> None:
    """Pages restored meanwhile are taken as at the start; one of other tokens is refused."""
    with request(pool, 10, 12) as req:
        prefill(req)
        req.preempt()
        prefix = resolve(pool, 8)
        with resolve(pool, 0).hold as other, pytest.raises(UsageFault, match="exactly its pages"):
            req.resume(Prefix(other, 4))
        assert req.resume(prefix) is None
        assert not prefix.hold.live
        assert (req.committed_tokens, req.registered) == (8, 2)


def test_b20_the_wrong_moment_is_refused(pool: BlockPool) -> None:
    """In a step, twice, when finished, or without a preemption; a preempted request can simply end."""
    req = request(pool, 10, 1)
    with pytest.raises(UsageFault, match="only a preempted"):
        req.resume()
    chunk = req.schedule_prefill(4)
    with pytest.raises(UsageFault, match="outstanding"):
        req.preempt()
    req.revert(chunk)
    req.preempt()
    with pytest.raises(UsageFault, match="preempted"):
        req.preempt()
    req.resume()
    prefill(req)
    with pytest.raises(UsageFault, match="finished"):
        req.preempt()
    req.release()
    with request(pool, 10, 1) as req:
        req.preempt()
    assert not req.preempted
    with pytest.raises(UsageFault, match="before"):
        req.release()


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(1, 20),
    new=st.integers(1, 20),
    stops=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=6),
)
def test_b20_preemption_changes_no_token(prompt: int, new: int, stops: list[tuple[int, int]]) -> None:
    """Preempted at any moments, with any amount evicted between, a request says what it would have said."""
    pool = BlockPool(21, 4)
    with request(pool, prompt, new) as req:
        prefill(req)
        decode(req)
        expected = req.tokens.tolist()
    with request(pool, prompt, new) as req:
        for steps, taken in stops:
            prefill(req, 3) if req.prefilling else decode(req, steps)
            if req.finished:
                break
            req.preempt()
            with admitted(pool, taken) as other:
                pool.draw(other, taken)
            assert req.resume() is None
            pool.check_books()
        prefill(req)
        decode(req)
        assert req.tokens.tolist() == expected


# B13


def test_b13_marked_pages_are_freed_where_others_would_be_cached(pool: BlockPool) -> None:
    """A request that is not to be reused leaves nothing of its own; what it started from stays."""
    cache(pool, KEYER.chain(range(8), Scope()))
    with request(pool, 20, 4, prefix=resolve(pool, 8)) as req:
        req.mark_reset()
        prefill(req)
        assert pool.probe(KEYER.chain(range(20), Scope())) == 5
    assert pool.probe(KEYER.chain(range(20), Scope())) == 2
    assert (pool.cached, pool.free) == (2, 38)
    pool.check_books()


def test_b13_a_mark_never_leaks_to_the_next_occupant(pool: BlockPool) -> None:
    """The pages of a marked request, given to another, are cached like any."""
    with request(pool, 16, 4) as req:
        req.mark_reset(0)
        prefill(req)
        marked = set(req.pages.tolist())
    with request(pool, [9] * 16, 4) as req:
        prefill(req)
        assert marked & set(req.pages.tolist())
    assert pool.cached == 4
    assert not pool._books.reset[pool._books.refs > 0].any()
    pool.check_books()


def test_b13_a_mark_is_lifted_with_the_request_that_set_it(pool: BlockPool) -> None:
    """Retracted pages carry no mark; preempted and resumed, the request is marked still."""
    with request(pool, 8, 8) as req:
        prefill(req)
        req.mark_reset()
        req.revert(req.schedule_speculative([1] * 7))
        with request(pool, [3] * 8, 1) as other:
            prefill(other)
        assert pool.cached == 2
        req.preempt()
        assert pool.cached == 2
        with pytest.raises(UsageFault, match="before"):
            req.mark_reset()
        req.resume()
        prefill(req)
    assert pool.cached == 2
    entitlement = admitted(pool, 1)
    with pytest.raises(UsageFault, match="page -1"):
        pool.mark_reset(entitlement, -1)
    entitlement.release()


def test_b13_what_hangs_on_a_marked_page_goes_with_it(pool: BlockPool) -> None:
    """Others built on pages that turn out unwanted: nothing stays resident and unreachable (B14)."""
    with request(pool, 16, 4) as first:
        first.mark_reset(0)
        prefill(first)
        with request(pool, 24, 4, prefix=resolve(pool, 16)) as second:
            prefill(second)
            third = request(pool, [*range(16), 7, 7, 7, 7], 4, prefix=resolve(pool, 16))
            prefill(third)
        assert pool.cached == 2
    assert pool.cached == 2  # still in use by the third
    third.release()
    assert (pool.cached, pool.free) == (0, 40)
    pool.check_books()


def test_b13_a_save_of_a_marked_page_ends_first(pool: BlockPool) -> None:
    """A pinned page is freed when its pin goes (C1)."""
    keys = chain(3)
    entitlement = admitted(pool, 3)
    pages = pool.draw(entitlement, 3)
    pool.register(entitlement, keys)
    pool.mark_reset(entitlement)
    pool.pin(pages[1:])
    pool.release(entitlement)
    assert (pool.free, pool.held) == (38, 2)
    pool.unpin(pages[1:])
    assert (pool.free, pool.cached) == (40, 0)
    pool.check_books()


# B12


def test_b12_turning_retention_off_drains_once_and_keeps_what_is_used(pool: BlockPool) -> None:
    """At run time: the cache empties, active requests go on, their pages are free when they end."""
    cache(pool, chain(10))
    with request(pool, 10, 4) as req, request(pool, 10, 4) as twin:
        prefill(req)
        prefill(twin)
        pool.set_retention(on=False)
        assert (pool.cached, pool.probe(KEYER.chain(range(10), Scope()))) == (0, 2)
        pool.pin(req.pages[:2].copy())
        saved = req.pages[:2].copy()
    assert pool.free == 38
    pool.unpin(saved)
    assert pool.free == 40
    staged = reserved(pool, 2)
    pool.commit_late(staged, chain(2), 2, parent=None)
    assert pool.free == 40
    pool.set_retention(on=True)
    cache(pool, chain(10))
    assert pool.cached == 10


def test_b12_the_canonical_primary_behind_a_duplicate_is_reset_too(pool: BlockPool) -> None:
    """Twins side by side, first or second released first: every page is free, none stays named."""
    pool.set_retention(on=False)
    for order in ((0, 1), (1, 0)):
        twins = [request(pool, 10, 4), request(pool, 10, 4)]
        for twin in twins:
            prefill(twin)
        for number in order:
            twins[number].release()
        assert pool.free == 40
        assert pool.probe(KEYER.chain(range(10), Scope())) == 0
        pool.check_books()
