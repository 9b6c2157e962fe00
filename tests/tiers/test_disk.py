"""The disk tier against its promises (H, A, R, C, D, G)."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from disk_rig import (
    BIG,
    BYTES,
    CALM_S,
    DISK_FULL,
    FOREVER,
    SLOT,
    Clock,
    FaultyFiles,
    content,
    equal,
    flush,
    keys_of,
    load,
    present,
    raising,
    save,
    segment_files,
    tier_of,
    usage_is_right,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcontract import FleetSecret
from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane, ManualLane, ThreadLane
from kvcontract.tiers.base import Buffers, Code, Lease, Resets, SaveClass, TellsLosses, record_keys
from kvcontract.tiers.disk import DiskTier
from kvcontract.tiers.disk_files import direct_alignment

# Bytes


@pytest.mark.parametrize("direct", [False, None], ids=["buffered", "direct"])
@pytest.mark.parametrize("size", [1, BYTES, 4032, 4033, 5000, 8192, 3 * 2**20 + 1])
@pytest.mark.filterwarnings("ignore:.*refuses direct I/O:RuntimeWarning")
def test_r7_saved_bytes_come_back_after_a_restart(tmp_path: Path, size: int, *, direct: bool | None) -> None:
    """R7: any length, in a second process's place, in any order and absent keys beside it."""
    with_room = 8 * 2**20 // SLOT
    tier = tier_of(tmp_path, with_room, direct=direct)
    assert save(tier, 1, 2, size=size) == [Code.OK] * 2
    assert equal(tier, 2, 9, 1, size=size) == [True, None, True]
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, with_room, direct=direct)
    assert equal(tier, 2, 9, 1, size=size) == [True, None, True]
    assert usage_is_right(tier)
    assert tier.stats()["used_bytes"] == 2 * size
    assert tier.close(FOREVER)


@pytest.mark.parametrize("direct", [False, None], ids=["buffered", "direct"])
@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.filterwarnings("ignore:.*refuses direct I/O:RuntimeWarning")
def test_records_in_pieces(tmp_path: Path, shift: int, *, direct: bool | None) -> None:
    """Pieces are gathered and scattered, whatever their lengths, places and number, cut anew each time."""
    tier = tier_of(tmp_path, 4096, direct=direct)
    rng = np.random.default_rng(3)
    for number, size in enumerate((40_000, 2 * 2**20 + 77, 1_300_000)):
        head = int(rng.integers(64, 300))
        memory = np.zeros(size + 20_000, np.uint8)
        base = -(-memory.ctypes.data // 4096) * 4096 + shift
        for cuts in ([head], [head, head + 4096], sorted(rng.integers(1, size, 1500).tolist())):
            edges = np.array([0, *cuts, size])
            starts = base + edges[:-1] + np.where(edges[:-1] > 0, 8192 - head, 0)
            whole = Buffers(starts, np.diff(edges), np.array([0, len(edges) - 1]), (memory,))
            source = np.frombuffer(content(number, size), np.uint8)
            key = record_keys(np.array([[number, len(cuts)]], np.uint64), 1, 0, 1)
            for start, first, last in zip(starts, edges[:-1], edges[1:], strict=True):
                at = int(start) - memory.ctypes.data
                memory[at : at + last - first] = source[first:last]
            assert tier.save(key, whole, SaveClass.CACHEABLE, FOREVER).value.tolist() == [Code.OK]
            memory[:] = 0
            with tier.lookup(key, FOREVER).value as lease:
                assert tier.load(lease, np.array([0]), whole, FOREVER).value.tolist() == [Code.OK]
                again = np.zeros(size, np.uint8)
                assert not tier.load(lease, np.array([0]), Buffers.of([again]), FOREVER).value.any()
            assert np.array_equal(again, source)
            for start, first, last in zip(starts, edges[:-1], edges[1:], strict=True):
                at = int(start) - memory.ctypes.data
                assert np.array_equal(memory[at : at + last - first], source[first:last])
    assert tier.close(FOREVER)


def test_a_file_system_without_direct_io_is_said_aloud(tmp_path: Path) -> None:
    """Records go through the page cache then; a warning and a figure say so."""
    files = FaultyFiles()

    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "no direct I/O here")

    files.faults["open"] = refuse
    with pytest.warns(RuntimeWarning, match="refuses direct I/O"):
        tier = tier_of(tmp_path, 4, direct=None, files=files)
    files.faults.clear()
    assert save(tier, 1) == [Code.OK]
    assert equal(tier, 1) == [True]
    assert tier.stats()["direct_io"] == 0
    assert direct_alignment(files, tmp_path) in (None, 64, 512, 4096)
    assert tier.close(FOREVER)


