"""The shared-directory tier against its promises (H, A, R, G7), one member or two in one process."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcontract import FleetSecret
from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane, ManualLane, ThreadLane
from kvcontract.tiers.base import (
    Buffers,
    Code,
    Lease,
    RecordKeys,
    Resets,
    SaveClass,
    TellsLosses,
    Tier,
    record_keys,
)
from kvcontract.tiers.shared import SharedTier

BYTES = 192
BLOCK = 4096
FOREVER = math.inf
LONG_AGO_NS = 1_000_000_000


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


def tier_of(home: Path, records: int, **options: Any) -> SharedTier:
    """A member with room for some records of up to a block."""
    options.setdefault("lane", InlineLane())
    options.setdefault("clock", Clock())
    return SharedTier(home, records * BLOCK, **options)


def save(tier: Tier, *numbers: int, size: int = BYTES, deadline: float = FOREVER) -> list[Code]:
    """Save the content of numbers in one batch."""
    buffers = Buffers.of([content(number, size) for number in numbers])
    op = tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, deadline)
    return [Code(code) for code in op.value]


def hand_off(tier: Tier, name: str | None, *numbers: int) -> list[Code]:
    """Save the content of numbers for a handoff."""
    buffers = Buffers.of([content(number) for number in numbers])
    op = tier.save(keys_of(*numbers), buffers, SaveClass.HANDOFF, FOREVER, handoff=name)
    return [Code(code) for code in op.value]


def load(tier: Tier, lease: Lease, rows: list[int], size: int = BYTES) -> tuple[list[Code], list[bytes]]:
    """Load rows of a lease into fresh memory."""
    target = [np.zeros(size, np.uint8) for _ in rows]
    op = tier.load(lease, np.array(rows, np.int64), Buffers.of(target), FOREVER)
    return [Code(code) for code in op.value], [array.tobytes() for array in target]


def read(tier: Tier, number: int, size: int = BYTES) -> bytes | Code:
    """What a record holds, or why it cannot be had."""
    with tier.lookup(keys_of(number), FOREVER).value as lease:
        [code], [found] = load(tier, lease, [0], size)
    return found if code is Code.OK else code


def present(tier: Tier, *numbers: int) -> list[bool]:
    """Which records a lookup finds; the lease goes back at once."""
    with tier.lookup(keys_of(*numbers), FOREVER).value as lease:
        return [bool(here) for here in lease.present]


def file_of(home: Path, number: int) -> Path:
    """Where a record lies."""
    name = keys_of(number).tobytes().hex()
    return home / "records" / name[:2] / name


def files(home: Path, folder: str = "records") -> list[str]:
    """Names of all files below a folder."""
    return sorted(path.name for path in (home / folder).rglob("*") if not path.is_dir())


def age(path: Path) -> None:
    """Make a file look as if nobody had touched it for long."""
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the store lies."""
    return tmp_path / "store"


def test_saved_bytes_come_back_to_any_member(home: Path) -> None:
    """What one member saved another loads bit for bit, per key and in any order, absent keys beside it."""
    one, two = tier_of(home, 8), tier_of(home, 8)
    assert save(one, 1, 2, 3) == [Code.OK] * 3
    with two.lookup(keys_of(2, 9, 1), FOREVER).value as lease:
        assert lease.present.tolist() == [True, False, True]
        codes, found = load(two, lease, [2, 0, 1, 2])
    assert codes == [Code.OK, Code.OK, Code.MISS, Code.OK]
    assert found[:2] + found[3:] == [content(number).tobytes() for number in (1, 2, 1)]


def test_records_in_pieces(home: Path) -> None:
    """Pieces of memory are gathered on save and scattered on load, more than a system call takes."""
    tier, source = tier_of(home, 4), content(5, 3000)
    cut = np.array([0, 0, *range(1, 3000), 3000])
    op = tier.save(
        keys_of(5),
        Buffers(source.ctypes.data + cut[:-1], np.diff(cut), np.array([0, len(cut) - 1]), (source,)),
        SaveClass.CACHEABLE,
        FOREVER,
    )
    assert op.value.tolist() == [Code.OK]
    target = np.zeros(4000, np.uint8)
    pieces = Buffers(target.ctypes.data + np.array([3000, 0]), np.array([500, 2500]), np.array([0, 2]))
    with tier.lookup(keys_of(5), FOREVER).value as lease:
        assert tier.load(lease, np.array([0]), pieces, FOREVER).value.tolist() == [Code.OK]
    assert np.array_equal(target[3000:3500], source[:500])
    assert np.array_equal(target[:2500], source[500:])
    assert not target[2500:3000].any()


