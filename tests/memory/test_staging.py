"""The staging budget: bounded, in order, and never stuck."""

from __future__ import annotations

import pytest

from kvcontract.contract.errors import InternalFault
from kvcontract.memory.staging import StagingBudget


def test_grants_in_order_and_within_the_limit() -> None:
    """A small request does not overtake a big one that waits."""
    budget, granted = StagingBudget(100), []
    assert budget.take(60, lambda: None)
    assert not budget.take(50, lambda: granted.append("big"))
    assert not budget.take(10, lambda: granted.append("small"))
    assert budget.used_bytes == 60
    budget.give_back(60)
    assert granted == ["big", "small"]
    assert budget.used_bytes == 60
    budget.give_back(50)
    budget.give_back(10)
    assert budget.used_bytes == 0


def test_a_request_above_the_limit_is_served_alone() -> None:
    """A record larger than the whole budget still moves, when nothing else does."""
    budget, granted = StagingBudget(100), []
    assert budget.take(500, lambda: None)
    assert not budget.take(1, lambda: granted.append(1))
    budget.give_back(500)
    assert granted == [1]


def test_giving_back_too_much_is_our_fault() -> None:
    """More bytes back than were granted is an accounting error, not a negative gauge."""
    with pytest.raises(InternalFault):
        StagingBudget(10).give_back(1)