# The tier's verbs


def test_h2_put_is_idempotent(tmp_path: Path) -> None:
    """H2: a record that is there is OK, keeps its bytes, and takes no room."""
    tier = tier_of(tmp_path, 4)
    save(tier, 1)
    before = tier.stats()
    other = Buffers.of([np.zeros(BYTES, np.uint8)])
    assert tier.save(keys_of(1), other, SaveClass.CACHEABLE, FOREVER).value.tolist() == [Code.OK]
    assert tier.stats()["used_bytes"] == before["used_bytes"]
    assert equal(tier, 1) == [True]
    assert tier.close(FOREVER)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(("code", "said"), [(errno.EIO, Code.FAILED), (errno.ENOSPC, Code.FULL)])
def test_h2_h4_a_failed_write_leaves_the_key_absent(
    tmp_path: Path, code: int, said: Code, *, torn: bool
) -> None:
    """H2, H4: a write that fails, torn or not, befalls one record, which stays absent; new work goes on."""
    files = FaultyFiles()
    files.torn = torn
    tier = tier_of(tmp_path, 8, files=files)
    files.faults["write"] = raising(code, 2)
    assert save(tier, 1, 2, 3) == [Code.OK, said, Code.OK]
    assert equal(tier, 1, 2, 3) == [True, None, True]
    assert tier.stats()["faults"] == 1
    assert save(tier, 2) == [Code.OK]
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 8)
    assert equal(tier, 1, 2, 3) == [True] * 3
    assert tier.close(FOREVER)


@pytest.mark.filterwarnings("ignore:.*refuses direct I/O:RuntimeWarning")
@pytest.mark.parametrize("most_bytes", [1, 512, 4096])
def test_h4_short_writes_are_completed(tmp_path: Path, most_bytes: int) -> None:
    """H4: a system that takes only a part at a time is given the rest."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, 64, files=files)
    files.most_bytes = most_bytes
    assert save(tier, 1, 2, size=BIG) == [Code.OK] * 2
    assert equal(tier, 1, 2, size=BIG) == [True] * 2
    assert tier.close(FOREVER)


def test_h4_a_full_disk_is_full_and_goes_on(tmp_path: Path) -> None:
    """H4: without room for another file records are FULL, or old ones go for them; nothing else changes."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, 64, files=files, segment_bytes=2 * SLOT)
    assert save(tier, 1, 2) == [Code.OK] * 2
    files.faults["allocate"] = DISK_FULL
    lease = tier.lookup(keys_of(1, 2), FOREVER).value
    assert save(tier, 3) == [Code.FULL]
    lease.release()
    assert save(tier, 3) == [Code.OK]
    assert present(tier, 1, 2, 3) == [False, True, True]
    assert tier.stats()["disk_full"] >= 2
    assert usage_is_right(tier)
    files.faults.clear()
    assert save(tier, 4, 5) == [Code.OK] * 2
    assert present(tier, 1, 2, 3, 4, 5) == [False, True, True, True, True]
    assert tier.close(FOREVER)


