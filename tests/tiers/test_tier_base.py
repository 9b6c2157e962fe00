"""Keys, buffers and leases: what tiers are spoken to in."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.tiers.base import CODE_MEANING, Buffers, Code, Lease, key_bytes, record_keys


def test_h8_record_keys_are_21_distinct_bytes() -> None:
    """H8: page key, part, shard and shards, packed; equal keys and only those have equal bytes."""
    pages = np.array([[0x0706050403020100, 0x0F0E0D0C0B0A0908], [0, 0]], np.uint64)
    keys = record_keys(pages, 64, 0x0102, 0x0304)
    assert keys.dtype.itemsize == 21
    assert key_bytes(keys)[0] == bytes(range(16)) + bytes([64, 2, 1, 4, 3])
    # trailing zero bytes count
    others = [record_keys(pages, part, shard, 3) for part in (0, 1) for shard in (0, 1, 2)]
    rows = [row for other in others for row in key_bytes(other)]
    assert all(len(row) == 21 for row in rows)
    assert len(set(rows)) == 12


def test_record_keys_refuse_what_does_not_fit() -> None:
    """Numbers beyond their fields are refused, all at once."""
    with pytest.raises(UsageFault, match=r"part 256.*shard 3 of 3"):
        record_keys(np.zeros((1, 2), np.uint64), 256, 3, 3)
    with pytest.raises(UsageFault, match="page_keys of shape"):
        record_keys(np.zeros(4, np.uint64), 0, 0, 1)


def test_buffers_are_ragged_and_sliceable() -> None:
    """Records have any number of pieces; a selection keeps each record's own."""
    buffers = Buffers(
        np.array([10, 20, 30, 40, 50, 60], np.int64),
        np.array([1, 2, 3, 4, 5, 6], np.int64),
        np.array([0, 2, 2, 3, 6], np.int64),
    )
    assert len(buffers) == 4
    assert buffers.record_bytes().tolist() == [3, 0, 3, 15]
    assert buffers.pieces() == [[(10, 1), (20, 2)], [], [(30, 3)], [(40, 4), (50, 5), (60, 6)]]
    taken = buffers.take(np.array([3, 1, 0]))
    assert taken.pieces() == [[(40, 4), (50, 5), (60, 6)], [], [(10, 1), (20, 2)]]
    assert len(buffers.take(np.array([], np.int64))) == 0


def test_a6_leaving_the_context_releases_once() -> None:
    """A6: a lease goes back when its context ends, also by an exception, and only once."""
    released: list[int] = []
    with Lease("t", np.ones(1, np.bool_), release=lambda: released.append(1)) as lease:
        assert lease.active
    assert not lease.active
    lease.release()
    failing = Lease("t", np.ones(1, np.bool_), release=lambda: released.append(2))
    with pytest.raises(KeyError), failing:
        raise KeyError
    assert released == [1, 2]


def test_a6_dropped_lease_is_released_with_a_warning() -> None:
    """A6: a lease that is forgotten is given back, and said aloud."""
    released: list[int] = []
    leases = [Lease("t", np.ones(3, np.bool_), release=lambda: released.append(1))]
    with pytest.warns(ResourceWarning, match="3 records was dropped"):
        leases.clear()
    assert released == [1]


def test_c9_lease_on_nothing_holds_nothing() -> None:
    """C9: a lookup that finds nothing owes nothing."""
    lease = Lease.nothing("t", 2)
    assert not lease.active
    assert lease.present.tolist() == [False, False]


def test_every_code_has_a_meaning() -> None:
    """Codes fit a byte, OK is 0, and each can be told to a person."""
    assert int(Code.OK) == 0
    assert max(Code) < 256
    assert set(CODE_MEANING) == set(Code)


def test_tiers_need_no_torch() -> None:
    """Tiers speak in addresses: importing them loads neither torch nor numba."""
    script = (
        "import sys, kvcontract.tiers.dram, kvcontract.tiers.frame;"
        "sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
