"""Tiers that break the rules: the guard turns whatever they do into leases, codes and booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcontract.core.pending import Pending
from kvcontract.tiers.base import Buffers, Capabilities, Code, Lease, SaveClass, record_keys
from kvcontract.tiers.guard import GuardedTier

KEYS = record_keys(np.arange(6, dtype=np.uint64).reshape(3, 2), 0, 0, 1)
BUFFERS = Buffers.of([np.zeros(4, np.uint8)] * 3)


class Wild:
    """A tier of which every verb does what the test says."""

    name = "wild"
    capabilities = Capabilities(persistent=False, shared=False)

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def _any(self, *_: Any, **__: Any) -> Any:
        return self._act()

    lookup = load = save = discard = flush = release_handoff = stats = close = _any


def quits() -> Any:
    """End the process, or try to."""
    raise SystemExit(3)


def breaks() -> Any:
    """An ordinary failure."""
    raise ValueError("broken")


def bad_lease() -> Any:
    """A lease whose presence is a list."""
    lease = Lease("wild", np.ones(3, np.bool_))
    lease.present = [True, True, True]  # type: ignore[assignment]
    return Pending.of(lease)


NONSENSE: list[Callable[[], Any]] = [
    breaks,
    quits,
    lambda: None,
    lambda: 7,
    lambda: Pending.of(None),
    lambda: Pending.of([0, 0, 0]),
    lambda: Pending.of(np.zeros(2, np.uint8)),
    lambda: Pending.of(np.zeros(3, np.float64)),
    lambda: Pending.of("yes"),
    bad_lease,
]


@pytest.mark.parametrize("act", NONSENSE)
def test_r4_nonsense_is_a_failure_of_the_tier(act: Callable[[], Any]) -> None:
    """Every verb settles, nothing raises, nothing is present, saved, loaded, flushed or ended."""
    tier = GuardedTier(Wild(act))
    lease = tier.lookup(KEYS, 1.0).wait(1.0)
    assert lease.failed
    assert lease.present.tolist() == [False] * 3
    failed = [int(Code.FAILED)] * 3
    assert tier.save(KEYS, BUFFERS, SaveClass.CACHEABLE, 1.0).wait(1.0).tolist() == failed
    assert tier.load(lease, np.arange(3), BUFFERS, 1.0).wait(1.0).tolist() == failed
    assert tier.flush("landed", 1.0).wait(1.0) is False
    assert tier.close(1.0) is False
    tier.discard(lease, np.arange(1))
    tier.release_handoff("x")
    assert tier.stats()["broke_rules_lookup"] == 1


def test_r8_codes_that_do_not_exist_are_failures_of_their_records() -> None:
    """An invented code costs its own record only, and the operation settles."""
    tier = GuardedTier(Wild(lambda: Pending.of(np.array([0, 200, 1], np.uint8))))
    codes = tier.save(KEYS, BUFFERS, SaveClass.CACHEABLE, 1.0).wait(1.0)
    assert codes.tolist() == [Code.OK, Code.FAILED, Code.MISS]
    tier = GuardedTier(Wild(lambda: Pending.of(np.array([0, -1, 0], np.int64))))
    assert tier.load(Lease.nothing("wild", 3), np.arange(3), BUFFERS, 1.0).wait(1.0)[1] == Code.FAILED


def test_good_answers_pass_as_they_are() -> None:
    """A well-behaved tier is not touched: same lease, same codes, same booleans."""
    lease = Lease("wild", np.array([True, False, True]))
    assert GuardedTier(Wild(lambda: Pending.of(lease))).lookup(KEYS, 1.0).wait(1.0) is lease
    assert GuardedTier(Wild(lambda: Pending.of(True))).flush("landed", 1.0).wait(1.0) is True
    assert GuardedTier(Wild(lambda: True)).close(1.0) is True
    assert GuardedTier(Wild(lambda: {"records": 2})).stats() == {"records": 2}