def test_h4_an_index_that_cannot_be_written_keeps_slots_from_reuse(tmp_path: Path) -> None:
    """H4: while deletions are not durable, slots stay as they are; when the disk is back, all goes on."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, 2, files=files)
    assert save(tier, 1, 2) == [Code.OK] * 2

    def full(_: int) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    files.faults["commit"] = full
    assert save(tier, 3) == [Code.FULL]
    assert not flush(tier)
    assert tier.stats()["commits_failed"] >= 1
    files.faults.clear()
    assert save(tier, 3) == [Code.OK]
    assert flush(tier)
    assert equal(tier, 2, 3) == [True, True]
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 2)
    assert equal(tier, 1, 2, 3) == [None, True, True]
    assert tier.close(FOREVER)


def test_h4_a_sync_that_fails_is_not_believed_later(tmp_path: Path) -> None:
    """H4, C8: what it covered is absent, `durable` says no, and the losses are told."""
    files, lost = FaultyFiles(), list[tuple[bytes, str]]()
    tier = tier_of(tmp_path, 8, files=files)
    tier.on_loss(lambda keys, reason: lost.append((keys.tobytes(), reason)))
    assert save(tier, 1) == [Code.OK]
    files.faults["sync"] = raising(errno.EIO)
    lane = ManualLane()
    tier._work._lanes["commit"] = lane
    assert save(tier, 2) == [Code.OK]
    answers = [tier.flush("durable", FOREVER) for _ in range(2)]
    lane.step()  # the commit of the pause: the barriers after it must know what it lost
    lane.step()
    lane.step()
    assert [answer.value for answer in answers] == [False, False]
    assert present(tier, 1, 2) == [True, False]
    assert lost == [(keys_of(2).tobytes(), "quarantined")]
    assert tier.stats()["sync_failed"] == 1
    files.faults.clear()
    assert save(tier, 2) == [Code.OK]
    again = tier.flush("durable", FOREVER)
    lane.drain()
    assert again.value is True
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 8)
    assert equal(tier, 1, 2) == [True, True]
    assert tier.close(FOREVER)


def test_h5_quota_is_kept_and_the_least_used_goes_first(tmp_path: Path) -> None:
    """H5: the quota holds; a record that was looked up outlives older ones, also after a restart."""
    tier = tier_of(tmp_path, 3)
    save(tier, 1, 2, 3)
    present(tier, 1)
    assert save(tier, 4) == [Code.OK]
    assert present(tier, 1, 2, 3, 4) == [True, False, True, True]
    present(tier, 3)
    assert tier.stats()["evictions"] == 1
    assert usage_is_right(tier)
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 3)
    assert save(tier, 5) == [Code.OK]
    assert present(tier, 1, 3, 4, 5) == [False, True, True, True]
    assert usage_is_right(tier)
    assert tier.close(FOREVER)


def test_h5_a_smaller_quota_evicts_what_is_above_it(tmp_path: Path) -> None:
    """H5: opened with less, the longest idle files go at once; usage is right after each start."""
    tier = tier_of(tmp_path, 6, segment_bytes=2 * SLOT)
    save(tier, 1, 2, 3, 4, 5, 6)
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 3)
    assert present(tier, 1, 2, 3, 4, 5, 6) == [False, False, False, False, True, True]
    assert usage_is_right(tier)
    assert tier.stats()["used_bytes"] == 2 * BYTES
    assert save(tier, 7) == [Code.OK]
    assert tier.close(FOREVER)


def test_h5_leases_block_eviction(tmp_path: Path) -> None:
    """H5: what is leased is not evicted; with everything leased a save is FULL and leaves no trace."""
    tier = tier_of(tmp_path, 2)
    save(tier, 1, 2)
    lease = tier.lookup(keys_of(1, 2), FOREVER).value
    assert save(tier, 3) == [Code.FULL]
    assert present(tier, 1, 2, 3) == [True, True, False]
    lease.release()
    assert save(tier, 3) == [Code.OK]
    assert present(tier, 1, 2, 3) == [False, True, True]
    assert tier.stats()["leases"] == 0
    assert tier.close(FOREVER)


def test_h7_oversized_is_refused_alone(tmp_path: Path) -> None:
    """H7: a record larger than the tier is refused, evicts nothing, and hurts no neighbour."""
    tier = tier_of(tmp_path, 2)
    save(tier, 1, 2)
    assert save(tier, 3, size=3 * SLOT) == [Code.TOO_LARGE]
    assert present(tier, 1, 2, 3) == [True, True, False]
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 4)
    largest = tier.capabilities.max_record_bytes
    assert largest is not None
    assert save(tier, 4, size=largest) == [Code.OK]
    assert equal(tier, 4, size=largest) == [True]
    assert tier.close(FOREVER)


def test_sizes_share_the_quota(tmp_path: Path) -> None:
    """A size that comes later gets the room of one that has been idle; the quota holds throughout."""
    tier = tier_of(tmp_path, 4)
    save(tier, 1, 2, 3, 4)
    assert save(tier, 5, size=BIG) == [Code.OK]
    assert present(tier, 1, 2, 3, 4, 5) == [False, False, True, True, True]
    assert usage_is_right(tier)
    lease = tier.lookup(keys_of(3, 4, 5), FOREVER).value
    assert save(tier, 6) == [Code.FULL]
    lease.release()
    assert save(tier, 6) == [Code.OK]
    assert usage_is_right(tier)
    assert tier.close(FOREVER)


def test_eviction_runs_ahead_so_that_writers_do_not_wait(tmp_path: Path) -> None:
    """A full store evicts some at a time, least used first, and commits once for them."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, 256, files=files, segment_bytes=64 * SLOT)
    assert set(save(tier, *range(256))) == {Code.OK}
    before = files.calls["commit"]
    assert set(save(tier, *range(256, 320))) == {Code.OK}
    assert files.calls["commit"] - before <= 8
    gone = [number for number, here in enumerate(present(tier, *range(320))) if not here]
    assert gone == list(range(len(gone)))
    assert 64 <= len(gone) <= 96
    assert usage_is_right(tier)
    assert tier.close(FOREVER)


