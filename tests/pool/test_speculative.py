"""Speculative steps: reserve, accept, reject, truncate, revert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import SECRET, books_of, decode, next_token, prefill, request

from kvcontract.contract.errors import UsageFault
from kvcontract.pool import BlockPool, Keyer, RequestKv

KEYER_16 = Keyer(b"model", SECRET, 16)


@pytest.fixture
def pool() -> BlockPool:
    """20 usable pages of 4 tokens."""
    return BlockPool(21, 4)


def verify(req: RequestKv, drafts: list[int]) -> list[int]:
    """What the "model" says at each row of a verify step: accepted drafts, then its own token."""
    said: list[int] = []
    known = req.tokens.astype(np.int64)
    for draft in [*drafts, None]:
        total = int(known.sum()) + sum(said)
        said.append((total * 31 + len(known) + len(said)) % 1000 + 1000)
        if said[-1] != draft:
            break
    return said


def true_drafts(req: RequestKv, count: int) -> list[int]:
    """Drafts that the "model" will accept."""
    drafts: list[int] = []
    for _ in range(count):
        drafts = verify(req, drafts)[: len(drafts) + 1]
    return drafts


def speculate(req: RequestKv, rng: np.random.Generator, width: int) -> Iterator[int]:
    """Decode to the end in verify steps of random luck; yields the drafts of each."""
    while not req.finished:
        drafts = true_drafts(req, width)
        good = int(rng.integers(0, width + 1))
        drafts[good:] = [1] * (width - good)
        chunk = req.schedule_speculative(drafts)
        accepted = verify(req, drafts[: chunk.drafts])
        assert req.apply_speculative(chunk, accepted) == tuple(accepted)
        yield chunk.drafts


def state_of(req: RequestKv) -> tuple[object, ...]:
    """What a step that came to nothing must leave alone."""
    return req.pages.tolist(), req.tokens.tolist(), req.committed_tokens, req.keys.tolist()


def test_b1_verify_spans_are_clipped_to_the_lifetime() -> None:
    """Prompt 1643 + 512 new = 135 pages of 16; 17-wide spans at the end never draw a 136th."""
    pool = BlockPool(136, 16)  # room for exactly that
    with request(pool, 1643, 512, keyer=KEYER_16) as req:
        assert req.lifetime_pages == 135
        prefill(req)
        for _ in speculate(req, np.random.default_rng(0), 16):
            assert len(req.pages) <= 135
        assert req.new_tokens == 512
        assert req.committed_tokens == 1643 + 511


def test_b1_a_span_ends_where_nothing_is_left_to_sample(pool: BlockPool) -> None:
    """Of many drafts those are run that can still be sampled: with one token left, none."""
    with request(pool, 10, 4) as req:
        prefill(req)
        chunk = req.schedule_speculative([1] * 100)
        assert (chunk.drafts, len(chunk.token_ids), chunk.end) == (2, 3, 13)
        req.revert(chunk)
        decode(req, 2)
        chunk = req.schedule_speculative([1] * 100)
        assert chunk.drafts == 0
        req.apply_speculative(chunk, [5])
        assert req.finished


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(1, 24), new=st.integers(1, 30), width=st.integers(0, 9), seed=st.integers(0, 2**32 - 1)
)
def test_b18_speculative_equals_plain(prompt: int, new: int, width: int, seed: int) -> None:
    """Any luck with any drafts gives the tokens, keys and page count that plain decoding gives."""
    pool = BlockPool(60, 4)
    with request(pool, prompt, new) as plain, request(pool, prompt, new) as fast:
        prefill(plain)
        prefill(fast)
        decode(plain)
        for _ in speculate(fast, np.random.default_rng(seed), width):
            assert len(fast.pages) == -(-fast.committed_tokens // 4)  # rejected tail pages are back
            pool.check_books()
        assert fast.tokens.tolist() == plain.tokens.tolist()
        assert np.array_equal(fast.keys, plain.keys)
        assert len(fast.pages) == len(plain.pages)
    assert (pool.held, pool.entitled) == (0, 0)


def test_b18_rejected_tail_pages_return_last_in_first_out(pool: BlockPool) -> None:
    """Pages drawn for rejected rows come back so that the next draw gives the same ones in the same order."""
    with request(pool, 8, 20) as req:
        prefill(req)
        chunk = req.schedule_speculative([1] * 12)
        drawn = chunk.pages["full"][2:].tolist()
        assert len(drawn) == 4
        req.apply_speculative(chunk, [7])
        assert len(req.pages) == 3
        chunk = req.schedule_speculative([1] * 11)
        assert chunk.pages["full"][2:].tolist() == drawn
        req.revert(chunk)


def test_b18_an_end_of_sequence_inside_the_accepted_run_truncates_it(pool: BlockPool) -> None:
    """What follows the end was never sampled: no token, no row, no page of it stays."""
    with request(pool, 8, 20) as req:
        prefill(req)
        chunk = req.schedule_speculative([11, 12, 13, 14, 15])
        kept = req.apply_speculative(chunk, [11, 12, 13, 14, 15, 16], stop_token_ids={12, 14})
        assert kept == (11, 12)
        assert req.tokens.tolist()[-2:] == [11, 12]
        assert (req.committed_tokens, len(req.pages), req.registered) == (10, 3, 2)


@pytest.mark.parametrize("width", [0, 3, 12])
def test_b18_a_failed_step_reverts_to_the_byte(pool: BlockPool, width: int) -> None:
    """A verify step that came to nothing leaves request and books exactly as before."""
    with request(pool, 10, 16) as req:
        prefill(req)
        before = (
            books_of(pool),
            req.pages.tolist(),
            req.tokens.tolist(),
            req.committed_tokens,
            req.keys.tolist(),
        )
        req.revert(req.schedule_speculative([1] * width))
        after = (
            books_of(pool),
            req.pages.tolist(),
            req.tokens.tolist(),
            req.committed_tokens,
            req.keys.tolist(),
        )
        assert after == before


def test_b19_rejected_rows_never_complete_a_page(pool: BlockPool) -> None:
    """A page is named when the accepted tokens fill it, whatever the step wrote."""
    with request(pool, 10, 16) as req:
        prefill(req)
        chunk = req.schedule_speculative([21, 22, 23, 24, 25])
        req.apply_speculative(chunk, [9])
        assert (req.committed_tokens, req.registered) == (11, 2)
        chunk = req.schedule_speculative([21, 22, 23])
        req.apply_speculative(chunk, [21, 22, 8])
        assert (req.committed_tokens, req.registered) == (14, 3)


def test_impossible_answers_are_refused(pool: BlockPool) -> None:
    """Tokens that a verify step cannot give, or a plain apply of it, change nothing."""
    with request(pool, 10, 8) as req:
        prefill(req)
        with pytest.raises(UsageFault, match="-1 at position 0"):
            req.schedule_speculative([-1])
        chunk = req.schedule_speculative([1, 2])
        for tokens in ([], [3, 9], [1, 2, 3, 4], [1, 3, 4]):
            with pytest.raises(UsageFault, match="accepted drafts"):
                req.apply_speculative(chunk, tokens)
        with pytest.raises(UsageFault, match="2 drafts"):
            req.apply_decode(chunk, 1)
        assert req.apply_speculative(chunk, [1, 2, 3]) == (1, 2, 3)


@pytest.mark.parametrize("identical", [True, False])
def test_b12_twenty_requests_leave_available_at_its_baseline(identical: bool) -> None:
    """161 blocks of 16, prompt 1643, 512 new, 17-wide verify spans, retention off: nothing stays behind."""
    pool = BlockPool(161, 16, retention=False)
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 1000, 1643)
    for _ in range(20):
        baseline = pool.available
        assert baseline == 160
        with request(pool, prompt if identical else rng.integers(0, 1000, 1643), 512, keyer=KEYER_16) as req:
            prefill(req, 512)
            steps = sum(1 for _ in speculate(req, rng, 16))
            assert steps < 512
        assert pool.available == pool.free == baseline
    pool.check_books()


def test_b12_reuse_is_unchanged_with_retention_on() -> None:
    """The same requests with retention on start from the pages of the first."""
    pool = BlockPool(161, 16)
    prompt = np.random.default_rng(3).integers(0, 1000, 1643)
    with request(pool, prompt, 4, keyer=KEYER_16) as req:
        prefill(req)
    with pool.match(KEYER_16.chain(prompt, req.scope)) as hold:
        assert hold.hit_pages == 1643 // 16
    assert next_token(req) >= 1000
