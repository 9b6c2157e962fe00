"""`Pending` and lanes: one terminal each, and no exception is lost."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.core.lane import InlineLane, ManualLane, ThreadLane
from kvcontract.core.pending import Pending, all_of, wait_until


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Exceptions that reached `threading.excepthook`."""
    seen: list[BaseException] = []
    monkeypatch.setattr(
        threading, "excepthook", lambda args: seen.append(args.exc_value) if args.exc_value else None
    )
    return seen


def test_r8_settles_exactly_once() -> None:
    """R8: a second terminal is our fault, and the first value stays."""
    pending: Pending[int] = Pending()
    assert not pending.done
    with pytest.raises(UsageFault):
        _ = pending.value
    pending.settle(1)
    with pytest.raises(InternalFault):
        pending.settle(2)
    assert pending.done
    assert pending.value == 1


def test_callbacks_run_once_before_and_after() -> None:
    """Each callback is called once with the value, whether added before or after."""
    pending: Pending[str] = Pending()
    seen: list[tuple[str, str]] = []
    pending.on_done(lambda value: seen.append(("early", value)))
    pending.settle("x")
    pending.on_done(lambda value: seen.append(("late", value)))
    assert seen == [("early", "x"), ("late", "x")]


def test_callback_that_raises_breaks_no_other(uncaught: list[BaseException]) -> None:
    """An exception in a callback is reported; the others and the settler go on."""
    pending: Pending[int] = Pending()
    seen: list[int] = []

    def broken(value: int) -> None:
        raise ValueError(f"broken at {value}")

    pending.on_done(broken)
    pending.on_done(seen.append)
    pending.settle(3)
    assert seen == [3]
    assert [str(error) for error in uncaught] == ["broken at 3"]


def test_forgotten_callback_is_not_called() -> None:
    """A callback taken back is not called; one already called cannot be taken back."""
    pending: Pending[int] = Pending()
    seen: list[int] = []
    pending.on_done(seen.append)
    assert pending.forget(seen.append)
    pending.settle(1)
    assert seen == []
    assert not pending.forget(seen.append)


def test_r8_race_of_settlers_has_one_winner() -> None:
    """R8: of many threads that settle, one wins and the callbacks see its value once."""
    for _ in range(50):
        pending: Pending[int] = Pending()
        seen: list[int] = []
        losers: list[int] = []
        start = threading.Barrier(4)

        def settle(
            number: int,
            pending: Pending[int] = pending,
            start: threading.Barrier = start,
            losers: list[int] = losers,
        ) -> None:
            start.wait()
            try:
                pending.settle(number)
            except InternalFault:
                losers.append(number)

        threads = [threading.Thread(target=settle, args=(number,)) for number in range(4)]
        pending.on_done(seen.append)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [pending.value]
        assert sorted([*losers, pending.value]) == [0, 1, 2, 3]


def test_c12_all_of_waits_for_every_one() -> None:
    """C12: a join settles only with the last, in the order asked."""
    parts: list[Pending[int]] = [Pending(), Pending()]
    joined = all_of(parts)
    parts[1].settle(2)
    assert not joined.done
    parts[0].settle(1)
    assert joined.value == (1, 2)
    assert all_of([]).done


def test_map_carries_the_value_on() -> None:
    """A mapped pending settles with the function's result."""
    pending: Pending[int] = Pending()
    doubled = pending.map(lambda value: value * 2)
    pending.settle(4)
    assert doubled.value == 8


def test_sync_wait() -> None:
    """A blocking wait ends with the value, or with TimeoutError and the operation unharmed."""
    pending: Pending[int] = Pending()
    with pytest.raises(TimeoutError):
        pending.wait(0.0)
    lane = ThreadLane("test")
    lane.submit(lambda: pending.settle(5))
    assert pending.wait(30.0) == 5
    assert Pending.of(6).wait(math.inf) == 6
    assert lane.close(30.0)


def test_async_wait_from_another_thread() -> None:
    """A waiter in an event loop is woken by a settler in another thread."""
    lane = ThreadLane("test")

    async def main() -> int:
        pending: Pending[int] = Pending()
        lane.submit(lambda: pending.settle(7))
        return await wait_until(pending, math.inf)

    assert asyncio.run(main()) == 7
    assert lane.close(30.0)


def test_a3_only_the_wait_is_abandoned(uncaught: list[BaseException]) -> None:
    """A3: a deadline ends the wait alone; settling later, even after the loop has gone, is quiet."""
    pending: Pending[int] = Pending()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await wait_until(pending, asyncio.get_running_loop().time())

    asyncio.run(main())
    assert not pending.done
    pending.settle(1)
    assert uncaught == []

    async def settled() -> int:
        return await wait_until(pending, 0.0)

    assert asyncio.run(settled()) == 1


def test_thread_lane_keeps_order_and_errors(uncaught: list[BaseException]) -> None:
    """A lane runs jobs in order, goes on after one that raises, and reports its exception."""
    lane = ThreadLane("test")
    seen: list[int] = []
    lane.submit(lambda: seen.append(1))
    lane.submit(lambda: 1 // 0)
    lane.submit(lambda: seen.append(2))
    assert lane.close(30.0)
    assert seen == [1, 2]
    assert [type(error) for error in lane.errors] == [ZeroDivisionError]
    assert list(lane.errors) == uncaught
    with pytest.raises(UsageFault):
        lane.submit(lambda: None)
    assert lane.close(0.0)


def test_thread_lane_close_says_when_work_is_left() -> None:
    """Closing is bounded: False while a job still runs, True once it has ended (R5)."""
    lane = ThreadLane("test")
    hold, begun = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        hold.wait(30.0)

    lane.submit(job)
    assert begun.wait(30.0)
    assert not lane.close(0.0)
    hold.set()
    assert lane.close(30.0)


def test_inline_and_manual_lanes() -> None:
    """The inline lane runs at once, the manual one when told, jobs of jobs included."""
    seen: list[str] = []
    inline = InlineLane()
    inline.submit(lambda: seen.append("now"))
    assert seen == ["now"]
    manual = ManualLane()
    manual.submit(lambda: manual.submit(lambda: seen.append("inner")))
    assert len(manual) == 1
    assert seen == ["now"]
    manual.drain()
    assert seen == ["now", "inner"]
    assert inline.close(0.0)
    assert manual.close(0.0)
    with pytest.raises(UsageFault):
        inline.submit(lambda: None)
    with pytest.raises(UsageFault):
        manual.submit(lambda: None)


def test_lane_without_workers_is_refused() -> None:
    """A lane that could never run anything is refused."""
    with pytest.raises(UsageFault, match="0 workers"):
        ThreadLane("test", workers=0)


def test_c12_what_is_added_later_is_not_waited_for() -> None:
    """C12: a list that grows while its pendings settle changes nothing for who waits for those it had."""
    first: Pending[int] = Pending()
    given = [first]
    joined = all_of(given)
    given.append(Pending())
    first.settle(1)
    assert joined.value == (1,)