def test_r3_nothing_is_findable_before_it_is_complete(tmp_path: Path) -> None:
    """R3: between submission and completion a lookup misses; R8: the operation is seen while it runs."""
    lane = ManualLane()
    tier = tier_of(tmp_path, 2, lane=lane)
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert not op.done
    assert present(tier, 1) == [False]
    assert tier.stats()["operations"] == 1
    lane.step()
    assert op.value.tolist() == [Code.OK]
    assert present(tier, 1) == [True]
    assert tier.stats()["operations"] == 0
    lane.drain()
    assert tier.close(FOREVER)


def test_c8_visible_comes_before_durable(tmp_path: Path) -> None:
    """C8: a barrier covers what was submitted before it; a later one is not sooner; lateness is told."""
    clock, lane, files = Clock(), ManualLane(), FaultyFiles()
    tier = tier_of(tmp_path, 4, clock=clock, lane=lane, files=files)
    before = files.calls["commit"]
    assert tier.flush("landed", FOREVER).value is True
    tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    visible, late = tier.flush("visible", FOREVER), tier.flush("visible", 5.0)
    durable, too_late = tier.flush("durable", FOREVER), tier.flush("durable", 5.0)
    clock.now_s = 6.0
    lane.step()
    assert present(tier, 1) == [True]
    assert (visible.value, late.value, durable.done) == (True, False, False)
    assert files.calls["commit"] == before
    lane.drain()
    assert (durable.value, too_late.value) == (True, False)
    assert files.calls["commit"] > before
    assert tier.close(FOREVER)


def test_c8_what_was_saved_becomes_durable_by_itself(tmp_path: Path) -> None:
    """C8: without a barrier a pause of the saves commits; while they go on, time or their number does."""
    clock, lane, files = Clock(), ManualLane(), FaultyFiles()
    tier = tier_of(tmp_path, 64, clock=clock, lane=lane, files=files)

    def submit(number: int) -> None:
        tier.save(keys_of(number), Buffers.of([content(number)]), SaveClass.CACHEABLE, FOREVER)

    submit(1)
    submit(2)
    lane.step()
    assert tier.stats()["uncommitted"] == 1
    lane.drain()
    assert tier.stats()["uncommitted"] == 0
    submit(3)
    submit(4)
    submit(5)
    lane.step()
    clock.now_s = 2.0
    lane.step()  # 4: late, so a commit is queued behind 5
    submit(6)
    lane.step()
    lane.step()
    assert tier.stats()["uncommitted"] == 0
    lane.drain()
    assert tier.close(FOREVER)


def test_a3_running_load_keeps_its_record(tmp_path: Path) -> None:
    """A3, R3: a load outlives its lease; until it settles its slot is not written again."""
    loading = ManualLane()
    tier = tier_of(tmp_path, 1)
    save(tier, 1)
    tier._work._lanes["load"] = loading
    target = np.zeros(BYTES, np.uint8)
    lease = tier.lookup(keys_of(1), FOREVER).value
    op = tier.load(lease, np.array([0]), Buffers.of([target]), FOREVER)
    lease.release()
    assert save(tier, 2) == [Code.FULL]
    loading.drain()
    assert op.value.tolist() == [Code.OK]
    assert target.tobytes() == content(1).tobytes()
    assert save(tier, 2) == [Code.OK]
    assert tier.close(FOREVER)


