"""The DRAM tier against its promises (H, A, R)."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane, ManualLane, ThreadLane
from kvcontract.tiers.base import Buffers, Code, Lease, RecordKeys, SaveClass, Tier, record_keys
from kvcontract.tiers.dram import LOCKED_RECORDS, DramTier
from kvcontract.tiers.lending import Loan

BYTES = 192
FOREVER = math.inf


class Clock:
    """A clock that moves when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def keys_of(*numbers: int) -> RecordKeys:
    """One record key a number."""
    return record_keys(np.array([[number, ~number & (2**64 - 1)] for number in numbers], np.uint64), 0, 0, 1)


def content(number: int, size: int = BYTES) -> NDArray[np.uint8]:
    """The bytes that belong to a number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def tier_of(records: int, **options: Any) -> DramTier:
    """A tier with room for some records of BYTES."""
    options.setdefault("lane", InlineLane())
    return DramTier(records * BYTES, **options)


def save(tier: Tier, *numbers: int, size: int = BYTES, deadline: float = FOREVER) -> list[Code]:
    """Save the content of numbers in one batch."""
    buffers = Buffers.of([content(number, size) for number in numbers])
    op = tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, deadline)
    return [Code(code) for code in op.value]


def load(tier: Tier, lease: Lease, rows: list[int], size: int = BYTES) -> tuple[list[Code], list[bytes]]:
    """Load rows of a lease into fresh memory of which each byte is 0xEE."""
    target = [np.full(size, 0xEE, np.uint8) for _ in rows]
    op = tier.load(lease, np.array(rows, np.int64), Buffers.of(target), FOREVER)
    return [Code(code) for code in op.value], [array.tobytes() for array in target]


def present(tier: Tier, *numbers: int) -> list[bool]:
    """Which records a lookup finds; the lease goes back at once."""
    with tier.lookup(keys_of(*numbers), FOREVER).value as lease:
        return [bool(here) for here in lease.present]


def test_saved_bytes_come_back() -> None:
    """What was saved is loaded bit for bit, per key and in any order, absent keys beside it."""
    tier = tier_of(8)
    assert save(tier, 1, 2, 3) == [Code.OK] * 3
    with tier.lookup(keys_of(2, 9, 1), FOREVER).value as lease:
        assert lease.present.tolist() == [True, False, True]
        codes, found = load(tier, lease, [2, 0, 1, 2])
    assert codes == [Code.OK, Code.OK, Code.MISS, Code.OK]
    assert found == [content(1).tobytes(), content(2).tobytes(), b"\xee" * BYTES, content(1).tobytes()]


def test_records_in_pieces() -> None:
    """Pieces of memory are gathered on save and scattered on load."""
    tier = tier_of(2)
    source = content(5)
    cut = np.array([0, 5, 5, 100, BYTES])
    op = tier.save(
        keys_of(5),
        Buffers(source.ctypes.data + cut[:-1], np.diff(cut), np.array([0, 4]), (source,)),
        SaveClass.CACHEABLE,
        FOREVER,
    )
    assert op.value.tolist() == [Code.OK]
    target = np.zeros(300, np.uint8)
    pieces = Buffers(target.ctypes.data + np.array([200, 0]), np.array([50, BYTES - 50]), np.array([0, 2]))
    with tier.lookup(keys_of(5), FOREVER).value as lease:
        assert tier.load(lease, np.array([0]), pieces, FOREVER).value.tolist() == [Code.OK]
    assert np.array_equal(target[200:250], source[:50])
    assert np.array_equal(target[: BYTES - 50], source[50:])
    assert not target[BYTES - 50 : 200].any()


def test_h2_put_is_idempotent() -> None:
    """H2: a record that is there is OK and keeps its bytes; nothing is allocated for it."""
    tier = tier_of(4)
    save(tier, 1)
    before = tier.stats()
    other = Buffers.of([np.zeros(BYTES, np.uint8)])
    assert tier.save(keys_of(1), other, SaveClass.CACHEABLE, FOREVER).value.tolist() == [Code.OK]
    assert tier.stats()["used_bytes"] == before["used_bytes"]
    with tier.lookup(keys_of(1), FOREVER).value as lease:
        assert load(tier, lease, [0])[1] == [content(1).tobytes()]


def test_h2_failed_put_leaves_the_key_absent() -> None:
    """H2, H1: a failure of memory befalls one record, which stays absent; the others are saved."""
    calls = 0

    def allocate(size: int) -> bytearray:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no more")
        return bytearray(size)

    tier = tier_of(8, allocate=allocate)
    assert save(tier, 1, 2, 3) == [Code.OK, Code.FAILED, Code.OK]
    assert present(tier, 1, 2, 3) == [True, False, True]
    assert [type(fault) for fault in tier.faults] == [MemoryError]
    assert tier.stats()["faults"] == 1
    assert save(tier, 2) == [Code.OK]


def test_h5_quota_is_kept_and_the_least_used_goes_first() -> None:
    """H5: the quota holds; a record that was looked up outlives older ones."""
    tier = tier_of(3)
    save(tier, 1, 2, 3)
    present(tier, 1)
    assert save(tier, 4) == [Code.OK]
    assert present(tier, 1, 2, 3, 4) == [True, False, True, True]
    stats = tier.stats()
    assert stats["allocated_bytes"] <= stats["capacity_bytes"]
    assert stats["evictions"] == 1
    assert stats["records"] == 3


def test_h5_leases_block_eviction() -> None:
    """H5: what is leased is not evicted; with everything leased a save is FULL and leaves no trace."""
    tier = tier_of(2)
    save(tier, 1, 2)
    lease = tier.lookup(keys_of(1, 2), FOREVER).value
    assert save(tier, 3) == [Code.FULL]
    assert present(tier, 1, 2, 3) == [True, True, False]
    lease.release()
    assert save(tier, 3) == [Code.OK]
    assert present(tier, 1, 2, 3) == [False, True, True]
    assert tier.stats()["leases"] == 0


def test_h7_oversized_is_refused_alone() -> None:
    """H7: a record larger than the tier is refused, evicts nothing, and hurts no neighbour."""
    tier = tier_of(2)
    save(tier, 1, 2)
    assert save(tier, 3, size=3 * BYTES) == [Code.TOO_LARGE]
    assert present(tier, 1, 2, 3) == [True, True, False]
    assert tier.capabilities.max_record_bytes == 2 * BYTES


def test_sizes_share_the_quota() -> None:
    """A size that comes later gets the memory of one that has been idle; the quota holds throughout."""
    tier = tier_of(4)
    save(tier, 1, 2, 3, 4)
    assert save(tier, 5, size=2 * BYTES) == [Code.OK]
    assert present(tier, 1, 2, 3, 4, 5) == [False, False, True, True, True]
    lease = tier.lookup(keys_of(3, 4, 5), FOREVER).value
    assert save(tier, 6, size=64) == [Code.FULL]
    lease.release()
    assert save(tier, 6, size=64) == [Code.OK]
    stats = tier.stats()
    assert stats["allocated_bytes"] <= stats["capacity_bytes"]
    assert stats["used_bytes"] <= stats["allocated_bytes"]


def test_r3_nothing_is_findable_before_it_is_complete() -> None:
    """R3: between submission and completion a lookup misses; R8: the operation is seen while it runs."""
    lane = ManualLane()
    tier = tier_of(2, lane=lane)
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert not op.done
    assert present(tier, 1) == [False]
    assert tier.stats()["operations"] == 1
    lane.drain()
    assert op.value.tolist() == [Code.OK]
    assert present(tier, 1) == [True]
    assert tier.stats()["operations"] == 0


def test_a3_running_load_keeps_its_record() -> None:
    """A3, R3: a load outlives its lease; until it settles its slots are not reused."""
    saving, loading = InlineLane(), ManualLane()
    tier = tier_of(1, lane=saving)
    save(tier, 1)
    tier._work._lane = loading
    target = np.zeros(BYTES, np.uint8)
    lease = tier.lookup(keys_of(1), FOREVER).value
    op = tier.load(lease, np.array([0]), Buffers.of([target]), FOREVER)
    lease.release()
    tier._work._lane = saving
    assert save(tier, 2) == [Code.FULL]
    loading.drain()
    assert op.value.tolist() == [Code.OK]
    assert target.tobytes() == content(1).tobytes()
    assert save(tier, 2) == [Code.OK]


def test_load_after_release_is_expired() -> None:
    """A lease that ended gives nothing, even if the record is still there; a foreign one is refused."""
    tier, other = tier_of(1), tier_of(1, name="other")
    save(tier, 1)
    save(other, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lease.release()
    assert load(tier, lease, [0]) == ([Code.EXPIRED], [b"\xee" * BYTES])
    with other.lookup(keys_of(1), FOREVER).value as foreign:
        assert load(tier, foreign, [0])[0] == [Code.REFUSED]


def test_bad_requests_are_codes() -> None:
    """R4: wrong lengths, rows and counts are codes of what they befall, never exceptions."""
    tier = tier_of(2)
    save(tier, 1)
    with tier.lookup(keys_of(1), FOREVER).value as lease:
        assert load(tier, lease, [0], size=BYTES - 1)[0] == [Code.SHORT]
        assert load(tier, lease, [1, -1, 0])[0] == [Code.REFUSED, Code.REFUSED, Code.OK]
        op = tier.load(lease, np.array([0, 0]), Buffers.of([content(1)]), FOREVER)
        assert op.value.tolist() == [Code.REFUSED] * 2
    op = tier.save(keys_of(1, 2), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert op.value.tolist() == [Code.REFUSED] * 2
    assert load(tier, Lease.nothing("dram", 1), [0])[0] == [Code.MISS]


def test_a9_nothing_is_begun_after_the_deadline() -> None:
    """A9: a deadline that has passed ends lookups and records without touching memory."""
    clock = Clock()
    tier = tier_of(2, clock=clock)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    clock.now_s = 10.0
    assert save(tier, 2, deadline=9.0) == [Code.EXPIRED]
    assert not tier.lookup(keys_of(1), 9.0).value.present.any()
    target = np.zeros(BYTES, np.uint8)
    with lease:
        op = tier.load(lease, np.array([0]), Buffers.of([target]), 9.0)
    assert op.value.tolist() == [Code.EXPIRED]
    assert not target.any()
    assert present(tier, 1, 2) == [True, False]


def test_a2_late_lease_is_released_by_the_settlement() -> None:
    """A2: a waiter that gave up leaves a callback behind, and the record becomes evictable."""
    tier = tier_of(1)
    save(tier, 1)
    tier.lookup(keys_of(1), FOREVER).on_done(Lease.release)
    assert tier.stats()["leases"] == 0
    assert save(tier, 2) == [Code.OK]


def test_a6_dropped_lease_frees_the_record() -> None:
    """A6: a lease lost to the collector is given back, with a warning."""
    tier = tier_of(1)
    save(tier, 1)
    pending = [tier.lookup(keys_of(1), FOREVER)]
    with pytest.warns(ResourceWarning, match="dropped"):
        pending.clear()
    assert tier.stats()["leases"] == 0
    assert save(tier, 2) == [Code.OK]


def test_h3_discard_forgets_a_damaged_record_but_not_its_successor() -> None:
    """H3, E7: a discarded record is absent at once, can be saved anew, and the new one stays."""
    tier = tier_of(2)
    save(tier, 1)
    lease = tier.lookup(keys_of(1, 7), FOREVER).value
    tier.discard(lease, np.array([0, 1, 5]))
    assert present(tier, 1) == [False]
    lease.release()
    assert save(tier, 1) == [Code.OK]
    tier.discard(lease, np.array([0]))
    assert present(tier, 1) == [True]
    assert tier.stats()["quarantined"] == 1


def test_g7_handoff_is_kept_until_released_or_over() -> None:
    """G7: handoff records are not evicted before their release or the end of their time."""
    clock = Clock()
    tier = tier_of(2, clock=clock, handoff_ttl_s=60.0)
    save(tier, 1)
    for number, lease_id in ((1, "a"), (2, None)):
        op = tier.save(
            keys_of(number), Buffers.of([content(number)]), SaveClass.HANDOFF, FOREVER, handoff=lease_id
        )
        assert op.value.tolist() == [Code.OK]
    assert save(tier, 3) == [Code.FULL]
    tier.release_handoff("a")
    tier.release_handoff("a")
    tier.release_handoff("unknown")
    assert save(tier, 3) == [Code.OK]
    assert present(tier, 1, 2, 3) == [False, True, True]
    clock.now_s = 60.0
    assert tier.stats()["handoffs"] == 0
    assert save(tier, 4, 5) == [Code.OK] * 2
    assert present(tier, 2) == [False]


def test_c8_flush_covers_what_was_submitted_before() -> None:
    """C8: a flush settles with the saves before it; nothing here is durable; lateness is told."""
    clock, lane = Clock(), ManualLane()
    tier = tier_of(4, clock=clock, lane=lane)
    assert tier.flush("landed", FOREVER).value is True
    tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    landed, visible = tier.flush("landed", FOREVER), tier.flush("visible", 5.0)
    durable = tier.flush("durable", FOREVER)
    assert not landed.done
    tier.save(keys_of(2), Buffers.of([content(2)]), SaveClass.CACHEABLE, FOREVER)
    clock.now_s = 6.0
    lane.step()
    assert (landed.value, visible.value, durable.value) == (True, False, False)
    lane.drain()


def test_c10_close_waits_refuses_and_frees() -> None:
    """C10: close is bounded and says when something still runs; afterwards everything is refused."""
    lane, hold, begun = ThreadLane("copies"), threading.Event(), threading.Event()
    tier = tier_of(2, lane=lane)
    lane.submit(begun.set)
    lane.submit(lambda: hold.wait(30.0))
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    lease = tier.lookup(keys_of(1), FOREVER).value
    assert begun.wait(30.0)
    assert not tier.close(0.0)
    assert save(tier, 2) == [Code.REFUSED]
    hold.set()
    assert op.wait(30.0).tolist() == [Code.OK]
    assert tier.close(math.inf)
    assert not tier.lookup(keys_of(1), FOREVER).value.present.any()
    lease.release()
    assert tier.stats()["allocated_bytes"] == 0
    assert tier.close(math.inf)
    assert lane.close(30.0)


def test_closed_lane_is_a_code() -> None:
    """R4: a lane that takes no more work refuses records; pins are undone."""
    lane = InlineLane()
    tier = tier_of(1, lane=lane)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lane.close(0.0)
    assert load(tier, lease, [0])[0] == [Code.REFUSED]
    assert save(tier, 2) == [Code.REFUSED]
    lease.release()
    assert tier.stats()["operations"] == 0
    assert tier.stats()["faults"] == 2


def test_a10_lookup_that_breaks_finds_nothing() -> None:
    """A10: an error inside a lookup is counted and settles with an empty lease."""
    tier = tier_of(1)
    broken = np.zeros((2, 2), np.uint8)  # not keys at all
    save(tier, 1)
    lease = tier.lookup(broken, FOREVER).value  # type: ignore[arg-type]
    assert lease.present.tolist() == [False, False]
    assert tier.stats()["faults"] == 1


def test_no_capacity_is_refused() -> None:
    """A tier without room is a mistake, said with the number."""
    with pytest.raises(UsageFault, match="0 B"):
        DramTier(0, lane=InlineLane())


def test_r8_gauges_return_to_zero_under_threads() -> None:
    """R8, R3: savers, loaders and evictions at once: loaded bytes are always whole, gauges end at 0."""
    lane = ThreadLane("copies", workers=2)
    tier = tier_of(5, lane=lane)
    wrong: list[int] = []
    codes: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            numbers = rng.integers(0, 12, 3).tolist()
            buffers = Buffers.of([content(number) for number in numbers])
            codes.extend(
                tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, FOREVER).wait(60.0).tolist()
            )
            with tier.lookup(keys_of(*numbers), FOREVER).wait(60.0) as lease:
                target = [np.zeros(BYTES, np.uint8) for _ in numbers]
                done = tier.load(lease, np.arange(3), Buffers.of(target), FOREVER).wait(60.0)
            for number, code, here, array in zip(numbers, done, lease.present, target, strict=True):
                if (code == Code.OK) != here or (here and array.tobytes() != content(number).tobytes()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(codes) <= {Code.OK, Code.FULL}
    stats = tier.stats()
    assert (stats["leases"], stats["operations"], stats["faults"]) == (0, 0, 0)
    assert stats["used_bytes"] == stats["records"] * BYTES <= stats["capacity_bytes"]
    assert tier.close(math.inf)
    assert lane.close(30.0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["save", "big", "look", "hold", "free"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.sets(st.integers(1, 12)))
def test_h1_batches_equal_their_singles(script: list[tuple[str, list[int]]], faulty: set[int]) -> None:
    """H1: whatever the history and whichever allocations fail, a batch leaves what its singles leave."""

    def allocator() -> Callable[[int], bytearray]:
        calls = 0

        def allocate(size: int) -> bytearray:
            nonlocal calls
            calls += 1
            if calls in faulty:
                raise MemoryError
            return bytearray(size)

        return allocate

    batch, single = tier_of(5, allocate=allocator()), tier_of(5, allocate=allocator())
    held: list[Lease] = []
    for verb, numbers in script:
        if verb in ("save", "big"):
            size = BYTES if verb == "save" else 2 * BYTES
            together = save(batch, *numbers, size=size)
            assert together == [save(single, number, size=size)[0] for number in numbers]
        elif verb == "look":
            assert present(batch, *numbers) == [present(single, number)[0] for number in numbers]
        elif verb == "hold":
            held.append(batch.lookup(keys_of(*numbers), FOREVER).value)
            held.extend(single.lookup(keys_of(number), FOREVER).value for number in numbers)
        else:
            for lease in held:
                lease.release()
            held.clear()
        gauges = ("used_bytes", "allocated_bytes", "records", "evictions", "hits", "misses")
        assert [batch.stats()[name] for name in gauges] == [single.stats()[name] for name in gauges]
        assert batch.stats()["allocated_bytes"] <= batch.stats()["capacity_bytes"]
    for lease in held:
        lease.release()


def test_custom_memory_is_used() -> None:
    """Memory comes from the hook, so that an engine can pass pinned buffers."""
    given_out: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        given_out.append(bytearray(size))
        return given_out[-1]

    tier = tier_of(2, allocate=allocate)
    save(tier, 1)
    assert content(1).tobytes() in b"".join(bytes(memory) for memory in given_out)


def fill(address: int, number: int) -> None:
    """Write the content of a number where a record is to lie."""
    ctypes.memmove(address, content(number).ctypes.data, BYTES)


def test_r3_lent_memory_is_found_when_it_is_complete() -> None:
    """R3, H1, H2: of a loan, what is done is found and no more; what is there already is OK at once."""
    tier = tier_of(4)
    save(tier, 1)
    loan = tier.reserve(keys_of(1, 2, 3), BYTES, SaveClass.CACHEABLE, FOREVER)
    assert loan.rows.tolist() == [1, 2]
    assert loan.codes.tolist() == [Code.OK] * 3
    assert present(tier, 1, 2, 3) == [True, False, False]
    assert tier.stats()["operations"] == 1
    for row, number in ((1, 2), (2, 3)):
        fill(int(loan.address[row]), number)
    done = np.array([False, True, False])
    assert loan.end(done).tolist() == [Code.OK, Code.OK, Code.FAILED]
    assert loan.end(~done).tolist() == [Code.OK, Code.OK, Code.FAILED]
    assert present(tier, 1, 2, 3) == [True, True, False]
    with tier.lookup(keys_of(2), FOREVER).value as lease:
        assert load(tier, lease, [0])[1] == [content(2).tobytes()]
    stats = tier.stats()
    assert (stats["operations"], stats["save_ok"], stats["save_failed"]) == (0, 3, 1)


def test_h2_two_loans_of_one_record_are_one_record() -> None:
    """H2, G7: whoever ends second finds it there; both of its handoffs keep it."""
    tier = tier_of(2)
    loans = [tier.reserve(keys_of(1), BYTES, SaveClass.HANDOFF, FOREVER, handoff=name) for name in ("a", "b")]
    for loan in loans:
        fill(int(loan.address[0]), 1)
        assert loan.end(np.array([True])).tolist() == [Code.OK]
    assert tier.stats()["records"] == 1
    assert tier.stats()["handoffs"] == 2
    tier.release_handoff("a")
    assert save(tier, 2, 3) == [Code.OK, Code.OK]
    assert present(tier, 1, 2, 3) == [True, False, True]
    tier.release_handoff("b")
    assert save(tier, 4, 5) == [Code.OK, Code.OK]
    assert present(tier, 1, 4, 5) == [False, True, True]


def test_what_cannot_be_lent_says_why() -> None:
    """A9, H7, A3: late, too large, full, closed, another length, a lease that has ended, or nothing."""
    clock = Clock()
    tier = tier_of(1, clock=clock)
    clock.now_s = 5.0

    def reserved(size: int = BYTES, deadline: float = FOREVER) -> tuple[list[int], Loan]:
        loan = tier.reserve(keys_of(7, 8), size, SaveClass.CACHEABLE, deadline)
        return loan.codes.tolist(), loan

    assert reserved(deadline=4.0)[0] == [Code.EXPIRED] * 2
    assert reserved(size=10 * BYTES)[0] == [Code.TOO_LARGE] * 2
    codes, loan = reserved()
    assert codes == [Code.OK, Code.FULL]
    fill(int(loan.address[0]), 7)
    loan.end(np.array([True, False]))
    with tier.lookup(keys_of(7, 8), FOREVER).value as lease:
        rows = np.array([0, 1, 5])
        borrowed = tier.borrow(lease, rows, BYTES, FOREVER)
        assert borrowed.codes.tolist() == [Code.OK, Code.MISS, Code.REFUSED]
        assert ctypes.string_at(int(borrowed.address[0]), BYTES) == content(7).tobytes()
        assert tier.borrow(lease, rows[:1], BYTES + 1, FOREVER).end(np.array([False])).tolist() == [
            Code.SHORT
        ]
        assert tier.borrow(lease, rows[:1], BYTES, 4.0).codes.tolist() == [Code.EXPIRED]
    assert save(tier, 9) == [Code.FULL]  # the loan outlives the lease
    borrowed.end(np.array([True, False, False]))
    assert tier.borrow(lease, rows[:1], BYTES, FOREVER).codes.tolist() == [Code.EXPIRED]
    assert save(tier, 9) == [Code.OK]
    assert tier.close(FOREVER)
    assert reserved()[0] == [Code.REFUSED] * 2
    assert tier.stats()["operations"] == 0


def test_h1_a_slot_that_cannot_be_had_fails_its_record_only() -> None:
    """H1: memory that is refused for one record of a loan leaves the others theirs."""
    calls = 0

    def allocate(size: int) -> bytearray:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no")
        return bytearray(size)

    tier = tier_of(8, allocate=allocate)
    loan = tier.reserve(keys_of(1, 2, 3), BYTES, SaveClass.CACHEABLE, FOREVER)
    assert loan.codes.tolist() == [Code.OK, Code.FAILED, Code.OK]
    assert loan.end(np.ones(3, np.bool_)).tolist() == [Code.OK, Code.FAILED, Code.OK]
    assert tier.stats()["faults"] == 1


def test_c10_a_loan_that_is_dropped_keeps_its_memory() -> None:
    """C10, R3: nobody may reuse what a copy may still write; `close` says that something runs."""
    tier = tier_of(1)
    loan = tier.reserve(keys_of(1), BYTES, SaveClass.CACHEABLE, FOREVER)
    with pytest.warns(ResourceWarning, match="leaked"):
        del loan
    assert save(tier, 2) == [Code.FULL]
    assert not tier.close(0.0)


def test_c10_nothing_is_lent_after_the_end() -> None:
    """C10: a closed tier refuses a loan, and takes no memory for it."""
    tier = DramTier(1 << 16, lane=InlineLane())
    assert tier.close(math.inf)
    keys = record_keys(np.array([[1, 2]], np.uint64), 0, 0, 1)
    loan = tier.reserve(keys, 1024, SaveClass.CACHEABLE, math.inf)
    assert (loan.codes.tolist(), loan.rows.tolist()) == ([Code.REFUSED], [])
    assert tier.stats()["allocated_bytes"] == 0


def test_h1_a_loan_may_be_of_very_many_records() -> None:
    """H1, R3: a loan of more records than the lock is held for at one time ends record by record, too."""
    count = 2 * LOCKED_RECORDS + 1
    tier = tier_of(count)
    numbers = range(1, count + 1)
    loan = tier.reserve(keys_of(*numbers), BYTES, SaveClass.CACHEABLE, FOREVER)
    assert len(set(loan.address.tolist()) - {0}) == count
    done = np.arange(count) % 3 != 0
    assert not any(present(tier, *numbers))
    assert loan.end(done).tolist() == [Code.OK if whole else Code.FAILED for whole in done.tolist()]
    assert present(tier, *numbers) == done.tolist()
    assert tier.stats()["operations"] == 0
