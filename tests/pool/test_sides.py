"""Pools beside the chain of full pages: windows, slots, joint hits, admission over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import KEYER, chain, request

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Arena, Chunk, Field, Group, KvModel, WeightIdentity, Window
from kvcontract.contract.model import Scope as TheScope
from kvcontract.pool import BlockPool, Later, MediaItem, Never, RequestKv, admit
from kvcontract.pool.checkpoints import NO_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcontract.pool.handles import Entitlement
from kvcontract.pool.side import SidePool
from kvcontract.pool.sides import Sides, Slotted, Windowed, make_sides

PAGE = 4


def window(
    blocks: int, tokens: int = 9, step: int = 8, *, sink: int = 0, record_pages: int = 1, key: str = "win"
) -> Windowed:
    """A windowed pool."""
    return Windowed(SidePool(key, blocks, PAGE), Window(tokens=tokens, sink_tokens=sink), step, record_pages)


def slab(slots: int, boundary: int = 1) -> Slotted:
    """A slab of one live slot a request."""
    return Slotted(SidePool("slots-s", slots, PAGE), "s", boundary)


def pool(
    pages: int = 60, *, windows: tuple[Windowed, ...] = (), slots: tuple[Slotted, ...] = ()
) -> BlockPool:
    """A chain pool with others beside it."""
    return BlockPool(pages, PAGE, sides=Sides(windows, slots, PAGE))


def run(req: RequestKv, size: int = 8, tokens: int | None = None) -> None:
    """Prefill, then decode so many tokens, or all."""
    while req.prefilling:
        chunk = req.schedule_prefill(size)
        req.apply_prefill(chunk, 1 if chunk.emits else None)
    left = req.max_new_tokens if tokens is None else tokens
    while not req.finished and req.new_tokens < left:
        req.apply_decode(req.schedule_decode(), 1)


def idle(of: BlockPool) -> None:
    """Nothing is owned any more, and the books are right."""
    of.check_books()
    for side in of.sides:
        assert (side.pool.held, side.pool.entitled) == (0, 0)


# Windows


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 9, 12])
@pytest.mark.parametrize("step", [1, 3, 8])
@pytest.mark.parametrize("sink", [0, 1, 6])
@pytest.mark.parametrize("record_pages", [1, 2])
def test_pages_behind_the_window_are_let_go_and_the_promise_holds(
    tokens: int, step: int, sink: int, record_pages: int
) -> None:
    """B1, B11, B17: what a step reads is there, nothing dead is kept, draws fit the promised pages."""
    side = window(200, tokens, step, sink=sink, record_pages=record_pages)
    of = pool(windows=(side,))
    with request(of, 41, 20) as req:
        most = side.lifetime(req.lifetime_pages)
        while not req.finished:
            chunk = req.schedule_prefill(step) if req.prefilling else req.schedule_decode()
            table = chunk.pages["win"]
            assert len(table) == -(-chunk.end // PAGE)
            for first, last in (*side.reach.needed(chunk.start), (chunk.start, chunk.end)):
                assert (table[first // PAGE : -(-last // PAGE)] > 0).all()
            assert np.count_nonzero(table) <= most
            assert len(np.unique(table[table > 0])) == np.count_nonzero(table)
            req.apply_prefill(chunk, 1 if chunk.emits else None)
            live = req.beside.windows[0].table
            for page in np.flatnonzero(live).tolist():
                if page < side.sink_pages:
                    continue
                whole = page // record_pages * record_pages + record_pages - 1
                assert not side.reach.dead(whole, PAGE, req.committed_tokens)
            of.check_books()
    idle(of)


def test_a_chunked_group_keeps_the_current_chunk_alone() -> None:
    """Reach Chunk(8): at t it needs the tokens from the last multiple of 8 on."""
    side = Windowed(SidePool("win", 40, PAGE), Chunk(tokens=8), 8)
    of = pool(windows=(side,))
    with request(of, 30, 4) as req:
        run(req)
        assert np.flatnonzero(req.beside.windows[0].table).tolist() == [8]  # 33 tokens: the chunk from 32 on
    idle(of)


def test_b11_requests_that_share_a_window_slide_on_without_waiting() -> None:
    """B11, B4: sharing gives no credit, so neither starves when both move on; exactly two fit."""
    side = window(1 + 2 * 5, 9, 8)
    assert side.lifetime(100) == 5
    of = pool(windows=(side,))
    first = request(of, 30, 40)
    run(first, tokens=1)
    prefix = of.match_whole(first.keys)
    assert prefix.sides is not None
    assert prefix.hit_pages == 7
    second = request(of, 30, 40, prefix=Given(prefix, 28))
    answer = admit(of, prompt_tokens=range(5), max_new_tokens=9, keyer=KEYER, scope=TheScope())
    assert isinstance(answer, Later)
    run(second)
    run(first)
    for req in (first, second):
        req.release()
    idle(of)


class Given:
    """What a resolve gives."""

    def __init__(self, hold: Any, hit_tokens: int) -> None:
        self.hold, self.hit_tokens = hold, hit_tokens


def test_r2_a_hit_ends_where_every_pool_has_what_that_needs() -> None:
    """R2, F5: full pages reach further than the window; the rest is let go."""
    side = window(40)
    of = pool(windows=(side,))
    with request(of, 40, 4) as req:
        run(req)
        keys = req.keys.copy()
    side.pool.forget(keys[7:])
    whole = of.match_whole(keys)
    assert (whole.hit_pages, of.probe(keys)) == (7, 10)
    assert whole.sides is not None
    assert whole.sides.by_key["win"].keys.tolist() == keys[5:7].tolist()  # tokens 20 to 27 are read
    whole.release()
    side.pool.forget(keys[5:6])
    whole = of.match_whole(keys)
    assert whole.hit_pages == 5
    whole.release()
    idle(of)


def test_a_prefix_without_its_window_is_refused() -> None:
    """R2: nobody starts from full pages whose window is not held."""
    of = pool(windows=(window(40),))
    with request(of, 20, 4) as req:
        run(req)
        keys = req.keys[:4].copy()
    bare = of.match(keys)
    with pytest.raises(UsageFault, match=r"a prefix of 4 pages that holds nothing of win"):
        request(of, 20, 4, prefix=Given(bare, 16))
    bare.release()
    idle(of)


def test_b14_what_no_checkpoint_needs_is_evicted_first() -> None:
    """B14: pages that slid out are reused before those that a checkpoint needs."""
    side = window(1 + 7, 5, 4)
    of = pool(windows=(side,))
    stops = Checkpoints(PAGE, stops=(16,))
    with request(of, 24, 4, checkpoints=stops) as req:
        run(req, 4)
        keys = req.keys.copy()
    kept = side.pool.present(keys)
    assert kept[3]  # the page before the checkpoint at 16
    with request(of, range(100, 124), 4) as req:
        run(req, 4)
    assert side.pool.present(keys)[3] or not side.pool.present(keys).any()
    idle(of)


def test_b12_retention_off_keeps_nothing_in_any_pool() -> None:
    """B12: the switch is for all pools of a rank."""
    of = pool(windows=(window(40),), slots=(slab(5),))
    of.set_retention(False)
    with request(of, 30, 4) as req:
        run(req)
    assert [side.pool.cached for side in of.sides] == [0, 0]
    idle(of)


def test_b13_a_request_that_fails_leaves_nothing_findable_in_any_pool() -> None:
    """B13: pages that have slid out of the window are forgotten too."""
    of = pool(windows=(window(40),))
    with request(of, 40, 4) as req:
        run(req, tokens=1)
        keys = req.keys.copy()
        req.mark_reset(0)
    assert of.probe(keys) == 0
    assert not of.sides.windows[0].pool.present(keys).any()
    idle(of)


def test_b18_rejected_drafts_return_their_pages_in_every_pool() -> None:
    """B18: a failed or half accepted step gives windowed pages back as well."""
    of = pool(windows=(window(40),))
    with request(of, 8, 20) as req:
        run(req, tokens=1)
        before = req.beside.windows[0].table.copy()
        chunk = req.schedule_speculative([5, 6, 7, 8, 9])
        assert chunk.drafts == 5
        req.revert(chunk)
        assert (req.beside.windows[0].table == before).all()
        chunk = req.schedule_speculative([5, 6, 7, 8, 9])
        req.apply_speculative(chunk, [3])
        assert req.committed_tokens == 9
        assert np.count_nonzero(req.beside.windows[0].table) == 3
    idle(of)


def test_b2_admission_books_all_pools_or_none() -> None:
    """B2, B10: one pool that is full leaves the others untouched; one that is too small says so for ever."""
    side = window(1 + 6)
    of = pool(windows=(side,), slots=(slab(2),))
    first = request(of, 20, 4)
    before = [of.gauges(), side.pool.gauges()]
    answer = admit(of, prompt_tokens=range(3), max_new_tokens=1, keyer=KEYER, scope=TheScope())
    assert isinstance(answer, Later)
    assert [of.gauges(), side.pool.gauges()] == before
    first.release()
    small = pool(windows=(window(3),))
    answer = admit(small, prompt_tokens=range(40), max_new_tokens=1, keyer=KEYER, scope=TheScope())
    assert isinstance(answer, Never)
    assert "win" in answer.reason
    idle(of)


# Slots


def snapshot(of: BlockPool, req: RequestKv) -> bool:
    """What a store does at a checkpoint."""
    side = of.sides.slots[0]
    reserved = side.pool.reserve(1)
    if reserved is None:
        return False
    pages = req.committed_tokens // PAGE
    side.pool.commit(reserved, req.keys[pages - 1 : pages].copy()).release()
    return True


def test_f4_a_restored_snapshot_stays_until_it_is_copied() -> None:
    """F4: it is pinned from the match to the first step, and its slot is given to nobody."""
    of = pool(slots=(slab(4),))
    with request(of, 20, 4, checkpoints=Checkpoints(PAGE, (16,))) as req:
        chunk = req.schedule_prefill(99)
        assert (chunk.end, chunk.checkpoint) == (16, 16)
        req.apply_prefill(chunk, None)
        assert req.checkpoint == 16
        assert snapshot(of, req)
        run(req)
        keys = req.keys.copy()
    hold = of.match_whole(keys)
    assert hold.hit_pages == 4
    with request(of, 20, 4, prefix=Given(hold, 16)) as second:
        ((source, target),) = second.copies["slots-s"]
        assert target == second.beside.live_slots["s"] != source
        assert of.sides.slots[0].pool.held == 2
        assert of.sides.slots[0].pool.reserve(2) is None  # one is left
        chunk = second.schedule_prefill(99)
        assert chunk.copies == {"slots-s": ((source, target),)}
        second.apply_prefill(chunk, 1)
        assert of.sides.slots[0].pool.held == 1
    idle(of)


def test_f6_without_a_free_slot_a_snapshot_is_not_taken() -> None:
    """F6: all slots in use is a soft miss; an unpinned snapshot gives way to a live slot."""
    of = pool(slots=(slab(3),))
    first = request(of, 20, 4, checkpoints=Checkpoints(PAGE, (16,)))
    first.apply_prefill(first.schedule_prefill(99), None)
    assert snapshot(of, first)
    second = request(of, range(50, 60), 4)  # takes the snapshot's slot
    assert not of.sides.slots[0].pool.present(first.keys).any()
    assert not snapshot(of, first)
    for req in (first, second):
        req.release()
    idle(of)


@pytest.mark.parametrize(("blocks", "needed"), [({"slots-state": 2}, 3), ({}, 3)])
def test_f6_f8_a_slab_in_which_nothing_could_be_kept_is_refused_with_the_number(
    blocks: dict[str, int], needed: int
) -> None:
    """F6, F8: a slot for a request and none for a snapshot is a silent 0 %; it is refused instead."""
    model = hybrid()
    with pytest.raises(UsageFault, match=f"in slots-state: expected at least {needed}"):
        make_sides(model, {"window-8": 40, **blocks}, 16)


def test_f8_a_window_too_small_for_one_request_is_refused_with_the_number() -> None:
    """F8: all pools that are too small are named at once."""
    with pytest.raises(
        UsageFault, match=r"2 blocks in window-8: expected at least 8 .*0 blocks in slots-state"
    ):
        make_sides(hybrid(), {"window-8": 2}, 16)


def test_speculation_is_off_where_state_is_rewritten_at_each_token() -> None:
    """F1: what a rejected proposal did to a state cannot be undone, so none is run."""
    of = pool(slots=(slab(4),))
    with request(of, 8, 8) as req:
        run(req, tokens=1)
        chunk = req.schedule_speculative([1, 2, 3])
        assert chunk.drafts == 0
        req.apply_speculative(chunk, [4])
    idle(of)


def test_b23_a_branch_copies_state_before_its_parent_goes_on() -> None:
    """B23: named window pages are shared, the partial one and the slot are copied, and the parent waits."""
    side = window(40)
    of = pool(windows=(side,), slots=(slab(4),))
    with request(of, 18, 8) as req:
        run(req, tokens=1)
        branch = req.fork(5)
        assert isinstance(branch, RequestKv)
        assert set(branch.copies) == {"full", "win", "slots-s"}
        assert branch.copies["slots-s"] == ((req.beside.live_slots["s"], branch.beside.live_slots["s"]),)
        with pytest.raises(UsageFault, match="a branch has not copied its state yet"):
            req.schedule_decode()
        branch.copied()
        mine, theirs = branch.beside.windows[0].table, req.beside.windows[0].table
        assert (mine[:4] == theirs[:4]).all()
        assert mine[4] != theirs[4]
        run(req)
        run(branch)
        branch.release()
    idle(of)


def test_b20_preempting_gives_everything_back_and_resuming_takes_all_or_nothing() -> None:
    """B20: it goes on from the deepest boundary whose state is still there."""
    of = pool(windows=(window(12),), slots=(slab(4),))
    with request(of, 20, 8, checkpoints=Checkpoints(PAGE, (16,), rolling=True)) as req:
        req.apply_prefill(req.schedule_prefill(99), None)
        assert req.checkpoint is None
        req.apply_prefill(req.schedule_prefill(99), None)
        assert req.checkpoint == 16
        assert snapshot(of, req)
        run(req, tokens=2)
        req.preempt()
        idle(of)
        assert req.resume() is None
        assert req.committed_tokens == 16
        run(req)
    idle(of)


# Checkpoints


def test_steps_end_at_wanted_checkpoints_and_nowhere_else() -> None:
    """One extra end for a prompt: the last multiple within it; others only where a step ends anyway."""
    wanted = CheckpointPolicy(every_tokens=32).of(16, 100, branches=(50,))
    assert wanted.stops == (48, 96)
    of = pool(200, slots=(slab(9),))
    with request(of, 100, 4, checkpoints=wanted) as req:
        ends, taken = [], []
        while req.prefilling:
            chunk = req.schedule_prefill(32 - req.committed_tokens % 32)
            ends.append(chunk.end)
            taken += [] if chunk.checkpoint is None else [chunk.checkpoint]
            req.apply_prefill(chunk, 1 if chunk.emits else None)
    assert ends == [32, 48, 64, 96, 100]
    assert taken == [32, 48, 96]
    idle(of)


def test_no_checkpoint_is_wanted_by_default() -> None:
    """A model whose pages are all it keeps is cut nowhere."""
    of = pool(60)
    with request(of, 40, 4) as req:
        chunk = req.schedule_prefill(99)
        assert (chunk.end, chunk.checkpoint) == (40, None)
    assert NO_CHECKPOINTS.stop(0, 40) == 40


def test_a_rolling_checkpoint_is_wanted_at_every_multiple_while_decoding() -> None:
    """A later turn goes on from the last of them."""
    of = pool(60, slots=(slab(5),))
    seen = []
    with request(of, 9, 12, checkpoints=Checkpoints(PAGE, (8,), rolling=True)) as req:
        while not req.finished:
            chunk = req.schedule_prefill(99) if req.prefilling else req.schedule_decode()
            req.apply_prefill(chunk, 1 if chunk.emits else None)
            seen += [] if req.checkpoint is None else [req.checkpoint]
    assert seen == [8, 12, 16, 20]
    idle(of)


# Pins and names


def test_c1_only_the_occupant_that_was_meant_is_pinned() -> None:
    """C1, F3: a block that was given to another since is left out, and pins take room."""
    side = SidePool("x", 4, PAGE)
    keys = chain(3)
    held = side.reserve(3)
    assert held is not None
    hold = side.commit(held, keys)
    blocks, generations = hold.pages.copy(), side.generation[hold.pages].copy()
    hold.release()
    assert side.pin_named(blocks, generations).all()
    assert side.reserve(1) is None
    side.unpin(blocks)
    other = side.reserve(1)
    assert other is not None
    pinned = side.pin_named(blocks, generations)
    assert pinned.sum() == 2
    side.unpin(blocks[pinned])
    other.release()
    side.check_books()


@pytest.mark.parametrize("retention", [True, False])
def test_b4_c1_a_request_that_ends_makes_room_for_the_pins_of_what_it_had(retention: bool) -> None:
    """B4, C1: in a pool that has no room, at one stroke; what others own takes room as ever."""
    side = SidePool("x", 5, PAGE, retention=retention)
    mine, other = side.promise(2), side.promise(2)
    assert isinstance(mine, Entitlement)
    assert isinstance(other, Entitlement)
    for of, keys in ((mine, chain(2)), (other, chain(4)[2:])):
        side.draw(of, 2)
        side.register(of, keys)
    blocks = np.concatenate([mine.pages, other.pages])
    assert not side.pin_named(blocks, side.generation[blocks]).any()
    pinned = side.pin_named(blocks, side.generation[blocks], mine)
    assert pinned.tolist() == [True, True, False, False]
    assert not mine.live
    side.check_books()
    assert side.promise(1) is None
    side.unpin(blocks[:2])
    assert side.present(chain(2)).tolist() == [retention] * 2
    with pytest.raises(UsageFault, match="consumed or released"):
        side.pin_named(blocks[:2], side.generation[blocks[:2]], mine)
    other.release()
    side.check_books()


def test_b15_a_name_that_is_taken_keeps_its_block() -> None:
    """B15: who restores what somebody else has named meanwhile holds that one."""
    side = SidePool("x", 6, PAGE)
    keys = chain(1)
    one, two = side.reserve(1), side.reserve(1)
    assert one is not None
    assert two is not None
    first, second = side.commit(one, keys), side.commit(two, keys)
    assert first.pages.tolist() == second.pages.tolist()
    assert side.free == 4
    first.release()
    second.release()
    side.check_books()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_b5_b11_promises_hold_whatever_happens_beside(data: st.DataObject) -> None:
    """B5, B11, R8: holds, restores, saves, slides and branches in any order; draws never fail."""
    side, slots = window(1 + data.draw(st.integers(8, 24))), slab(data.draw(st.integers(3, 6)))
    of = pool(80, windows=(side,), slots=(slots,))
    live: list[RequestKv] = []
    pinned: list[np.ndarray] = []
    holds: list[Any] = []
    try:
        for _ in range(data.draw(st.integers(5, 40))):
            _something(data, of, live, pinned, holds)
            of.check_books()
    finally:  # also where an example is given up
        for req in live:
            req.release()
        for hold in holds:
            hold.release()
        for blocks in pinned:
            side.pool.unpin(blocks)
    idle(of)


def _something(
    data: st.DataObject,
    of: BlockPool,
    live: list[RequestKv],
    pinned: list[np.ndarray],
    holds: list[Any],
) -> None:
    """One act of somebody."""
    act = data.draw(st.sampled_from(("admit", "step", "end", "hold", "drop", "pin", "unpin", "fork", "take")))
    if act == "admit":
        first, length = 1000 * data.draw(st.integers(0, 1)), data.draw(st.integers(1, 30))
        _admit(of, live, list(range(first, first + length)))
    elif act == "hold":
        holds.append(of.match_whole(KEYER.chain(list(range(24)), TheScope())))
    elif act == "drop" and holds:
        holds.pop(data.draw(st.integers(0, len(holds) - 1))).release()
    elif act == "unpin" and pinned:
        of.sides.windows[0].pool.unpin(pinned.pop())
    elif live:
        _act(data, of, live, pinned, act)


def _admit(of: BlockPool, live: list[RequestKv], tokens: list[int]) -> None:
    """A request from whatever is resident, if it fits."""
    hold = of.match_whole(KEYER.chain(tokens[: (len(tokens) - 1) // PAGE * PAGE], TheScope()))
    answer = admit(
        of,
        prompt_tokens=tokens,
        max_new_tokens=8,
        keyer=KEYER,
        scope=TheScope(),
        prefix=Given(hold, hold.hit_pages * PAGE) if hold.hit_pages else None,
        checkpoints=Checkpoints(PAGE, (8, 16), rolling=True),
    )
    if isinstance(answer, RequestKv):
        live.append(answer)
    if hold.live:
        hold.release()


def _act(
    data: st.DataObject, of: BlockPool, live: list[RequestKv], pinned: list[np.ndarray], act: str
) -> None:
    """Something that a request does."""
    at = data.draw(st.integers(0, len(live) - 1))
    req, side = live[at], of.sides.windows[0]
    if act == "step" and not req.finished:
        chunk = (
            req.schedule_prefill(data.draw(st.integers(1, 8))) if req.prefilling else req.schedule_decode()
        )
        req.apply_prefill(chunk, 1 if chunk.emits else None)
    elif act == "take" and req.checkpoint:
        snapshot(of, req)
    elif act == "end":
        live.pop(at).release()
    elif act == "fork" and not (req.finished or req.copies):  # what it begins with is in its slots by then
        branch = req.fork()
        if isinstance(branch, RequestKv):
            branch.copied()
            live.append(branch)
    elif act == "pin":
        table = req.beside.windows[0].table
        blocks = table[table > 0]
        held = side.pool.pin_named(blocks, side.pool.generation[blocks])
        pinned.append(blocks[held])


def hybrid() -> KvModel:
    """Full and windowed attention, and a state."""
    plane = Field(name="k", dtype="float16", axes={"dim": 4})
    return KvModel(
        contract=1,
        name="hybrid",
        weights=WeightIdentity(kind="unresolved"),
        numerics="float16",
        page_tokens=PAGE,
        groups=(
            Group(name="full"),
            Group(name="near", reach=Window(tokens=8)),
            Group(name="state", kind="bounded", boundary_tokens=2),
        ),
        arenas=tuple(
            Arena.planes(name=name, group=name, fields=(plane,)) for name in ("full", "near", "state")
        ),
    )


def test_b16_a_branch_that_is_dropped_gives_its_pins_back_and_frees_its_parent() -> None:
    """B16, R8: nothing that a branch was to copy stays pinned for ever."""
    of = pool(windows=(window(40),), slots=(slab(5),))
    with request(of, 18, 8) as req:
        run(req, tokens=1)
        branch = req.fork()
        assert isinstance(branch, RequestKv)
        assert of.sides.slots[0].pool.pinned_blocks == 1
        with pytest.warns(ResourceWarning):
            del branch
        of.check_books()
        assert [side.pool.pinned_blocks for side in of.sides] == [0, 0]
        run(req)
    idle(of)


def test_b23_a_branch_of_a_branch_waits_for_the_first_copy() -> None:
    """B23: what is not there yet cannot be copied on."""
    of = pool(slots=(slab(6),))
    with request(of, 16, 8) as req:
        run(req, tokens=1)
        branch = req.fork()
        assert isinstance(branch, RequestKv)
        with branch:
            with pytest.raises(UsageFault, match="still to be copied"):
                branch.fork()
            branch.copied()
            second = branch.fork()
            assert isinstance(second, RequestKv)
            second.copied()
            second.release()
    idle(of)


def test_b21_b23_pages_that_are_gone_before_they_were_named_are_not_copied() -> None:
    """B21: behind a short window within an uncut item there are no pages to copy, and page 0 is none."""
    of = pool(windows=(window(40, 1, 20),))
    item = MediaItem(b"d" * 16, 5, 14)
    with request(of, 22, 8, media=[item]) as req:
        while req.prefilling:
            chunk = req.schedule_prefill(max(8, req.least_prefill_tokens))
            req.apply_prefill(chunk, 1 if chunk.emits else None)
            if req.committed_tokens == 19:
                break
        branch = req.fork()
        assert isinstance(branch, RequestKv)
        assert all(source for pairs in branch.copies.values() for source, _ in pairs)
        of.check_books()
        branch.copied()
        branch.release()
    idle(of)


def test_a_windowed_model_with_drafts_has_rolling_checkpoints_too() -> None:
    """Pages need no copy of a state, so a rejected proposal does not matter."""
    of = pool(windows=(window(60),))
    seen = []
    with request(of, 8, 30, checkpoints=Checkpoints(PAGE, (8,), rolling=True)) as req:
        run(req, tokens=1)
        while not req.finished:
            chunk = req.schedule_speculative([7, 7])
            req.apply_speculative(chunk, [7, 7, 3][: chunk.drafts + 1])
            seen += [] if req.checkpoint is None else [req.checkpoint]
    assert len(seen) > 1
    idle(of)