def test_load_after_release_is_expired(tmp_path: Path) -> None:
    """A lease that ended gives nothing, even if the record is still there; a foreign one is refused."""
    tier, other = tier_of(tmp_path / "a", 1), tier_of(tmp_path / "b", 1, name="other")
    save(tier, 1)
    save(other, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lease.release()
    assert load(tier, lease, [0]) == ([Code.EXPIRED], [b"\xee" * BYTES])
    with other.lookup(keys_of(1), FOREVER).value as foreign:
        assert load(tier, foreign, [0])[0] == [Code.REFUSED]
        tier.discard(foreign, np.array([0]))
    assert present(other, 1) == [True]
    assert tier.close(FOREVER)
    assert other.close(FOREVER)


def test_bad_requests_are_codes(tmp_path: Path) -> None:
    """R4: wrong lengths, rows and counts are codes of what they befall, never exceptions."""
    tier = tier_of(tmp_path, 2)
    save(tier, 1)
    with tier.lookup(keys_of(1), FOREVER).value as lease:
        assert load(tier, lease, [0], size=BYTES - 1)[0] == [Code.SHORT]
        assert load(tier, lease, [1, -1, 0])[0] == [Code.REFUSED, Code.REFUSED, Code.OK]
        op = tier.load(lease, np.array([0, 0]), Buffers.of([content(1)]), FOREVER)
        assert op.value.tolist() == [Code.REFUSED] * 2
    op = tier.save(keys_of(1, 2), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert op.value.tolist() == [Code.REFUSED] * 2
    assert load(tier, Lease.nothing("disk", 1), [0])[0] == [Code.MISS]
    assert save(tier) == []
    assert tier.close(FOREVER)


def test_a9_nothing_is_begun_after_the_deadline(tmp_path: Path) -> None:
    """A9: a deadline that has passed ends lookups and records without touching the disk or memory."""
    clock, files = Clock(), FaultyFiles()
    tier = tier_of(tmp_path, 2, clock=clock, files=files)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    clock.now_s = 10.0
    before = dict(files.calls)
    assert save(tier, 2, deadline=9.0) == [Code.EXPIRED]
    assert not tier.lookup(keys_of(1), 9.0).value.present.any()
    target = np.zeros(BYTES, np.uint8)
    with lease:
        op = tier.load(lease, np.array([0]), Buffers.of([target]), 9.0)
    assert op.value.tolist() == [Code.EXPIRED]
    assert not target.any()
    assert tier.flush("durable", 9.0).value is False
    assert files.calls == before
    assert present(tier, 1, 2) == [True, False]
    assert tier.close(FOREVER)


def test_a2_a6_late_and_dropped_leases_are_released(tmp_path: Path) -> None:
    """A2, A6: a lease whose waiter gave up, or that nobody holds any more, blocks nothing."""
    tier = tier_of(tmp_path, 1)
    save(tier, 1)
    tier.lookup(keys_of(1), FOREVER).on_done(Lease.release)
    assert save(tier, 2) == [Code.OK]
    pending = [tier.lookup(keys_of(2), FOREVER)]
    with pytest.warns(ResourceWarning, match="dropped"):
        pending.clear()
    assert tier.stats()["leases"] == 0
    assert save(tier, 3) == [Code.OK]
    assert tier.close(FOREVER)


def test_h3_discard_forgets_a_damaged_record_but_not_its_successor(tmp_path: Path) -> None:
    """H3, E7: a discarded record is absent at once and after a restart; the new one stays."""
    tier, lost = tier_of(tmp_path, 2), list[str]()
    tier.on_loss(lambda _, reason: lost.append(reason))
    save(tier, 1, 2)
    lease = tier.lookup(keys_of(1, 2, 7), FOREVER).value
    tier.discard(lease, np.array([0, 1, 2, 5]))
    assert present(tier, 1, 2) == [False, False]
    lease.release()
    assert save(tier, 1) == [Code.OK]
    tier.discard(lease, np.array([0]))
    assert present(tier, 1) == [True]
    assert tier.stats()["quarantined"] == 2
    assert lost == ["quarantined"]
    assert flush(tier)
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 2)
    assert equal(tier, 1, 2) == [True, None]
    assert tier.close(FOREVER)


def test_h3_a_read_that_fails_is_not_promised_again(tmp_path: Path) -> None:
    """H3, H4: a record that cannot be read is FAILED once and absent then."""
    files = FaultyFiles()
    tier = tier_of(tmp_path, 2, files=files)
    save(tier, 1, 2)
    files.faults["read"] = raising(errno.EIO, 1)
    with tier.lookup(keys_of(1, 2), FOREVER).value as lease:
        assert load(tier, lease, [0, 1])[0] == [Code.FAILED, Code.OK]
    assert present(tier, 1, 2) == [False, True]
    assert tier.stats()["unreadable"] == 1
    assert tier.close(FOREVER)


def test_g7_handoffs_are_kept_until_released_or_over_but_not_beyond_the_process(tmp_path: Path) -> None:
    """G7: handoff records are not evicted before their release, the end of their time, or of their owner."""
    clock = Clock()
    tier = tier_of(tmp_path, 2, clock=clock, handoff_ttl_s=60.0)
    save(tier, 1)
    for number, name in ((1, "a"), (2, None)):
        assert save(tier, number, cls=SaveClass.HANDOFF, handoff=name) == [Code.OK]
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
    assert save(tier, 4, 5, cls=SaveClass.HANDOFF) == [Code.OK] * 2
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 2)
    assert save(tier, 6) == [Code.OK]
    assert tier.close(FOREVER)