def test_h2_put_is_idempotent(home: Path) -> None:
    """H2: a record that is there is OK and keeps its bytes, whoever writes it again."""
    one, two = tier_of(home, 4), tier_of(home, 4)
    save(one, 1)
    other = Buffers.of([np.zeros(BYTES, np.uint8)])
    assert two.save(keys_of(1), other, SaveClass.CACHEABLE, FOREVER).value.tolist() == [Code.OK]
    assert read(one, 1) == content(1).tobytes()
    assert files(home) == [file_of(home, 1).name]


def test_h2_of_two_at_once_the_first_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: a record that another member put in place while this one was writing is kept, and is OK."""
    one, two = tier_of(home, 4), tier_of(home, 4)
    link = os.link

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", link)
        zeros = Buffers.of([np.zeros(BYTES, np.uint8)])
        assert two.save(keys_of(1), zeros, SaveClass.CACHEABLE, FOREVER).value.tolist() == [Code.OK]
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert save(one, 1) == [Code.OK]
    assert read(one, 1) == bytes(BYTES)
    assert files(home) == [file_of(home, 1).name]
    assert tier_of(home, 4).stats()["used_bytes"] == BLOCK


def test_a_file_system_without_links_is_served(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot have two names, records are renamed into place."""

    def unsupported(source: str, target: str) -> None:
        raise OSError(errno.EOPNOTSUPP, f"no links: {source} {target}")

    monkeypatch.setattr(os, "link", unsupported)
    tier = tier_of(home, 2)
    assert save(tier, 1, 2) == [Code.OK] * 2
    assert save(tier, 1, 3) == [Code.OK] * 2
    assert sum(present(tier, 1, 2, 3)) == 2
    assert read(tier, 3) == content(3).tobytes()
    assert not [name for name in files(home) if name.startswith(".tmp-")]


