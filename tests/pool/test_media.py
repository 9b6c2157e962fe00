"""Media items: extra identity of pages, and spans that nothing cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import KEYER, Prefix, prefill, request

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.pool import BlockPool, Later, Media, MediaItem, RequestKv

CAT, DOG = b"cat" * 8, b"dog" * 8


@pytest.fixture
def pool() -> BlockPool:
    """40 usable pages of 4 tokens."""
    return BlockPool(41, 4)


def keys_with(*items: MediaItem, tokens: int = 24) -> np.ndarray:
    """Keys of a prompt with items."""
    return KEYER.chain(range(tokens), Scope(), extras=Media(items, tokens).extras(4, tokens // 4))


def test_d1_a_digest_reaches_the_key_of_every_page_it_touches() -> None:
    """Equal tokens, another image: keys differ from the first page of the item on, and agree before."""
    cat, dog = keys_with(MediaItem(CAT, 6, 7)), keys_with(MediaItem(DOG, 6, 7))
    assert (cat == dog).all(axis=1).tolist() == [True] + [False] * 5
    assert sorted(Media([MediaItem(CAT, 6, 7)], 24).extras(4, 6)) == [1, 2, 3]


def test_d1_where_an_item_lies_is_part_of_identity() -> None:
    """One digest at another offset, of another length, or cut in two: other keys, though tokens are equal."""
    forms = [
        [MediaItem(CAT, 4, 8)],
        [MediaItem(CAT, 5, 7)],
        [MediaItem(CAT, 4, 7)],
        [MediaItem(CAT, 4, 4), MediaItem(CAT, 8, 4)],
        [MediaItem(CAT, 4, 8, uncut=False)],
    ]
    last = [keys_with(*items)[-1].tobytes() for items in forms]
    assert len(set(last)) == 4
    assert last[0] == last[4]  # how it is computed is no identity


def test_items_that_cannot_be_are_all_named() -> None:
    """No digest, outside the prompt, overlapping: each is named."""
    items = [MediaItem(b"", 0, 4), MediaItem(CAT, 2, 4), MediaItem(CAT, 20, 5), MediaItem(CAT, 8, 0)]
    with pytest.raises(UsageFault, match=r"0 bytes.*overlaps.*item at 8.*not within.*item at 20.*not within"):
        Media(items, 24)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=4),
    tail=st.integers(1, 9),
    chunk=st.integers(9, 20),
)
def test_b19_chunks_and_named_prefixes_cut_no_item(
    spans: list[tuple[int, int, bool]], tail: int, chunk: int
) -> None:
    """Whatever the items, no chunk and no registered prefix ends inside an uncut one."""
    items, at = [], 0
    for gap, size, uncut in spans:
        items.append(MediaItem(CAT, at + gap, size, uncut))
        at += gap + size
    media = Media(items, at + tail)
    inside = {p for item in items if item.uncut for p in range(item.start + 1, item.end)}
    pool = BlockPool(41, 4)
    with request(pool, at + tail, 4, media=items) as req:
        ends = []
        while req.prefilling:
            assert req.least_prefill_tokens <= 9
            step = req.schedule_prefill(chunk)
            ends.append(step.end)
            assert len(step.token_ids) <= chunk
            req.apply_prefill(step, 1 if step.emits else None)
            assert 4 * req.registered not in inside
        assert not set(ends) & inside
        assert ends[-1] == at + tail
        expected = KEYER.chain(req.tokens, Scope(), extras=media.extras(4, len(req.tokens) // 4))
        assert np.array_equal(req.keys, expected[: req.registered])


def test_b19_an_item_larger_than_the_chunk_is_refused_with_the_size(pool: BlockPool) -> None:
    """The scheduler learns how many tokens it must allow."""
    with request(pool, 24, 4, media=[MediaItem(CAT, 2, 12)]) as req:
        step = req.schedule_prefill(5)
        assert step.end == 2
        req.apply_prefill(step, None)
        assert req.least_prefill_tokens == 12
        with pytest.raises(UsageFault, match="at least 12 tokens there, 11"):
            req.schedule_prefill(11)
        assert req.schedule_prefill(12).end == 14


def test_d1_a_hit_ends_before_an_item_it_would_cut(pool: BlockPool) -> None:
    """A prefix that ends inside an uncut item is refused; cut by floor_pages it is taken."""
    media = [MediaItem(CAT, 6, 10)]
    with request(pool, 24, 4, media=media) as req:
        prefill(req)
        assert req.registered == 6
    keys = keys_with(*media)
    with pool.match(keys[:3]) as hold:
        with pytest.raises(UsageFault, match="inside an uncut item"):
            request(pool, 24, 4, media=media, prefix=Prefix(hold, 12))
        with pytest.raises(UsageFault, match="other tokens"):
            request(pool, 24, 4, media=[MediaItem(DOG, 6, 4)], prefix=Prefix(hold, 12))
        pages = Media(media, 24).floor_pages(12, 4)
        assert pages == 1
        hold.trim(pages)
        with request(pool, 24, 4, media=media, prefix=Prefix(hold, 4)) as req:
            assert req.hit_tokens == 4


def test_b20_resume_cuts_what_is_resident_before_an_item(pool: BlockPool) -> None:
    """A preempted request that finds a part of its item recomputes all of it."""
    with request(pool, 24, 4, media=[MediaItem(CAT, 6, 10)]) as req:
        prefill(req)
        req.preempt()
        with pool.match(keys_with(MediaItem(CAT, 6, 10))[:3]) as kept:
            other = pool.try_admit(pool.budget())
            pool.draw(other, other.remaining_pages)
            other.release()
            assert kept.hit_pages == 3
            assert req.resume() is None
        assert req.committed_tokens == 4


def test_b23_pages_inside_an_item_are_copied(pool: BlockPool) -> None:
    """Complete pages that are not named yet, as an item goes on in the next page, are the branch's own."""
    with request(pool, 15, 9, media=[MediaItem(CAT, 5, 9, uncut=True)]) as req:
        step = req.schedule_prefill(14)
        assert step.end == 14
        req.apply_prefill(step, None)
        assert (req.registered, len(req.pages)) == (1, 4)
        branch = req.fork()
        assert not isinstance(branch, Later)
        with branch:
            step = branch.schedule_prefill(9)
            assert [source for source, _ in step.copies["full"]] == req.pages[1:].tolist()
            branch.apply_prefill(step, 77)
            assert isinstance(branch, RequestKv)
    pool.check_books()
