"""Control operations: ordered, only when idle, never in part, and nobody waits for them in vain."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from running import WAIT_S, assembled, prompt, settle, until, wait_for
from tiny_models import Tiny, tiny

from kvcontract.contract.errors import UsageFault
from kvcontract.core.pending import Pending
from kvcontract.engine.build import Assembly
from kvcontract.engine.control import ControlReport
from kvcontract.engine.request import Finish, Result
from kvcontract.engine.sampling import Sampling


@pytest.fixture(scope="module")
def case() -> Tiny:
    """A small dense model."""
    return tiny("qwen3")


@pytest.fixture
def gated(case: Tiny) -> Iterator[tuple[Assembly, Any]]:
    """An engine over a tier that can be held back."""
    with assembled(case, gate=True) as (parts, tier):
        yield parts, tier
        tier.open()


def run_one(parts: Assembly, tokens: list[int], new: int = 3) -> Result:
    """One request alone."""
    request = parts.engine.submit(tokens, new)
    return parts.engine.run()[request]


def report_of(pending: Pending[ControlReport]) -> ControlReport:
    """What an operation became."""
    return pending.wait(WAIT_S)


def test_c11_a_reset_comes_after_what_was_before_and_before_what_is_after(case: Tiny) -> None:
    """The request before it runs to its end, the one behind it is resolved only when all is forgotten."""
    with assembled(case) as (parts, _):
        engine, tokens = parts.engine, prompt(50, 1)
        first = engine.submit(tokens, 6)
        pending = engine.reset()
        second = engine.submit(tokens, 6)
        until(engine, lambda: engine.gauges()["active"])
        gauges = engine.gauges()
        assert (gauges["control"], gauges["behind"], gauges["active"]) == (1, 1, 1)
        assert gauges["resolving"] + gauges["arrived"] + gauges["waiting"] == 0
        assert not pending.done
        results = engine.run()
        assert (results[first].finish, results[first].hit_tokens) == (Finish.LENGTH, 0)
        assert (results[second].finish, results[second].hit_tokens) == (Finish.LENGTH, 0)
        report = report_of(pending)
        assert (report.done, report.reason) == (True, "")
        assert report.reset is not None
        assert (report.reset.tiers, report.reset.missed) == (("dram",), {})
        assert report.reset.pages >= 3
        assert run_one(parts, tokens).hit_tokens == 48  # without a reset in between it hits


def test_c11_a_reset_of_no_tier_leaves_the_tiers(case: Tiny) -> None:
    """It covers all tiers unless told otherwise, and says which it reached."""
    with assembled(case) as (parts, _):
        tokens = prompt(50, 1)
        run_one(parts, tokens)
        report = report_of(parts.engine.reset(()))
        assert report.reset is not None
        assert (report.done, report.reset.tiers) == (True, ())
        assert dict(run_one(parts, tokens).sources) == {"dram": 48}
        assert report_of(parts.engine.reset(["disk"])).reason == "there is no tier disk"


def test_c11_resolves_that_are_stuck_hold_it_back(gated: tuple[Assembly, Any]) -> None:
    """While a resolve waits for a slow tier nothing is idle; what is behind waits too, and all end."""
    parts, tier = gated
    engine = parts.engine
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    pending = engine.reset()
    quick = engine.submit(prompt(10, 2), 3)  # asks no tier, and must not pass all the same
    for _ in range(50):
        assert not engine.step()
    assert not pending.done
    assert engine.take_results() == {}
    tier.open()
    results = engine.run()
    assert report_of(pending).done
    assert {results[slow].finish, results[quick].finish} == {Finish.LENGTH}


def test_c11_saves_that_are_not_settled_hold_it_back(gated: tuple[Assembly, Any]) -> None:
    """No request is left, but a save still reads pages: the operation waits for it, without any step."""
    parts, tier = gated
    tier.saves_shut = True
    run_one(parts, prompt(40, 1))
    pending = parts.engine.reset()
    wait_for(lambda: parts.engine.gauges()["control"])
    assert not pending.done
    tier.open()
    assert report_of(pending).done


def test_r5_the_deadline_gives_it_up_and_lets_go_what_is_behind(gated: tuple[Assembly, Any]) -> None:
    """Given up before its turn it has not run, says what was in the way, and holds nobody any longer."""
    parts, tier = gated
    engine, kept = parts.engine, prompt(50, 7)
    run_one(parts, kept)
    assert parts.store is not None
    assert parts.store.flush()
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    pending = engine.reset(deadline_s=0.05)
    behind = engine.submit(kept, 3)
    report = report_of(pending)
    assert (report.done, report.reset) == (False, None)
    assert report.reason == "reset: the deadline passed before its turn"
    assert "1 resolving" in report.waited_for
    results: dict[int, Result] = {}
    while behind not in results:
        engine.step()
        results |= engine.take_results()
    assert results[behind].hit_tokens == 48  # nothing was forgotten
    tier.open()
    assert engine.run()[slow].finish is Finish.LENGTH


def test_r5_a_deadline_that_passes_while_saves_settle(gated: tuple[Assembly, Any]) -> None:
    """Its turn has come, but not everything settled in time: it has not run."""
    parts, tier = gated
    tier.saves_shut = True
    run_one(parts, prompt(40, 1))
    report = report_of(parts.engine.reset(deadline_s=0.05))
    assert (report.done, report.reason) == (False, "reset: the deadline passed before all had settled")
    assert any("saves" in name for name in report.waited_for)
    tier.open()
    assert run_one(parts, prompt(40, 1)).hit_tokens == 32


def test_c11_close_gives_up_what_waits(gated: tuple[Assembly, Any]) -> None:
    """Every operation in line says that it has not run; every request has its result; nothing is left."""
    parts, tier = gated
    engine, kept = parts.engine, prompt(50, 7)
    run_one(parts, kept)
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    pendings = [engine.reset(), engine.set_retention(False), engine.unload_adapter("x")]
    behind = engine.submit_parallel(prompt(10, 2), 3, 2)
    engine.close()
    for pending in pendings:
        assert pending.done
        assert (pending.value.done, pending.value.reason) == (False, "the engine was closed")
    results = engine.take_results()
    assert {results[number].finish for number in (slow, *behind)} == {Finish.CANCELLED}
    assert parts.store is not None
    assert parts.store.probe(kept) == {"0": 48}  # neither reset nor drained
    with pytest.raises(UsageFault, match="closed"):
        engine.reset()


def test_c11_close_gives_up_what_waits_for_saves(gated: tuple[Assembly, Any]) -> None:
    """An operation whose turn has come but that has changed nothing yet is given up at once."""
    parts, tier = gated
    tier.saves_shut = True
    run_one(parts, prompt(40, 1))
    pending = parts.engine.reset()
    parts.engine.close()
    assert (pending.done, pending.value.done, pending.value.reason) == (True, False, "the engine was closed")
    tier.open()


def test_c11_an_idle_engine_needs_no_step(case: Tiny) -> None:
    """With nothing going on it runs by itself: a caller may wait for it and step afterwards."""
    with assembled(case) as (parts, _):
        run_one(parts, prompt(50, 1))
        assert report_of(parts.engine.reset(deadline_s=math.inf)).done
        assert run_one(parts, prompt(50, 1)).hit_tokens == 0


def test_c11_switches_are_ordered_and_need_no_idleness(gated: tuple[Assembly, Any]) -> None:
    """What was submitted before resolves as it was, what comes after as it is now; nobody is waited for."""
    parts, tier = gated
    engine, old, new = parts.engine, prompt(70, 1), prompt(70, 2)
    run_one(parts, old)
    assert parts.store is not None
    assert parts.store.flush()
    for seed in range(3, 10):
        run_one(parts, prompt(100, seed))
    run_one(parts, new)
    tier.shut = True
    before = engine.submit(old, 3)
    pending = engine.set_prefix_cache(False)
    after = engine.submit(new, 3)
    assert report_of(pending).done  # while `before` is still resolving
    assert engine.gauges()["resolving"] >= 1
    results: dict[int, Result] = {}
    while after not in results:
        engine.step()
        results |= engine.take_results()
    assert (results[after].hit_tokens, results[after].degraded) == (0, ("prefix caching is off",))
    tier.open()
    assert engine.run()[before].sources == {"dram": 64}
    assert report_of(engine.set_prefix_cache(True)).done
    assert run_one(parts, old).sources == {"dram": 64}  # the device kept nothing meanwhile


def test_b12_retention_is_switched_in_order(case: Tiny) -> None:
    """Off: the device keeps nothing, the tier serves; on again: the device keeps."""
    with assembled(case) as (parts, _):
        engine, tokens = parts.engine, prompt(50, 1)
        run_one(parts, tokens)
        assert parts.store is not None
        assert parts.store.flush()  # a page that is being saved stays until that has landed
        assert report_of(engine.set_retention(False)).done
        assert parts.pool.cached == 0
        assert run_one(parts, tokens).sources == {"dram": 48}
        assert parts.store.flush()
        assert parts.pool.cached == 0
        assert report_of(engine.set_retention(True)).done
        run_one(parts, tokens)
        assert run_one(parts, tokens).sources == {"device": 48}


def test_c11_operations_run_one_after_the_other(gated: tuple[Assembly, Any]) -> None:
    """A switch behind a reset waits for it, though it would not have to wait by itself."""
    parts, tier = gated
    engine = parts.engine
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    order: list[str] = []
    for name, pending in {
        "reset": engine.reset(),
        "off": engine.set_prefix_cache(False),
        "again": engine.reset(),
        "on": engine.set_prefix_cache(True),
    }.items():
        pending.on_done(lambda report, name=name: order.append(f"{name} {report.done}"))
    assert engine.gauges()["control"] == 4
    assert order == []
    tier.open()
    engine.run()
    last = engine.set_retention(True)
    assert report_of(last).done
    assert order == ["reset True", "off True", "again True", "on True"]
    assert slow not in engine.take_results()


def test_a11_cancel_of_a_request_behind_an_operation(gated: tuple[Assembly, Any]) -> None:
    """It ends at once; the branches of its prompt go on by themselves."""
    parts, tier = gated
    engine = parts.engine
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    pending = engine.reset()
    sampling = Sampling(temperature=0.8, seed=3)
    ids = engine.submit_parallel(prompt(20, 2), 3, 3, sampling=sampling, stop_token_ids=[])
    assert engine.gauges()["behind"] == 3
    engine.cancel(ids[0])
    assert engine.take_results()[ids[0]].finish is Finish.CANCELLED
    assert engine.gauges()["behind"] == 2
    tier.open()
    results = engine.run()
    assert report_of(pending).done
    assert [results[number].finish for number in (slow, *ids[1:])] == [Finish.LENGTH] * 3


def test_c11_branches_count_as_going_on(case: Tiny) -> None:
    """A reset waits for all requests of a shared prompt, also for those that have not begun."""
    with assembled(case, pages=8) as (parts, _):
        engine = parts.engine
        ids = engine.submit_parallel(prompt(40, 1), 20, 3, stop_token_ids=[])
        pending = engine.reset()
        results: dict[int, Result] = {}
        while not pending.done and not engine.idle:
            engine.step()
            results |= engine.take_results()
            assert not pending.done or len(results) == 3
        assert report_of(pending).done
        assert set(results) | set(engine.take_results()) == set(ids)


def test_c11_without_a_store(case: Tiny) -> None:
    """There is a reset of the device; what needs a store says so."""
    with assembled(case, tier=False, prefix_cache=False) as (parts, _):
        engine = parts.engine
        request = engine.submit(prompt(40, 1), 3)
        pending = engine.reset()
        assert engine.run()[request].finish is Finish.LENGTH
        report = report_of(pending)
        assert report.reset is not None
        assert (report.done, report.reset.done, report.reset.pages) == (True, True, 0)
        with pytest.raises(UsageFault, match="no store"):
            engine.set_prefix_cache(True)
        with pytest.raises(UsageFault, match="no store"):
            engine.reset(["dram"])
        with pytest.raises(UsageFault, match=r"deadline_s -1: expected"):
            engine.reset(deadline_s=-1)


def test_c11_a_failing_callback_costs_nobody(gated: tuple[Assembly, Any], monkeypatch: Any) -> None:
    """Whoever hears of an operation may fail; the line goes on, and the failure is reported."""
    parts, tier = gated
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    tier.shut = True
    slow = parts.engine.submit(prompt(40, 1), 3)
    pending = parts.engine.reset()
    pending.on_done(lambda _: 1 / 0)
    behind = parts.engine.submit(prompt(10, 2), 3)
    tier.open()
    results = parts.engine.run()
    assert {results[slow].finish, results[behind].finish} == {Finish.LENGTH}
    assert [type(error) for error in seen] == [ZeroDivisionError]


def test_r8_operations_and_requests_from_many_threads(case: Tiny) -> None:
    """Each has exactly one terminal, whatever the order; at idle every gauge is 0."""
    with assembled(case) as (parts, _):
        engine = parts.engine
        pendings: list[Pending[ControlReport]] = []
        ids: list[int] = []

        def work(number: int) -> None:
            for turn in range(4):
                ids.append(engine.submit(prompt(20 + 10 * number, number), 3))
                pendings.append((engine.reset, engine.set_retention)[turn % 2](*((), (True,))[turn % 2]))
                ids.append(engine.submit(prompt(20 + 10 * number, number), 2))
                if turn == 2:
                    engine.cancel(ids[-1])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        results: dict[int, Result] = {}
        while any(thread.is_alive() for thread in threads):
            engine.step()
        results |= engine.run()
        settle(engine)
        assert set(results) == set(ids)
        assert all(result.finish in {Finish.LENGTH, Finish.CANCELLED} for result in results.values())
        assert all(report_of(pending).done for pending in pendings)
        assert not any(engine.gauges().values())