def failing(call: Callable[..., int], error: int, calls: Iterator[bool]) -> Callable[..., int]:
    """A system call that does half of what it is asked, and fails where the iterator says so."""

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls):
            raise OSError(error, os.strerror(error))
        first = buffers[0]
        return call(fd, [first[: max(1, len(first) // 2)]], offset)

    return half


@pytest.mark.parametrize(
    ("error", "code"), [(errno.ENOSPC, Code.FULL), (errno.EDQUOT, Code.FULL), (errno.EIO, Code.FAILED)]
)
def test_h4_a_failing_write_leaves_the_key_absent(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: int, code: Code
) -> None:
    """H4, H2, H1: short writes go on; one that fails leaves nothing, not even for its neighbours."""
    tier, write = tier_of(home, 8), os.pwritev
    first = iter([False, False, False, True, True])  # fails midway, and when there was made room
    monkeypatch.setattr(os, "pwritev", failing(write, error, first))
    assert save(tier, 1) == [code]
    assert present(tier, 1) == [False]
    assert files(home) == []
    assert tier.stats()["used_bytes"] == 0
    monkeypatch.setattr(os, "pwritev", failing(write, error, iter([False] * 1000)))
    assert save(tier, 1, 2) == [Code.OK] * 2
    assert read(tier, 1) == content(1).tobytes()


def test_h4_a_full_disk_makes_room_for_new_records(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: where the disk is smaller than the quota, old records go for new ones all the same."""
    tier, write = tier_of(home, 8), os.pwritev
    save(tier, 1, 2)
    for number in (1, 2):
        age(file_of(home, number))

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(files(home)) > 2:  # two records are there, and one is being written
            raise OSError(errno.ENOSPC, "no space left")
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    assert save(tier, 3) == [Code.OK]
    assert sum(present(tier, 1, 2)) == 1
    assert read(tier, 3) == content(3).tobytes()
    assert tier.stats()["evictions"] == 1


def truncate(path: Path) -> None:
    """A torn write."""
    os.truncate(path, path.stat().st_size - 50)


def empty(path: Path) -> None:
    """What a crash of the machine leaves."""
    os.truncate(path, 0)


def foreign(path: Path) -> None:
    """Somebody else's file under a name of ours."""
    path.write_bytes(b"what is this doing here?" * 100)


def folder(path: Path) -> None:
    """Not a file at all."""
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    """Whoever opens it the ordinary way waits for ever."""
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    """A way out of the directory."""
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def swapped(path: Path) -> None:
    """The bytes of another record, whole."""
    name = keys_of(2).tobytes().hex()
    path.write_bytes((path.parents[1] / name[:2] / name).read_bytes())


@pytest.mark.parametrize("damage", [truncate, empty, foreign, folder, pipe, link, swapped])
def test_h4_what_is_no_record_is_a_miss_and_heals(home: Path, damage: Callable[[Path], None]) -> None:
    """H4, H3, E7: found before or after the look-up, it is never OK, found once at most, and saved anew."""
    for early in (True, False):
        tier = tier_of(home, 16, touch_s=FOREVER)
        save(tier, 1, 2)
        path = file_of(home, 1)
        if early:
            damage(path)
        with tier.lookup(keys_of(1, 2), FOREVER).value as lease:
            if not early:
                damage(path)
            codes, found = load(tier, lease, [0, 1])
        assert codes[0] in {Code.CORRUPT, Code.MISS}
        assert (codes[1], found[1]) == (Code.OK, content(2).tobytes())
        assert present(tier, 1) == [False]
        assert tier.stats()["quarantined"] == (codes[0] == Code.CORRUPT)
        assert save(tier, 1) == [Code.OK]
        assert read(tier, 1) == content(1).tobytes()
        assert tier.reset(FOREVER).value


def test_h4_a_read_that_fails_is_a_miss(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: an unreadable record is set aside; being out of descriptors says nothing about the record."""
    tier, real = tier_of(home, 8), os.preadv
    save(tier, 1)
    monkeypatch.setattr(os, "preadv", failing(real, errno.EIO, iter([False, True])))
    assert read(tier, 1) is Code.CORRUPT
    monkeypatch.setattr(os, "preadv", failing(real, errno.EMFILE, iter([True])))
    save(tier, 1)
    assert read(tier, 1) is Code.FAILED
    monkeypatch.setattr(os, "preadv", real)
    assert read(tier, 1) == content(1).tobytes()
    assert tier.stats()["quarantined"] == 1


def test_h4_foreign_files_are_left_alone(home: Path) -> None:
    """H4: what is not ours is counted and neither read, evicted nor taken away."""
    tier = tier_of(home, 2)
    save(tier, 1)
    others = [home / "records" / "01" / "notes.txt", home / "records" / "README", home / "leases" / "x"]
    for path in others:
        path.write_bytes(bytes(3 * BLOCK))
        age(path)
    (home / "records" / "zz").mkdir()
    again = tier_of(home, 2, leftover_s=0.0)
    assert save(again, 2, 3) == [Code.OK] * 2
    assert all(path.exists() for path in others)
    assert again.stats()["foreign"] == 1
    assert again.stats()["used_bytes"] == 2 * BLOCK


def test_h5_quota_is_kept_and_the_least_used_goes_first(home: Path) -> None:
    """H5: the quota holds; a record that was looked up outlives older ones, whoever looked."""
    one, two = tier_of(home, 3), tier_of(home, 3)
    save(one, 1, 2, 3)
    for number, at in ((1, 1), (2, 2), (3, 3)):
        os.utime(file_of(home, number), ns=(at, at))
    again = tier_of(home, 3)
    present(two, 1)
    assert save(again, 4) == [Code.OK]
    assert present(again, 1, 2, 3, 4) == [True, False, True, True]
    stats = again.stats()
    assert (stats["used_bytes"], stats["evictions"], stats["records"]) == (3 * BLOCK, 1, 3)


def test_h5_records_used_since_can_still_go(home: Path) -> None:
    """H5: when everything was used since the last walk, the least recently used goes all the same."""
    tier = tier_of(home, 3, touch_s=0.0)
    save(tier, 1, 2, 3)
    later = 2_000_000_000 * 10**9
    for number in (2, 3, 1):
        later += 1
        os.utime(file_of(home, number), ns=(later, later))
    assert save(tier, 4) == [Code.OK]
    assert present(tier, 1, 2, 3, 4) == [True, False, True, True]


def test_h5_a_lease_of_any_member_blocks_eviction(home: Path) -> None:
    """H5: what is leased is not evicted; with everything leased a save is FULL and leaves no trace."""
    one, two = tier_of(home, 2), tier_of(home, 2)
    save(one, 1, 2)
    lease = two.lookup(keys_of(1, 2), FOREVER).value
    assert save(one, 3) == [Code.FULL]
    assert present(one, 1, 2, 3) == [True, True, False]
    lease.release()
    assert two.stats()["leases"] == 0
    assert save(one, 3) == [Code.OK]
    assert sum(present(one, 1, 2, 3)) == 2
    assert one.stats()["leases"] == 0
    assert files(home, "leases") == [name for name in files(home, "leases") if name.startswith(".tmp-")]


def test_h5_a_lease_that_comes_during_an_eviction(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H5: a record leased after the evictor looked gets its name back, and is readable all the while."""
    one, two = tier_of(home, 1), tier_of(home, 1)
    save(one, 1)
    rename, held = os.rename, list[Lease]()

    def slow(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        held.append(two.lookup(keys_of(1), FOREVER).value)
        rename(source, target)
        assert present(two, 1) == [False]
        codes, found = load(two, held[0], [0])
        assert (codes, found) == ([Code.OK], [content(1).tobytes()])

    monkeypatch.setattr(os, "rename", slow)
    assert save(one, 2) == [Code.FULL]
    assert held[0].present.tolist() == [True]
    assert present(one, 1) == [True]
    held[0].release()


def test_h5_r7_usage_is_right_after_a_restart(home: Path) -> None:
    """H5, R7: a member that comes finds what is there, counted, and keeps the quota with it."""
    first = tier_of(home, 8)
    save(first, 1, 2, 3, size=5000)
    assert first.close(FOREVER)
    second = tier_of(home, 8)
    stats = second.stats()
    assert (stats["used_bytes"], stats["records"]) == (6 * BLOCK, 3)
    assert read(second, 2, 5000) == content(2, 5000).tobytes()
    smaller = tier_of(home, 4)
    assert save(smaller, 4) == [Code.OK]
    assert smaller.stats()["used_bytes"] <= 4 * BLOCK


def test_h7_oversized_is_refused_alone(home: Path) -> None:
    """H7: a record larger than the tier is refused, evicts nothing, and hurts no neighbour."""
    tier = tier_of(home, 2)
    save(tier, 1, 2)
    largest = tier.capabilities.max_record_bytes
    assert largest is not None
    assert save(tier, 3, size=largest + 1) == [Code.TOO_LARGE]
    assert present(tier, 1, 2, 3) == [True, True, False]
    assert save(tier, 3, size=largest) == [Code.OK]
    assert read(tier, 3, largest) == content(3, largest).tobytes()


def test_r3_nothing_is_findable_before_it_is_complete(home: Path) -> None:
    """R3: before the last byte is written nobody finds a record; R8: the operation is seen while it runs."""
    lane = ManualLane()
    one, two = tier_of(home, 2, lane=lane), tier_of(home, 2)
    lane.drain()
    op = one.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert not op.done
    assert present(two, 1) == [False]
    assert one.stats()["operations"] == 1
    lane.drain()
    assert op.value.tolist() == [Code.OK]
    assert present(two, 1) == [True]
    assert one.stats()["operations"] == 0


def test_a3_a_running_load_keeps_its_record(home: Path) -> None:
    """A3, R3: a load outlives its lease; until it settles nobody evicts what it reads."""
    lane = ManualLane()
    reader, writer = tier_of(home, 1, lane=lane), tier_of(home, 1)
    save(writer, 1)
    pending = reader.lookup(keys_of(1), FOREVER)
    lane.drain()
    target = np.zeros(BYTES, np.uint8)
    op = reader.load(pending.value, np.array([0]), Buffers.of([target]), FOREVER)
    pending.value.release()
    assert reader.stats()["leases"] == 0
    assert save(writer, 2) == [Code.FULL]
    lane.drain()
    assert op.value.tolist() == [Code.OK]
    assert target.tobytes() == content(1).tobytes()
    assert save(writer, 2) == [Code.OK]


def test_load_after_release_is_expired(home: Path) -> None:
    """A lease that ended gives nothing, even if the record is still there; a foreign one is refused."""
    tier, other = tier_of(home, 1), tier_of(home, 1, name="other")
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lease.release()
    assert load(tier, lease, [0])[0] == [Code.EXPIRED]
    with other.lookup(keys_of(1), FOREVER).value as foreign_lease:
        assert load(tier, foreign_lease, [0])[0] == [Code.REFUSED]


def test_bad_requests_are_codes(home: Path) -> None:
    """R4: wrong lengths, rows and counts are codes of what they befall, never exceptions."""
    tier = tier_of(home, 2)
    save(tier, 1)
    with tier.lookup(keys_of(1), FOREVER).value as lease:
        assert load(tier, lease, [0], size=BYTES - 1)[0] == [Code.SHORT]
        assert load(tier, lease, [1, -1, 0])[0] == [Code.REFUSED, Code.REFUSED, Code.OK]
        op = tier.load(lease, np.array([0, 0]), Buffers.of([content(1)]), FOREVER)
        assert op.value.tolist() == [Code.REFUSED] * 2
    op = tier.save(keys_of(1, 2), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert op.value.tolist() == [Code.REFUSED] * 2
    assert save(tier, 2, size=0) == [Code.REFUSED]
    assert load(tier, Lease.nothing("shared", 1), [0])[0] == [Code.MISS]
    assert tier.stats()["quarantined"] == 0


def test_a9_nothing_is_begun_after_the_deadline(home: Path) -> None:
    """A9: a deadline that has passed ends lookups and records without touching memory or disk."""
    clock = Clock()
    tier = tier_of(home, 2, clock=clock)
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


def test_a2_a6_late_and_dropped_leases_come_back(home: Path) -> None:
    """A2, A6: a lease that nobody waits for any more, or that is lost, frees its records."""
    tier = tier_of(home, 1)
    save(tier, 1)
    tier.lookup(keys_of(1), FOREVER).on_done(Lease.release)
    pending = [tier.lookup(keys_of(1), FOREVER)]
    with pytest.warns(ResourceWarning, match="dropped"):
        pending.clear()
    assert tier.stats()["leases"] == 0
    assert save(tier, 2) == [Code.OK]


def test_h3_discard_forgets_a_damaged_record_but_not_its_successor(home: Path) -> None:
    """H3, E7: a discarded record is absent at once, can be saved anew, and the new one stays."""
    tier = tier_of(home, 4)
    save(tier, 1)
    lease = tier.lookup(keys_of(1, 7), FOREVER).value
    tier.discard(lease, np.array([0, 1, 5]))
    assert present(tier, 1) == [False]
    lease.release()
    assert save(tier, 1) == [Code.OK]
    tier.discard(lease, np.array([0]))
    assert present(tier, 1) == [True]
    assert tier.stats()["quarantined"] == 1


def test_g7_handoff_is_kept_until_any_member_releases_it(home: Path) -> None:
    """G7: handoff records are not evicted before their release, by whichever member, however often."""
    one = tier_of(home, 2)
    save(one, 1)
    assert hand_off(one, "a", 1) == [Code.OK]
    assert hand_off(one, None, 2) == [Code.OK]
    two = tier_of(home, 2)
    assert save(two, 3) == [Code.FULL]
    for name in ("a", "a", "unknown"):
        two.release_handoff(name)
    assert save(two, 3) == [Code.OK]
    assert present(two, 1, 2, 3) == [False, True, True]


def test_g7_handoff_ends_by_time_and_is_never_refreshed(home: Path) -> None:
    """G7, R5: an unreleased handoff ends by the file system's time, counted from its first save."""
    clock = Clock()
    tier = tier_of(home, 2, clock=clock, handoff_ttl_s=60.0)
    hand_off(tier, "a", 1)
    [first] = (home / "leases").glob("h-*")
    hand_off(tier, "a", 2)
    assert save(tier, 3) == [Code.FULL]
    age(first)
    assert save(tier, 3, 4) == [Code.OK] * 2
    assert list((home / "leases").glob("h-*")) == []
    assert tier.stats()["handoffs"] == 1
    clock.now_s = 60.0
    assert tier.stats()["handoffs"] == 0


def test_g7_a_release_counts_before_its_files_are_gone(home: Path) -> None:
    """G7: for the member that releases, a handoff has ended at once, whatever the lane still has to do."""
    lane = ManualLane()
    tier = tier_of(home, 1, lane=lane)
    lane.drain()
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.HANDOFF, FOREVER, handoff="a")
    lane.drain()
    later = tier.save(keys_of(2), Buffers.of([content(2)]), SaveClass.CACHEABLE, FOREVER)
    tier.release_handoff("a")
    lane.drain()
    assert [op.value.tolist(), later.value.tolist()] == [[Code.OK], [Code.OK]]


def test_h5_a_released_lease_counts_no_more_before_its_file_is_gone(home: Path) -> None:
    """H5, A6: for the member that gives a lease back, its records are free at once."""
    lane = ManualLane()
    tier = tier_of(home, 1, lane=lane)
    save(tier_of(home, 1), 1)
    lane.drain()
    pending = tier.lookup(keys_of(1), FOREVER)
    lane.drain()
    later = tier.save(keys_of(2), Buffers.of([content(2)]), SaveClass.CACHEABLE, FOREVER)
    pending.value.release()
    assert tier.stats()["leases"] == 0
    lane.step()
    assert later.value.tolist() == [Code.OK]
    lane.drain()


def test_r5_leases_of_the_dead_end_by_time(home: Path) -> None:
    """R5: a lease that nobody touches ends; one that is used is touched; one from the future ends too."""
    clock = Clock()
    dead = tier_of(home, 1, clock=clock)
    save(dead, 1)
    live = tier_of(home, 1)
    lease = dead.lookup(keys_of(1), FOREVER).value
    [path] = (home / "leases").glob("r-*")
    age(path)
    clock.now_s = 30.0
    assert load(dead, lease, [0])[0] == [Code.OK]
    assert save(live, 2) == [Code.FULL]
    os.utime(path, (4e9, 4e9))
    assert save(live, 2) == [Code.OK]
    clock.now_s = 60.0
    assert load(dead, lease, [0])[0] == [Code.EXPIRED]
    lease.release()
    assert dead.stats()["leases"] == 0


def test_r5_r7_leftovers_are_swept_by_whoever_comes(home: Path) -> None:
    """R5, R7: what dead members were writing, evicting or had set aside goes; a leased record comes back."""
    one = tier_of(home, 8)
    save(one, 1, 2, 3, 4, 5)
    lease = one.lookup(keys_of(2), FOREVER).value
    for number, ending in ((1, ".going"), (2, ".going"), (3, ".bad"), (4, ".gone")):
        path = file_of(home, number)
        path.rename(path.with_name(path.name + ending))
    old, young = (file_of(home, 5).with_name(f".tmp-{name}-1") for name in ("0" * 16, "1" * 16))
    for path in (old, young):
        path.write_bytes(bytes(100))
    for path in [old, *home.glob("records/*/*.bad")]:
        age(path)
    two = tier_of(home, 8)
    assert present(two, 1, 2, 3, 4, 5) == [False, True, False, False, True]
    assert files(home) == sorted([young.name, file_of(home, 2).name, file_of(home, 5).name])
    assert two.stats()["swept"] == 4
    lease.release()


def test_h9_a_directory_that_goes_away_and_comes_back(home: Path) -> None:
    """H9, R4: while it is away lookups miss and saves fail; nothing grows in its place; then work goes on."""
    clock = Clock()
    tier = tier_of(home, 4, clock=clock)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    away = home.rename(home.with_name("away"))
    home.mkdir()  # an empty mount point
    found = tier.lookup(keys_of(1), FOREVER).value
    assert (found.present.tolist(), found.failed) == ([False], True)
    assert load(tier, lease, [0])[0] == [Code.MISS]
    assert save(tier, 2) == [Code.FAILED]
    assert hand_off(tier, "a", 3) == [Code.FAILED]
    assert tier.reset(FOREVER).value is False
    assert list(home.iterdir()) == []
    assert tier.stats()["lookup_failed"] == 1
    assert tier.stats()["save_failed"] == 2
    home.rmdir()
    away.rename(home)
    clock.now_s = 5.0
    assert load(tier, lease, [0])[0] == [Code.OK]
    lease.release()
    assert save(tier, 2) == [Code.OK]
    assert present(tier, 1, 2) == [True, True]
    assert tier.close(FOREVER)


def test_h9_another_store_in_its_place_is_not_touched(home: Path) -> None:
    """H9: a mount that comes back with another store gives misses until the right one is there."""
    tier, other = tier_of(home, 4), tier_of(home.with_name("other"), 4)
    save(tier, 1)
    save(other, 1, 2)
    home.rename(home.with_name("away"))
    home.with_name("other").rename(home)
    assert present(tier, 1) == [False]
    assert save(tier, 3) == [Code.FAILED]
    assert len(files(home)) == 2


def test_h9_a_directory_that_turns_read_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H9: nothing can be leased or saved then, so nothing is found; afterwards everything is."""
    tier = tier_of(home, 4)
    save(tier, 1)
    real = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "read-only file system", path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    assert present(tier, 1) == [False]
    assert save(tier, 2) == [Code.FAILED]
    monkeypatch.undo()
    assert save(tier, 2) == [Code.OK]
    assert present(tier, 1, 2) == [True, True]


def test_h6_another_agreement_is_refused_with_both_sides(home: Path) -> None:
    """H6, I3: who joins with other facts is told each of them as it is here and there."""
    tier_of(home, 4, meta={"max_tp": 8, "page": 16})
    tier_of(home, 4, meta={"page": 16, "max_tp": 8})
    with pytest.raises(UsageFault, match=r"max_tp is 8 there and 4 here; page is 16 there and None here"):
        tier_of(home, 4, meta={"max_tp": 4})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"kind": "kvcontract shared tier", "format": 1, "id": "x", "meta": {}}), "format 1"),
        (json.dumps({"kind": "disk", "format": 2}), "'disk'"),
        (json.dumps({"kind": "kvcontract shared tier", "format": 2, "id": "x"}), "other fields"),
        ("{", "describes no store"),
        ("[]", "describes no store"),
    ],
)
def test_h6_another_format_is_refused_whole(home: Path, text: str, said: str) -> None:
    """H6: a store that this version does not read is left as it is."""
    home.mkdir()
    (home / "store.json").write_text(text)
    with pytest.raises(UsageFault, match=said):
        tier_of(home, 4)
    assert [path.name for path in home.iterdir()] == ["store.json"]


def test_a_directory_of_other_things_is_refused(home: Path) -> None:
    """Nobody's files become neighbours of records by a slip of the path."""
    home.mkdir()
    (home / "thesis.tex").write_text("...")
    with pytest.raises(UsageFault, match=r"holds 'thesis\.tex'"):
        tier_of(home, 4)


def test_founders_at_the_same_time_agree(home: Path) -> None:
    """Of several who found a store at once, all are members of one, with one secret."""
    gate, made, secrets = threading.Barrier(8), list[SharedTier](), set[bytes]()

    def found() -> None:
        gate.wait()
        tier = tier_of(home, 16, meta={"max_tp": 8})
        secrets.add(tier.keep_secret(FleetSecret.random()).value)
        made.append(tier)

    threads = [threading.Thread(target=found) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(secrets) == 1
    for number, tier in enumerate(made):
        assert save(tier, number + 1) == [Code.OK]
    assert all(present(made[0], *range(1, 9)))
    assert sorted(path.name for path in home.iterdir()) == ["leases", "records", "secret", "store.json"]


def test_d4_no_text_of_a_caller_reaches_the_directory(home: Path) -> None:
    """D4: names of handoffs are hidden; the directory is its owner's alone."""
    tier = tier_of(home, 4)
    tier.keep_secret(FleetSecret.random())
    hand_off(tier, "request of Alice", 1)
    tier.lookup(keys_of(1), FOREVER).on_done(Lease.release)
    paths = list(home.rglob("*"))
    assert not [path for path in paths if "Alice" in path.name]
    assert not [path for path in paths if path.is_file() and b"Alice" in path.read_bytes()]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_c8_flush_covers_what_was_submitted_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: a flush settles with the saves before it; durable means synced, and a sync that fails is told."""
    clock, lane = Clock(), ManualLane()
    tier = tier_of(home, 4, clock=clock, lane=lane)
    lane.drain()
    synced, fsync = list[int](), os.fsync

    def sync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 1:
            raise OSError(errno.EIO, "the disk says no")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    assert tier.flush("landed", FOREVER).value is True
    tier.save(keys_of(1, 2), Buffers.of([content(1), content(2)]), SaveClass.CACHEABLE, FOREVER)
    landed, visible = tier.flush("landed", FOREVER), tier.flush("visible", 5.0)
    durable = tier.flush("durable", FOREVER)
    assert not landed.done
    lane.step()
    assert (landed.value, visible.value, durable.done, synced) == (True, True, False, [])
    lane.drain()
    assert durable.value is False
    again = tier.flush("durable", FOREVER)
    lane.drain()
    assert again.value is True
    assert len(synced) == 1 + 4
    clock.now_s = 6.0
    assert tier.flush("visible", 5.0).value is False


def test_c10_close_waits_and_refuses(home: Path) -> None:
    """C10: close is bounded and says when something still runs; afterwards everything is refused."""
    lane, hold, begun = ThreadLane("files"), threading.Event(), threading.Event()
    tier = tier_of(home, 2, lane=lane)
    lane.submit(begun.set)
    lane.submit(lambda: hold.wait(30.0))
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    pending = tier.lookup(keys_of(1), FOREVER)
    assert begun.wait(30.0)
    assert not tier.close(0.0)
    assert save(tier, 2) == [Code.REFUSED]
    hold.set()
    assert op.wait(30.0).tolist() == [Code.OK]
    lease = pending.wait(30.0)
    assert tier.close(FOREVER)
    assert files(home, "leases") == []
    assert load(tier, lease, [0])[0] == [Code.EXPIRED]
    assert not tier.lookup(keys_of(1), FOREVER).value.present.any()
    assert tier.flush("durable", FOREVER).value is False
    assert tier.reset(FOREVER).value is False
    tier.release_handoff("a")
    lease.release()
    assert tier.close(FOREVER)
    assert lane.close(30.0)


def test_closed_lane_is_a_code(home: Path) -> None:
    """R4: a lane that takes no more work refuses records, and nothing stays held."""
    lane = InlineLane()
    tier = tier_of(home, 1, lane=lane)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lane.close(0.0)
    assert load(tier, lease, [0])[0] == [Code.REFUSED]
    assert save(tier, 2) == [Code.REFUSED]
    lease.release()
    assert tier.stats()["operations"] == 0
    assert tier.stats()["leases"] == 0


def test_a10_lookup_that_breaks_finds_nothing(home: Path) -> None:
    """A10: an error inside a lookup is counted and settles with an empty lease."""
    tier = tier_of(home, 1)
    lease = tier.lookup(np.zeros((2, 2), np.uint8), FOREVER).value  # type: ignore[arg-type]
    assert (lease.present.tolist(), lease.failed) == ([False, False], True)
    assert tier.stats()["faults"] == 1


def test_reset_forgets_for_every_member(home: Path) -> None:
    """Every record is absent afterwards; who reads one goes on reading what was there; then it is gone."""
    one, two = tier_of(home, 4), tier_of(home, 4, sweep_s=0.0)
    hand_off(one, "a", 1)
    save(one, 2, 3)
    lease = two.lookup(keys_of(2), FOREVER).value
    assert one.reset(FOREVER).value is True
    assert present(two, 1, 2, 3) == [False] * 3
    assert load(two, lease, [0])[1] == [content(2).tobytes()]
    lease.release()
    assert present(two, 1, 2, 3) == [False] * 3
    assert two.stats()["used_bytes"] == 0
    assert files(home) == []


def test_h10_capabilities_say_what_it_can_do(home: Path) -> None:
    """H10: lasting and common; it forgets on demand, and does not claim to tell what others evict."""
    tier = tier_of(home, 4)
    can = tier.capabilities
    assert (can.persistent, can.shared, can.scopes, can.handoff_release) == (True, True, True, "early")
    assert isinstance(tier, Resets)
    assert not isinstance(tier, TellsLosses)
    with pytest.raises(UsageFault, match="4095 B"):
        SharedTier(home, 4095)


def test_r8_gauges_return_to_zero_under_threads(home: Path) -> None:
    """R8, R3: savers, loaders and evictions of two members: loaded bytes are whole, gauges end at 0."""
    tiers = [SharedTier(home, 5 * BLOCK) for _ in range(2)]
    wrong, codes = list[int](), list[int]()

    def work(seed: int) -> None:
        rng, tier = np.random.default_rng(seed), tiers[seed % 2]
        for _ in range(40):
            numbers = rng.integers(0, 12, 3).tolist()
            buffers = Buffers.of([content(number) for number in numbers])
            op = tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, FOREVER)
            codes.extend(op.wait(60.0).tolist())
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
    for tier in tiers:
        assert tier.stats()["leases"] == 0
        assert list(tier.faults) == []
        assert tier.close(60.0 + tier._clock())
    last = tier_of(home, 5)
    assert last.stats()["used_bytes"] == last.stats()["records"] * BLOCK <= 6 * BLOCK


steps = st.lists(
    st.tuples(
        st.sampled_from(["save", "big", "look", "hold", "free"]),
        st.lists(st.integers(0, 7), min_size=1, max_size=4),
    ),
    max_size=20,
)


@settings(max_examples=25, deadline=None)
@given(script=steps)
def test_h1_batches_equal_their_singles(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, list[int]]]
) -> None:
    """H1: whatever the history, a batch leaves what its singles leave."""
    batch, single = (tier_of(tmp_path_factory.mktemp("h1"), 5, touch_s=FOREVER) for _ in range(2))
    held: list[Lease] = []
    for verb, numbers in script:
        if verb in {"save", "big"}:
            size = BYTES if verb == "save" else BLOCK
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
        gauges = ("used_bytes", "records", "hits", "misses", "faults")
        assert [batch.stats()[name] for name in gauges] == [single.stats()[name] for name in gauges]
        assert batch.stats()["used_bytes"] <= batch.stats()["capacity_bytes"]
    for lease in held:
        lease.release()
