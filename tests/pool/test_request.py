"""RequestKv: admission, chunks, naming of complete pages, release."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import BlockPool, Chunk, FleetSecret, Hold, Keyer, Later, Never, RequestKv, admit

KEYER = Keyer(b"model", FleetSecret(b"s" * 16), 4)


@dataclass
class Prefix:
    """What a store's resolve gives."""

    hold: Hold | None
    hit_tokens: int


@pytest.fixture
def pool() -> BlockPool:
    """20 usable pages of 4 tokens."""
    return BlockPool(21, 4)


def request(
    pool: BlockPool, prompt: int = 10, new: int = 3, prefix: Prefix | None = None, scope: Scope | None = None
) -> RequestKv:
    """An admitted request over tokens 0, 1, 2, ..."""
    answer = admit(
        pool,
        prompt_tokens=range(prompt),
        max_new_tokens=new,
        keyer=KEYER,
        scope=scope or Scope(),
        prefix=prefix,
    )
    assert isinstance(answer, RequestKv)
    return answer


def resolve(pool: BlockPool, tokens: int, scope: Scope | None = None) -> Prefix:
    """The resident prefix of tokens 0, 1, 2, ..."""
    hold = pool.match(KEYER.chain(range(tokens), scope or Scope()))
    return Prefix(hold, 4 * hold.hit_pages)


def prefill(req: RequestKv, max_tokens: int = 100) -> list[Chunk]:
    """Run the prompt; the sampled token is 1000."""
    chunks = []
    while req.committed_tokens < req.prompt_len:
        chunk = req.schedule_prefill(max_tokens)
        req.apply_prefill(chunk, 1000 if chunk.emits else None)
        chunks.append(chunk)
    return chunks


def decode(req: RequestKv) -> list[Chunk]:
    """Decode to the end; sampled tokens are 1001, 1002, ..."""
    chunks = []
    while not req.finished:
        chunk = req.schedule_decode()
        req.apply_decode(chunk, 1001 + len(chunks))
        chunks.append(chunk)
    return chunks


def fail_in_a_step(req: RequestKv) -> None:
    """A forward pass that raises."""
    with req:
        req.schedule_prefill(4)
        raise RuntimeError("forward")


def drop_in_a_step(pool: BlockPool) -> None:
    """A request that is forgotten with a chunk outstanding."""
    request(pool).schedule_prefill(4)
    gc.collect()


def test_b1_lifetime_covers_the_last_sampled_token(pool: BlockPool) -> None:
    """ceil((prompt + max_new) / page): 10 + 3 tokens are 4 pages of 4, though 12 KV rows are written."""
    with request(pool) as req:
        assert (req.lifetime_pages, pool.entitled) == (4, 4)
        prefill(req)
        decode(req)
        assert (req.committed_tokens, len(req.tokens), len(req.pages)) == (12, 13, 3)
        assert req.tokens.tolist() == [*range(10), 1000, 1001, 1002]
    assert (pool.entitled, pool.held) == (0, 0)


def test_b1_the_largest_known_case() -> None:
    """1643 + 512 tokens are 135 pages of 16."""
    pool, keyer = BlockPool(161, 16), Keyer(b"model", FleetSecret(b"s" * 16), 16)
    answer = admit(pool, prompt_tokens=range(1643), max_new_tokens=512, keyer=keyer, scope=Scope())
    assert isinstance(answer, RequestKv)
    assert answer.lifetime_pages == 135
    answer.release()


def test_b10_never_and_later(pool: BlockPool) -> None:
    """What cannot fit is refused with the numbers; what fits later books nothing and says what is missing."""
    common = {"keyer": KEYER, "scope": Scope()}
    never = admit(pool, prompt_tokens=range(80), max_new_tokens=1, **common)
    assert isinstance(never, Never)
    assert "21 pages" in never.reason
    with request(pool, 60, 4):
        assert admit(pool, prompt_tokens=range(19), max_new_tokens=1, **common) == Later(missing_pages=1)
        assert pool.entitled == 16
    assert pool.entitled == 0


