"""The staging memory: bounded, by urgency and in order, aligned, and never stuck."""

from __future__ import annotations

from typing import Any

import pytest

from kvcontract.contract.errors import InternalFault
from kvcontract.core.lane import Urgency
from kvcontract.core.pending import Pending
from kvcontract.memory.slab import PAGE_BYTES, Allocate, Holes, Slab
from kvcontract.memory.staging import Room, Staging

URGENT, CALM = Urgency.RESTORE, Urgency.CACHEABLE
KIB = 1024


def room_of(asked: Pending[Room | Exception]) -> Room:
    """What was given."""
    assert isinstance(asked.value, Room)
    return asked.value


def test_grants_in_order_and_within_the_limit() -> None:
    """A small request does not overtake a big one that waits."""
    staging, given = Staging(100), []
    first = staging.take(60, CALM)
    for name, size in (("big", 50), ("small", 10)):
        staging.take(size, CALM).on_done(lambda _, name=name: given.append(name))
    assert staging.used_bytes == 60
    assert not given
    room_of(first).give_back()
    room_of(first).give_back()
    assert given == ["big", "small"]
    assert staging.used_bytes == 60


def test_who_is_urgent_waits_for_nobody_who_is_not() -> None:
    """What is given back goes to the most urgent first, and within that to whoever asked first."""
    staging, given = Staging(100), []
    first = staging.take(100, CALM)
    asked = []
    for name, urgency in (("a", CALM), ("b", Urgency.HANDOFF), ("c", CALM), ("d", URGENT)):
        asked.append(staging.take(100, urgency))
        asked[-1].on_done(lambda _, name=name: given.append(name))
    room_of(first).give_back()
    for number in (3, 1, 0, 2):
        room_of(asked[number]).give_back()
    assert given == ["d", "b", "a", "c"]
    assert staging.used_bytes == 0


def test_a_request_above_the_limit_is_served_alone() -> None:
    """A record larger than the whole limit still moves, when nothing else does."""
    for allocate in (None, bytearray):
        staging = Staging(100, allocate)
        first, second = staging.take(500, CALM), staging.take(1, CALM)
        assert not second.done
        assert len(room_of(first).memory) == 500
        room_of(first).give_back()
        assert second.done


def test_giving_back_too_much_is_our_fault() -> None:
    """More bytes back than were granted is an accounting error, not a negative gauge."""
    with pytest.raises(InternalFault):
        Staging(10).give_back(1, None)


@pytest.mark.parametrize("allocate", [None, bytearray])
def test_memory_is_aligned_and_never_given_twice(allocate: Allocate | None) -> None:
    """Rooms begin at pages of memory, so that direct I/O takes them, and do not overlap."""
    staging = Staging(64 * KIB, allocate)
    rooms = [room_of(staging.take(size, CALM)) for size in (1, 5000, 4096, 20_000)]
    for number, room in enumerate(rooms):
        assert room.memory.ctypes.data % PAGE_BYTES == 0
        room.memory[:] = number
    assert all((room.memory == number).all() for number, room in enumerate(rooms))
    for room in rooms:
        room.give_back()
    assert len(room_of(staging.take(64 * KIB, CALM)).memory) == 64 * KIB


def test_pinned_memory_is_taken_once() -> None:
    """What is slow to get is taken whole, at first use; why there is none is an outcome like others."""
    calls: list[int] = []

    def allocate(size: int) -> Any:
        calls.append(size)
        if len(calls) == 1:
            raise OSError("no memory to pin")
        return bytearray(size)

    staging = Staging(64 * KIB, allocate)
    assert not calls
    assert isinstance(staging.take(100, CALM).value, OSError)
    for _ in range(5):
        room_of(staging.take(30_000, CALM)).give_back()
    assert len(calls) == 2
    assert staging.used_bytes == 0


def test_holes_join() -> None:
    """Pieces that come back in any order are one hole again."""
    holes = Holes(10 * PAGE_BYTES)
    starts = [holes.take(2 * PAGE_BYTES - 5) for _ in range(5)]
    assert holes.take(1) is None
    for start in (starts[1], starts[3], starts[2], starts[0], starts[4]):
        assert start is not None
        holes.give(start)
    assert holes.take(10 * PAGE_BYTES) == 0
    with pytest.raises(InternalFault):
        holes.give(5)


def test_a_slab_is_cut_up_and_grows_together() -> None:
    """Pieces of a slab come back with their last reference; what does not fit is allocated apart."""
    calls: list[int] = []

    def allocate(size: int) -> Any:
        calls.append(size)
        return bytearray(size)

    slab = Slab(8 * PAGE_BYTES, allocate)
    pieces = [slab(3 * PAGE_BYTES) for _ in range(2)]
    assert len(calls) == 1
    apart = slab(3 * PAGE_BYTES)
    assert len(calls) == 2
    assert len(apart) == 3 * PAGE_BYTES
    pieces.clear()
    whole = slab(8 * PAGE_BYTES)
    assert len(calls) == 2
    assert len(whole) == 8 * PAGE_BYTES