def test_reset_forgets_for_good(tmp_path: Path) -> None:
    """C11: nothing can be found any more, handoffs are over, and a restart brings nothing back."""
    tier = tier_of(tmp_path, 4)
    assert isinstance(tier, Resets)
    assert isinstance(tier, TellsLosses)
    save(tier, 1, 2)
    save(tier, 3, cls=SaveClass.HANDOFF, handoff="h")
    assert tier.reset(FOREVER).value is True
    assert present(tier, 1, 2, 3) == [False] * 3
    assert tier.stats()["used_bytes"] == tier.stats()["handoffs"] == 0
    assert save(tier, 2) == [Code.OK]
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 4)
    assert equal(tier, 1, 2, 3) == [None, True, None]
    assert tier.close(FOREVER)


def test_losses_are_told_once_and_a_listener_may_call_back(tmp_path: Path) -> None:
    """C3: what goes is said with its reason, no lock held; a listener that raises costs nobody a terminal."""
    tier, told = tier_of(tmp_path, 2), list[tuple[bytes, str, int]]()

    def listen(keys: object, reason: str) -> None:
        told.append((np.asarray(keys).tobytes(), reason, tier.stats()["records"]))
        raise RuntimeError("not ours")

    end = tier.on_loss(listen)
    save(tier, 1, 2)
    assert save(tier, 3) == [Code.OK]
    assert [(key, reason) for key, reason, _ in told] == [(keys_of(1).tobytes(), "evicted")]
    end()
    save(tier, 4)
    assert len(told) == 1
    assert [type(fault) for fault in tier.faults] == [RuntimeError]
    assert tier.close(FOREVER)


def test_c10_close_waits_refuses_and_leaves(tmp_path: Path) -> None:
    """C10: close is bounded and says when something still runs; then all is refused and the store is free."""
    lane, hold, begun = ThreadLane("copies"), threading.Event(), threading.Event()
    tier = tier_of(tmp_path, 2, lane=lane)
    lane.submit(begun.set)
    lane.submit(lambda: hold.wait(CALM_S))
    op = tier.save(keys_of(1), Buffers.of([content(1)]), SaveClass.CACHEABLE, FOREVER)
    assert begun.wait(CALM_S)
    assert not tier.close(0.0)
    assert save(tier, 2) == [Code.REFUSED]
    with pytest.raises(UsageFault, match="one owner"):
        tier_of(tmp_path, 2)
    hold.set()
    assert op.wait(CALM_S).tolist() == [Code.OK]
    assert tier.close(FOREVER)
    assert tier.close(FOREVER)
    assert not tier.lookup(keys_of(1), FOREVER).value.present.any()
    assert lane.close(CALM_S)
    tier = tier_of(tmp_path, 2)
    assert equal(tier, 1) == [True]
    assert tier.close(FOREVER)


def test_closed_lane_is_a_code(tmp_path: Path) -> None:
    """R4: a lane that takes no more work refuses records; pins are undone, and what was saved is kept."""
    lane = InlineLane()
    tier = tier_of(tmp_path, 1, lane=lane)
    save(tier, 1)
    lease = tier.lookup(keys_of(1), FOREVER).value
    lane.close(0.0)
    assert load(tier, lease, [0])[0] == [Code.REFUSED]
    assert save(tier, 2) == [Code.REFUSED]
    assert tier.flush("durable", FOREVER).value is False
    lease.release()
    stats = tier.stats()
    assert (stats["operations"], stats["leases"], stats["faults"]) == (0, 0, 3)
    assert tier.close(FOREVER)


def test_a10_lookup_that_breaks_finds_nothing(tmp_path: Path) -> None:
    """A10: an error inside a lookup is counted and settles with an empty lease."""
    tier = tier_of(tmp_path, 1)
    broken = np.zeros((2, 2), np.uint8)  # not keys at all
    lease = tier.lookup(broken, FOREVER).value  # type: ignore[arg-type]
    assert lease.present.tolist() == [False, False]
    assert lease.failed
    assert tier.stats()["faults"] == 1
    assert tier.close(FOREVER)


def test_h10_capabilities(tmp_path: Path) -> None:
    """H10: persistent and private; handoffs can be released early."""
    tier = tier_of(tmp_path, 8)
    claims = tier.capabilities
    assert (claims.persistent, claims.shared, claims.scopes) == (True, False, True)
    assert claims.handoff_release == "early"
    assert tier.close(FOREVER)