def test_b17_the_page_table_covers_exactly_the_step(pool: BlockPool) -> None:
    """Each chunk sees ceil(end / page) pages, no page more."""
    with request(pool, prompt=10, new=8) as req:
        chunks = [*prefill(req, 3), *decode(req)]
    ends = [3, 6, 9, *range(10, 18)]
    assert [chunk.end for chunk in chunks] == ends
    assert [len(chunk.pages["full"]) for chunk in chunks] == [-(-end // 4) for end in ends]
    assert all(0 not in chunk.pages["full"] for chunk in chunks)  # B21
    assert [chunk.token_ids.tolist() for chunk in chunks][:5] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
        [1000],
    ]
    assert [chunk.context_len for chunk in chunks] == [0, *ends[:-1]]


def test_b19_only_the_last_chunk_emits(pool: BlockPool) -> None:
    """A token is due with the last chunk of the prompt and with no other."""
    with request(pool) as req:
        chunk = req.schedule_prefill(6)
        with pytest.raises(UsageFault, match="does not emit"):
            req.apply_prefill(chunk, 5)
        req.apply_prefill(chunk, None)
        chunk = req.schedule_prefill(6)
        assert chunk.emits
        with pytest.raises(UsageFault, match="token None"):
            req.apply_prefill(chunk, None)
        with pytest.raises(UsageFault, match="position 0"):
            req.apply_prefill(chunk, -1)
        req.apply_prefill(chunk, 7)


def test_b19_nothing_registers_before_its_kv_is_written(pool: BlockPool) -> None:
    """Pages are findable from the moment their last row is applied, in prefill and decode."""
    keys = KEYER.chain([*range(10), 1000, 1001, 1002, 1003, 1004, 1005], Scope())
    with request(pool, new=7) as req:
        chunk = req.schedule_prefill(8)
        assert pool.probe(keys) == 0
        req.apply_prefill(chunk, None)
        assert (pool.probe(keys), req.registered) == (2, 2)
        prefill(req)
        assert pool.probe(keys) == 2
        decode(req)
        assert (pool.probe(keys), req.registered) == (4, 4)
        assert np.array_equal(req.keys, keys)
        assert req.scope == Scope()
    assert (pool.cached, pool.probe(keys)) == (4, 4)


@pytest.mark.parametrize("late", [False, True])
def test_b6_a_prefix_is_consumed(pool: BlockPool, late: bool) -> None:
    """Admission with a prefix, or start() after it, begins behind the hit, with its pages as credit."""
    with request(pool) as req:
        prefill(req)
    prefix = resolve(pool, 8)
    with request(pool, prefix=None if late else prefix) as req:
        if late:
            req.start(prefix)
        assert (req.hit_tokens, req.committed_tokens, req.registered) == (8, 8, 2)
        assert pool.entitled == 2
        chunk = req.schedule_prefill(100)
        assert (chunk.start, chunk.token_ids.tolist(), len(chunk.pages["full"])) == (8, [8, 9], 3)
        with pytest.raises(UsageFault, match="started already"):
            req.start(resolve(pool, 0))
        req.revert(chunk)
    with pytest.raises(UsageFault, match="before"):
        request(pool, prefix=prefix)
    pool.check_books()


def test_an_empty_prefix_starts_from_nothing(pool: BlockPool) -> None:
    """A degraded outcome is a smaller hit: no hold, or one of no pages."""
    for prefix in (Prefix(None, 0), resolve(pool, 8)):
        with request(pool, prefix=prefix) as req:
            assert (req.hit_tokens, pool.entitled) == (0, 4)


def test_d1_a_prefix_of_other_content_is_refused(pool: BlockPool) -> None:
    """Another scope, another prompt, another pool, or a length that its pages do not cover."""
    with request(pool, scope=Scope(salt="a")) as req:
        prefill(req)
    with resolve(pool, 8, Scope(salt="a")).hold as hold:
        with pytest.raises(UsageFault, match="another scope"):
            request(pool, prefix=Prefix(hold, 8), scope=Scope(salt="b"))
        with pytest.raises(UsageFault, match="exactly its pages"):
            request(pool, prefix=Prefix(hold, 7), scope=Scope(salt="a"))
        with pytest.raises(UsageFault, match="leave a token"):
            request(pool, prompt=8, prefix=Prefix(hold, 8), scope=Scope(salt="a"))
        with pytest.raises(UsageFault, match="another pool"):
            request(BlockPool(21, 4), prefix=Prefix(hold, 8), scope=Scope(salt="a"))
    assert (pool.held, pool.entitled) == (0, 0)


def test_later_leaves_the_prefix_alone(pool: BlockPool) -> None:
    """A request that must wait keeps its hold."""
    with request(pool) as req:
        prefill(req)
    with request(pool, 60, 8), resolve(pool, 8).hold as hold:
        answer = admit(
            pool,
            prompt_tokens=range(20),
            max_new_tokens=4,
            keyer=KEYER,
            scope=Scope(),
            prefix=Prefix(hold, 4 * hold.hit_pages),
        )
        assert isinstance(answer, Later)
        assert hold.live


def test_d5_bad_requests_are_refused_at_intake(pool: BlockPool) -> None:
    """Token ids, an empty prompt, no new tokens and another page size are named before anything is booked."""
    with pytest.raises(UsageFault, match="-1 at position 1"):
        admit(pool, prompt_tokens=[0, -1], max_new_tokens=1, keyer=KEYER, scope=Scope())
    other = Keyer(b"model", FleetSecret(b"s" * 16), 8)
    with pytest.raises(UsageFault, match=r"empty.*max_new_tokens is 0.*pages of 8"):
        admit(pool, prompt_tokens=[], max_new_tokens=0, keyer=other, scope=Scope())
    assert pool.entitled == 0


def test_revert_returns_the_step_pages(pool: BlockPool) -> None:
    """A reverted step leaves the request and the pool as before, and can be scheduled again."""
    with request(pool) as req:
        for _ in range(3):
            before = pool.gauges()
            chunk = req.schedule_prefill(6)
            assert len(req.pages) == 2
            req.revert(chunk)
            assert (pool.gauges(), len(req.pages), req.committed_tokens) == (before, 0, 0)
        prefill(req)
        chunk = req.schedule_decode()
        req.revert(chunk)
        assert len(req.pages) == 3
        decode(req)
    pool.check_books()


def test_chunks_are_used_once_and_in_order(pool: BlockPool) -> None:
    """One chunk at a time; a stale, foreign or applied one is refused; phases keep their order."""
    with request(pool) as req, request(pool) as other:
        with pytest.raises(UsageFault, match="no decode step"):
            req.schedule_decode()
        with pytest.raises(UsageFault, match="prefill of 0 tokens"):
            req.schedule_prefill(0)
        stale = req.schedule_prefill(4)
        with pytest.raises(UsageFault, match="outstanding"):
            req.schedule_prefill(4)
        with pytest.raises(UsageFault, match="not the outstanding chunk"):
            other.apply_prefill(stale, None)
        req.revert(stale)
        prefill(req)
        for use in (lambda: req.apply_prefill(stale, None), lambda: req.revert(stale)):
            with pytest.raises(UsageFault, match="not the outstanding chunk"):
                use()
        with pytest.raises(UsageFault, match="prefill of 4 tokens"):
            req.schedule_prefill(4)
        decode(req)
        with pytest.raises(UsageFault, match="no decode step"):
            req.schedule_decode()


def test_b16_release_waits_for_the_step_and_happens_once(pool: BlockPool) -> None:
    """A request with a step in flight is not released; one released is not used again."""
    req = request(pool)
    chunk = req.schedule_prefill(4)
    with pytest.raises(UsageFault, match="outstanding"):
        req.release()
    req.revert(chunk)
    req.release()
    with pytest.raises(UsageFault, match="before"):
        req.release()
    with pytest.raises(UsageFault, match="released"):
        req.schedule_prefill(4)


def test_a_request_cannot_leak(pool: BlockPool) -> None:
    """A step that raises, and a request that is dropped, give everything back."""
    req = request(pool)
    with pytest.raises(RuntimeError, match="forward"):
        fail_in_a_step(req)
    assert (req.released, pool.held, pool.entitled) == (True, 0, 0)
    del req
    with pytest.warns(ResourceWarning, match="was dropped"):
        drop_in_a_step(pool)
    assert (pool.held, pool.entitled) == (0, 0)
    pool.check_books()


def test_b15_two_requests_of_one_prompt_keep_their_own_pages(pool: BlockPool) -> None:
    """Side by side they never share a page; afterwards one copy stays."""
    with request(pool) as first, request(pool) as second:
        for req in (first, second):
            prefill(req)
        assert not set(first.pages.tolist()) & set(second.pages.tolist())
        for req in (first, second):
            decode(req)
    assert (pool.cached, pool.free) == (3, 17)
    pool.check_books()
