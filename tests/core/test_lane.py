"""Lanes: the most urgent first, equals in order, nothing lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.core.lane import InlineLane, Line, ManualLane, ThreadLane, Urgency

MIXED = [
    ("w1", Urgency.WRITE_BACK),
    ("c1", Urgency.CACHEABLE),
    ("h1", Urgency.HANDOFF),
    ("c2", Urgency.CACHEABLE),
    ("r1", Urgency.RESTORE),
    ("h2", Urgency.HANDOFF),
    ("r2", Urgency.RESTORE),
    ("w2", Urgency.WRITE_BACK),
]
SORTED = ["r1", "r2", "h1", "h2", "c1", "c2", "w1", "w2"]


def test_a_line_is_in_order() -> None:
    """Restore, Handoff, Cacheable, write-back; whoever came first of each."""
    line: Line[str] = Line()
    for name, urgency in MIXED:
        line.push(name, urgency)
    assert line.more_urgent(Urgency.HANDOFF)
    assert not line.more_urgent(Urgency.RESTORE)
    assert line.first() == "r1"
    assert [line.pop() for _ in range(len(line))] == SORTED
    assert not line.more_urgent(Urgency.WRITE_BACK)


def test_a_manual_lane_steps_by_urgency() -> None:
    """What comes while others run takes its place among those that wait."""
    lane, ran = ManualLane(), list[str]()

    def job(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    for name, urgency in MIXED:
        lane.submit(job(name), urgency)
    lane.step()
    lane.submit(job("late"), Urgency.RESTORE)
    assert lane.more_urgent(Urgency.HANDOFF)
    lane.drain()
    assert ran == ["r1", "r2", "late", *SORTED[2:]]
    assert not lane.more_urgent(Urgency.WRITE_BACK)


def test_a_thread_lane_runs_by_urgency_and_ends_with_all_done() -> None:
    """Jobs that wait behind a running one are sorted; closing lets all of them run, and takes no more."""
    lane, ran, gate = ThreadLane("lane"), list[str](), threading.Event()
    begun = threading.Event()

    def block() -> None:
        begun.set()
        gate.wait(60.0)

    lane.submit(block)
    assert begun.wait(60.0)
    for name, urgency in MIXED:
        lane.submit(lambda name=name: ran.append(name), urgency)  # type: ignore[misc]
    assert lane.more_urgent(Urgency.HANDOFF)
    assert not lane.close(0.0)
    gate.set()
    assert lane.close(60.0)
    assert ran == SORTED
    with pytest.raises(UsageFault):
        lane.submit(gate.set)


def test_an_inline_lane_never_keeps_anybody() -> None:
    """Work is done at once, whatever its urgency."""
    lane, ran = InlineLane(), list[str]()
    lane.submit(lambda: ran.append("w"), Urgency.WRITE_BACK)
    assert ran == ["w"]
    assert not lane.more_urgent(Urgency.WRITE_BACK)