def test_r8_gauges_return_to_zero_under_threads(tmp_path: Path) -> None:
    """R8, R3: savers, loaders and evictions at once: loaded bytes are always whole, gauges end at 0."""
    tier = DiskTier(tmp_path, 6 * SLOT, workers=3, direct=False)
    wrong: list[int] = []
    codes: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            numbers = rng.integers(0, 14, 3).tolist()
            buffers = Buffers.of([content(number) for number in numbers])
            codes.extend(
                tier.save(keys_of(*numbers), buffers, SaveClass.CACHEABLE, FOREVER).wait(CALM_S).tolist()
            )
            with tier.lookup(keys_of(*numbers), FOREVER).wait(CALM_S) as lease:
                target = [np.zeros(BYTES, np.uint8) for _ in numbers]
                done = tier.load(lease, np.arange(3), Buffers.of(target), FOREVER).wait(CALM_S)
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
    assert flush(tier)
    stats = tier.stats()
    assert (stats["leases"], stats["operations"], stats["faults"], stats["uncommitted"]) == (0, 0, 0, 0)
    assert stats["used_bytes"] == stats["records"] * BYTES
    assert usage_is_right(tier)
    assert tier.close(FOREVER)


steps = st.lists(
    st.tuples(
        st.sampled_from(["save", "big", "look", "hold", "free"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.sets(st.integers(1, 12)), st.sets(st.integers(1, 6)))
def test_h1_batches_equal_their_singles(
    tmp_path: Path, script: list[tuple[str, list[int]]], torn: set[int], full: set[int]
) -> None:
    """H1: whatever the history, failing writes and a full disk, a batch leaves what its singles leave."""
    both = []
    for _ in range(2):
        files = FaultyFiles()
        home = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        both.append(tier_of(home, 5, files=files, segment_bytes=2 * SLOT))
        files.torn = True
        files.faults["write"] = raising(errno.EIO, *torn, -1)
        files.faults["allocate"] = raising(errno.ENOSPC, *full, -1)
    batch, single = both
    held: list[Lease] = []
    for verb, numbers in script:
        if verb in ("save", "big"):
            size = BYTES if verb == "save" else BIG
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
        assert usage_is_right(batch)
    for lease in held:
        lease.release()
    assert batch.close(FOREVER)
    assert single.close(FOREVER)


# The directory


OTHER = """
import sys, time
from kvcontract.tiers.disk import DiskTier
tier = DiskTier(sys.argv[1], 1 << 20, direct=False)
print("open", flush=True)
sys.stdin.readline()
tier.close(time.monotonic() + 30)
"""


def test_h6_a_second_opener_is_told_who(tmp_path: Path) -> None:
    """H6: one owner; another process and another tier here are refused, with pid, host and since."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UsageFault, match=rf"process {other.pid} on \S+ \(boot .*\), since 2\d\d\d-"):
            tier_of(tmp_path, 256)
        other.stdin.write("\n")
        other.stdin.close()
        assert other.wait(CALM_S) == 0
    tier = tier_of(tmp_path, 256)
    with pytest.raises(UsageFault, match=rf"process {os.getpid()} "):
        tier_of(tmp_path, 256)
    assert tier.close(FOREVER)
    assert (tmp_path / "lock").read_text() == ""


def test_h6_another_format_is_refused_whole(tmp_path: Path) -> None:
    """H6: nothing in it is read or changed; `fresh` begins beside it, and finds that again next time."""
    home = tmp_path / "store"
    home.mkdir()
    label = {"kind": "kvcontract disk store", "format": 99, "whatever": [1]}
    (home / "store.json").write_text(json.dumps(label))
    (home / "index.db").write_bytes(b"of another version")
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    with pytest.raises(UsageFault, match="format 99; this version reads and writes 2"):
        tier_of(home, 4)
    for expected in (None, True):
        tier = tier_of(home, 4, fresh=True)
        assert tier.directory == tmp_path / "store.format2"
        assert equal(tier, 1) == [expected]
        save(tier, 1)
        assert tier.close(FOREVER)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before
    same = tier_of(tmp_path / "new", 4, fresh=True)
    assert same.directory == tmp_path / "new"
    assert same.close(FOREVER)


def test_h6_a_store_made_for_something_else_is_refused(tmp_path: Path) -> None:
    """H6, H10: a mismatch names every difference with both values; the same again is welcome."""
    options = {"meta": {"max_tp": 8, "for": "a"}, "segment_bytes": 2 * SLOT}
    assert tier_of(tmp_path, 4, **options).close(FOREVER)
    wrong = r"segment_bytes is 8192 there, 4096 here; for is 'a' there, None here; max_tp is 8 there, 4 here"
    with pytest.raises(UsageFault, match=wrong):
        tier_of(tmp_path, 4, meta={"max_tp": 4}, segment_bytes=SLOT)
    tier = tier_of(tmp_path, 4, **options)
    assert save(tier, 1) == [Code.OK]
    assert tier.close(FOREVER)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not the label"),
        ("[1]", "not the label"),
        ('{"kind": "x", "format": 2}', "label of a 'x'"),
        ('{"kind": "kvcontract disk store", "format": 2}', "not the label"),
    ],
)
def test_h6_what_is_no_store_is_not_touched(tmp_path: Path, text: str, why: str) -> None:
    """H6: a label that says something else is refused, and so are parts of a store without one."""
    home = tmp_path / "labelled"
    home.mkdir()
    (home / "store.json").write_text(text)
    with pytest.raises(UsageFault, match=why):
        tier_of(home, 4)
    assert [path.name for path in home.iterdir()] in (["store.json"], ["lock", "store.json"])
    part = tmp_path / "part"
    part.mkdir()
    (part / "index.db").write_bytes(b"somebody's")
    with pytest.raises(UsageFault, match=re.escape("holds index.db but no store.json")):
        tier_of(part, 4)
    assert (part / "index.db").read_bytes() == b"somebody's"


def test_h4_foreign_files_are_left_alone_and_named(tmp_path: Path) -> None:
    """H4: what is not ours stays as it is; what an interrupted process of ours left is swept."""
    (tmp_path / "segments").mkdir()
    tier = tier_of(tmp_path, 4)
    save(tier, 1)
    assert tier.close(FOREVER)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segments" / "0000.kvseg.bak").write_text("mine too")
    (tmp_path / "segments" / "00000077.kvseg").write_bytes(bytes(SLOT))
    (tmp_path / "segments" / "probe-1.tmp").write_bytes(b"")
    (tmp_path / "store.json-1.tmp").write_bytes(b"")
    tier = tier_of(tmp_path, 4)
    assert tier.foreign_files == ("notes.txt", "segments/0000.kvseg.bak")
    stats = tier.stats()
    assert (stats["foreign_files"], stats["orphans_removed"]) == (2, 1)
    assert equal(tier, 1) == [True]
    assert usage_is_right(tier)
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == [
        "0000.kvseg.bak",
        "00000001.kvseg",
    ]
    assert tier.close(FOREVER)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "store.json-1.tmp").exists()


def test_the_fleets_secret_is_kept_once(tmp_path: Path) -> None:
    """The file has mode 0600, is made once, and is refused when others may read it or it is no secret."""
    tier = tier_of(tmp_path, 4)
    file = tmp_path / "secret"
    assert tier.kept_secret() is None
    assert not file.exists()
    secret = FleetSecret.random()
    assert tier.keep_secret(secret) == tier.kept_secret() == secret == FleetSecret.of_file(file)
    assert tier.keep_secret(FleetSecret.random()) == secret
    assert file.stat().st_mode & 0o777 == 0o600
    assert tier.close(FOREVER)
    tier = tier_of(tmp_path, 4)
    assert tier.kept_secret() == secret
    assert tier.foreign_files == ()
    file.chmod(0o640)
    with pytest.raises(UsageFault, match="mode 0640; only its owner may read it: chmod 600"):
        tier.kept_secret()
    file.chmod(0o600)
    for text in ("", "zz", "ab" * 15):
        file.write_text(text)
        with pytest.raises(UsageFault, match="fleet secret"):
            tier.keep_secret(secret)
    assert tier.close(FOREVER)
    with pytest.raises(UsageFault, match="No such file"):
        FleetSecret.of_file(tmp_path / "nowhere" / "secret")


def test_what_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    """I3: all faults of the arguments are named together."""
    with pytest.raises(UsageFault, match=r"capacity of 5 B; expected at least 4096 B; 0 workers"):
        DiskTier(tmp_path, 5, workers=0)
    assert list(tmp_path.iterdir()) == []


def test_segments_are_preallocated(tmp_path: Path) -> None:
    """A segment has its blocks before the first record, so that a full disk shows before the write."""
    tier = tier_of(tmp_path, 64, segment_bytes=16 * SLOT)
    save(tier, 1)
    (file,) = segment_files(tmp_path)
    assert file.stat().st_size == 16 * SLOT
    assert file.stat().st_blocks * 512 >= 16 * SLOT
    assert tier.close(math.inf)
