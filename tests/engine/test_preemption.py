"""Preemption: whoever gives way goes on later as if nothing had happened, and nobody is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import PAGE, WAIT_S, assembled, prompt, settle, until, wait_for, write_adapter
from test_speculative import StatefulNgram, drafting
from tiny_models import Tiny, tiny

from kvcontract.contract.model import Scope
from kvcontract.engine.build import Assembly, EngineLimits
from kvcontract.engine.drafter import NgramDrafter
from kvcontract.engine.engine import Engine
from kvcontract.engine.request import Finish, Result
from kvcontract.engine.sampling import Sampling
from kvcontract.store.policy import ResolvePolicy

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
NEW = 20


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


def submit(engine: Engine, tokens: list[int], new: int = NEW, **more: Any) -> int:
    """A request to its full length; returns once its prefix is known."""
    more.setdefault("capture_logits", "all")
    request = engine.submit(tokens, new, stop_token_ids=[], **more)
    settle(engine)
    return request


def plain(case: Tiny, tokens: list[int], new: int = NEW, **more: Any) -> Result:
    """The same request alone in an engine, never preempted."""
    with assembled(case, tier=False, prefix_cache=False) as (parts, _):
        request = submit(parts.engine, tokens, new, **more)
        return parts.engine.run()[request]


def same(result: Result, expected: Result) -> bool:
    """Same tokens, to the same end; every row is captured once, and every prompt token counted once."""
    assert result.tokens == expected.tokens
    assert result.finish is expected.finish
    assert sum(result.sources.values()) == result.hit_tokens
    new = len(result.tokens)
    if not result.drafted_tokens:
        computed = sum(result.split) - result.recomputed_tokens - (new - 1)
        assert result.hit_tokens + computed == result.prompt_tokens
    if result.positions is not None:
        rows = result.positions.tolist()
        assert rows == sorted(set(rows))
        if not result.drafted_tokens:
            assert rows[-new:] == list(range(result.prompt_tokens - 1, result.prompt_tokens + new - 1))
    return True


def steps(engine: Engine, count: int) -> None:
    """Run some steps; of a prompt of 45 tokens the first three are chunks, then each samples one token."""
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", [True, False], ids=["store", "no-store"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 11])
def test_b20_preemption_changes_no_token(case: Tiny, sampling: Sampling, at: int, *, cache: bool) -> None:
    """Preempted after any step, in the middle of chunked prefill too: the tokens of an undisturbed run."""
    tokens = prompt(45, 1)  # three chunks
    expected = plain(case, tokens, sampling=sampling)
    with assembled(case, tier=cache, prefix_cache=cache) as (parts, _):
        engine = parts.engine
        request = submit(engine, tokens, sampling=sampling)
        steps(engine, at)
        committed = min(at * PAGE, 45) + max(0, at - 3)
        engine.preempt(request)
        result = engine.run()[request]
        assert same(result, expected)
        assert (result.preemptions, result.hit_tokens) == (1, 0)
        kept = committed // PAGE * PAGE if cache else 0
        assert result.recomputed_tokens == committed - kept


def test_b20_preempted_after_every_step_it_still_ends(case: Tiny) -> None:
    """With a store complete pages stay findable, so there is progress however often it gives way."""
    tokens = prompt(45, 1)
    expected = plain(case, tokens, sampling=SAMPLED)
    with assembled(case) as (parts, _):
        request = submit(parts.engine, tokens, sampling=SAMPLED)
        results: dict[int, Result] = {}
        while request not in results:
            settle(parts.engine)
            parts.engine.step()
            parts.engine.preempt(request)
            results |= parts.engine.take_results()
        assert same(results[request], expected)
        assert results[request].preemptions >= 20


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_b20_with_speculation(case: Tiny, sampling: Sampling) -> None:
    """Proposals go on afterwards, and change nothing either."""
    tokens = prompt(20, 1) * 2
    expected = plain(case, tokens, 40, sampling=sampling)
    for at in (1, 4, 7, 9):
        limits = EngineLimits(max_chunk_tokens=PAGE)
        with assembled(case, drafter=NgramDrafter(8), limits=limits) as (parts, _):
            request = submit(parts.engine, tokens, 40, sampling=sampling)
            steps(parts.engine, at)
            parts.engine.preempt(request)
            result = parts.engine.run()[request]
            assert same(result, expected)
            assert (result.preemptions, result.drafted_tokens > 0) == (1, True)


def test_b20_live_slots_come_back_and_are_taken_again(case: Tiny) -> None:
    """A drafter's state lies in a slot: whoever gives way gives that too."""
    tokens = [prompt(20, seed) * 2 for seed in range(3)]
    expected = [plain(case, each, 40) for each in tokens]
    limits = EngineLimits(max_chunk_tokens=PAGE, max_requests=2)
    drafter = StatefulNgram(8)
    with assembled(drafting(case), tier=False, pages=41, drafter=drafter, limits=limits) as (parts, _):
        engine = parts.engine
        low = [submit(engine, each, 40) for each in tokens[:2]]
        for _ in range(4):
            steps(engine, 2)
            engine.preempt(low[0])
        high = submit(engine, tokens[2], 40, priority=1)
        results = engine.run()
        for request, result in zip((*low, high), expected, strict=True):
            assert same(results[request], result)
        assert results[low[0]].preemptions >= 4
        assert results[high].preemptions == 0


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("pages", [41, 6])
def test_b20_with_branches(case: Tiny, who: int, at: int, pages: int) -> None:
    """N = 3: the parent before and after its branches begin, and each of them, with room and without."""
    tokens = prompt(40, 1)
    expected = [plain(case, tokens, sampling=SAMPLED.branch(number)) for number in range(3)]
    with assembled(case, pages=pages) as (parts, _):
        engine = parts.engine
        ids = engine.submit_parallel(tokens, NEW, 3, sampling=SAMPLED, stop_token_ids=[])
        settle(engine)
        steps(engine, at)
        active = engine.gauges()["active"]
        engine.preempt(ids[who])
        results = engine.run()
        assert [results[number].tokens for number in ids] == [result.tokens for result in expected]
        assert results[ids[who]].preemptions == int(who < active)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_b20_a_branch_that_came_later_is_preempted(case: Tiny, at: int) -> None:
    """It runs the prompt again by itself, after a first token that was sampled long before."""
    tokens = prompt(40, 1)
    expected = plain(case, tokens, sampling=SAMPLED.branch(1))
    with assembled(case, pages=6, tier=False, prefix_cache=False) as (parts, _):  # one at a time
        engine = parts.engine
        first, branch = engine.submit_parallel(tokens, NEW, 2, sampling=SAMPLED, stop_token_ids=[])
        results: dict[int, Result] = {}
        until(engine, lambda: results.update(engine.take_results()) or first in results)
        until(engine, lambda: engine.gauges()["active"])
        steps(engine, at)
        engine.preempt(branch)
        results |= engine.run()
        assert (results[branch].tokens, results[branch].preemptions) == (expected.tokens, 1)


@pytest.mark.parametrize("tier", [True, False])
def test_b20_what_was_evicted_is_restored_or_recomputed(case: Tiny, *, tier: bool) -> None:
    """While it rests others need its pages: a tier brings back what was complete, else all is run again."""
    tokens = prompt(45, 1)
    expected = plain(case, tokens)
    with assembled(case, pages=11, tier=tier) as (parts, _):
        engine = parts.engine
        assert parts.store is not None
        first = submit(engine, tokens)
        steps(engine, 7)  # 49 tokens have their KV
        assert parts.store.flush()
        others = [submit(engine, prompt(100, seed), 40) for seed in (2, 3)]  # 9 of 10 pages each
        engine.preempt(first)
        results = engine.run()
        assert same(results[first], expected)
        assert results[first].recomputed_tokens == (1 if tier else 49)
        assert {results[other].finish for other in others} == {Finish.LENGTH}
        assert parts.store.stats().hit_tokens.get("dram", 0) == (48 if tier else 0)


def test_b20_what_another_request_has_computed_meanwhile_is_a_hit(case: Tiny) -> None:
    """Preempted early it finds more of its prompt than it had: those tokens it never computes."""
    tokens = prompt(60, 1)
    expected = plain(case, tokens)
    with assembled(case, pages=9) as (parts, _):  # 8 pages: one of 5 at a time
        engine = parts.engine
        first = submit(engine, tokens)
        engine.step()  # 16 tokens
        twin = submit(engine, tokens, priority=1)
        results = engine.run()
        assert same(results[first], expected)
        assert same(results[twin], expected)
        assert (results[first].preemptions, results[first].recomputed_tokens) == (1, 0)
        assert (results[first].hit_tokens, results[first].sources) == (32, {"device": 32})
        assert results[first].split[:2] == (16, 12)


# By priority


def test_b20_a_higher_priority_takes_the_place_of_the_latest_lower_one(case: Tiny) -> None:
    """As few as it takes give way, the latest first; all end with the tokens of undisturbed runs."""
    asked = {seed: prompt(40, seed) for seed in range(4)}
    expected = {seed: plain(case, tokens) for seed, tokens in asked.items()}
    with assembled(case, pages=13) as (parts, _):  # 12 pages: three requests of 4
        engine = parts.engine
        ids = {seed: submit(engine, asked[seed]) for seed in range(3)}
        steps(engine, 5)
        assert engine.gauges()["active"] == 3
        assert parts.store is not None
        assert parts.store.flush()
        urgent = submit(engine, asked[3], priority=5)
        engine.step()
        gauges = engine.gauges()
        assert (gauges["active"], gauges["preempted"], gauges["waiting"]) == (3, 1, 0)
        results = engine.run()
        for seed in range(3):
            assert same(results[ids[seed]], expected[seed])
        assert same(results[urgent], expected[3])
        assert [results[ids[seed]].preemptions for seed in range(3)] == [0, 0, 1]


def test_b20_pages_that_are_being_saved_are_waited_for(gated: tuple[Assembly, Any]) -> None:
    """What one gives back comes once its saves have landed; nobody else gives way for it meanwhile."""
    parts, tier = gated
    engine = parts.engine
    low = [submit(engine, prompt(140, seed)) for seed in range(3)]  # 10 of 30 pages each
    tier.saves_shut = True
    steps(engine, 12)
    urgent = submit(engine, prompt(140, 5), priority=1)
    for _ in range(4):
        engine.step()
        gauges = engine.gauges()
        assert (gauges["active"], gauges["preempted"], gauges["waiting"]) == (2, 1, 1)
    tier.open()
    results: dict[int, Result] = {}
    until(engine, lambda: results.update(engine.take_results()) or urgent in results)
    results |= engine.run()
    assert [results[number].preemptions for number in (*low, urgent)] == [0, 0, 1, 0]


def test_b20_priority_takes_a_place_in_the_batch(case: Tiny) -> None:
    """Pages are plenty, but every place is taken: one gives way."""
    limits = EngineLimits(max_chunk_tokens=PAGE, max_requests=2)
    with assembled(case, limits=limits) as (parts, _):
        engine = parts.engine
        low = [submit(engine, prompt(20, seed), priority=-seed) for seed in range(2)]
        engine.step()
        high = submit(engine, prompt(20, 5))
        results: dict[int, Result] = {}
        until(engine, lambda: results.update(engine.take_results()) or high in results)
        assert low[1] not in results
        results |= engine.run()
        assert [results[number].preemptions for number in (*low, high)] == [0, 1, 0]


def test_b20_equals_never_preempt_and_nobody_gives_way_in_vain(case: Tiny) -> None:
    """An equal waits; so does a higher one that would not fit even if all lower ones gave way."""
    with assembled(case, pages=13) as (parts, _):
        engine = parts.engine
        large, small = submit(engine, prompt(100, 1), priority=1), submit(engine, prompt(40, 2))
        steps(engine, 3)
        equal = submit(engine, prompt(40, 3))
        hopeless = submit(engine, prompt(80, 4), priority=1)  # 7 pages; 8 are an equal's
        engine.step()
        assert engine.gauges()["active"] == 2
        results = engine.run()
        assert all(results[number].preemptions == 0 for number in (large, small, equal, hopeless))
        assert {result.finish for result in results.values()} == {Finish.LENGTH}


def test_b20_the_line_is_in_order_of_priority(case: Tiny) -> None:
    """Higher first, equals by arrival; whoever was preempted stands before its equals."""
    with assembled(case, pages=5) as (parts, _):  # one request at a time
        engine = parts.engine
        order: list[int] = []
        first = submit(engine, prompt(30, 1), 10)
        engine.step()
        rest = [
            submit(engine, prompt(30, seed), 10, priority=p) for seed, p in ((2, 0), (3, 2), (4, 1), (5, 2))
        ]
        until(engine, lambda: settle(engine) or order.extend(engine.take_results()) or engine.idle)
        assert order == [rest[1], rest[3], rest[2], first, rest[0]]


def test_b20_a_stream_of_higher_ones_makes_no_livelock(case: Tiny) -> None:
    """Each pair of priorities has one that gives way; with the stream's end the lowest ends too."""
    with assembled(case, pages=5) as (parts, _):
        engine = parts.engine
        low = submit(engine, prompt(30, 1), 10)
        engine.step()
        for seed in range(2, 8):
            submit(engine, prompt(30, seed), 4, priority=seed)
            engine.step()
        results = engine.run()
        assert results[low].finish is Finish.LENGTH
        assert 1 <= results[low].preemptions <= 6
        assert same(results[low], plain(case, prompt(30, 1), 10))


# By a caller


def test_b20_a_caller_lets_the_equals_that_wait_go_first(case: Tiny) -> None:
    """Who is told to give way comes after those that wait, before those that come later."""
    with assembled(case, pages=5) as (parts, _):
        engine = parts.engine
        order: list[int] = []
        first, second = submit(engine, prompt(30, 1), 10), submit(engine, prompt(30, 2), 10)
        engine.step()
        engine.preempt(first)
        engine.step()
        third = submit(engine, prompt(30, 3), 10)
        until(engine, lambda: settle(engine) or order.extend(engine.take_results()) or engine.idle)
        assert order == [second, first, third]


def test_b20_what_is_not_active_is_not_preempted(gated: tuple[Assembly, Any]) -> None:
    """Unknown, waiting, resolving or ended: nothing happens, now or later."""
    parts, tier = gated
    engine = parts.engine
    tier.shut = True
    slow = engine.submit(prompt(40, 1), 3)
    engine.preempt(slow)
    engine.preempt(77)
    assert not engine.step()
    tier.open()
    result = engine.run()[slow]
    engine.preempt(slow)
    engine.step()
    assert (result.finish, result.preemptions) == (Finish.LENGTH, 0)


def test_a25_a_preempted_request_that_resolves_blocks_nobody(gated: tuple[Assembly, Any]) -> None:
    """Its resolve waits for a slow tier like any: others begin and end meanwhile (A25)."""
    parts, tier = gated
    engine = parts.engine
    slow = preempted_in(engine, tier, "resolving")
    quick = engine.submit(prompt(10, 2), 3)  # asks no tier
    results: dict[int, Result] = {}
    until(engine, lambda: results.update(engine.take_results()) or quick in results)
    assert slow not in results
    tier.open()
    assert engine.run()[slow].preemptions == 1


def test_a24_a_demand_that_was_met_is_not_made_again(gated: tuple[Assembly, Any]) -> None:
    """A full hit was asked for once; what it has sampled since nobody else produces, so nobody parks."""
    parts, tier = gated
    engine, tokens = parts.engine, prompt(49, 1)
    submit(engine, tokens, 1)
    engine.run()
    assert engine.store is not None
    assert engine.store.flush()
    tier.sheds = True
    assert engine.set_retention(False).wait(WAIT_S).done
    request = submit(engine, tokens, policy=ResolvePolicy(full_hit=True, deadline_s=4 * WAIT_S))
    steps(engine, 18)  # a page more is complete, and nowhere to be found
    engine.preempt(request)
    engine.step()
    settle(engine)
    result = engine.run()[request]
    assert (result.finish, result.preemptions, result.hit_tokens) == (Finish.LENGTH, 1, 48)
    assert result.recomputed_tokens == 18


# Ends


def preempted_in(engine: Engine, tier: Any, stage: str) -> int:
    """A request that was preempted with some tokens sampled, and lies in one place.

    The device keeps nothing, so that the tier is asked for its pages.
    """
    assert engine.store is not None
    assert engine.set_retention(False).wait(WAIT_S).done
    hog = submit(engine, prompt(340, 2), 20) if stage in {"preempted", "waiting"} else None  # 23 of 30 pages
    policy = ResolvePolicy(deadline_s=0.2 if stage == "waiting" else WAIT_S)
    request = submit(engine, prompt(45, 1), policy=policy)
    steps(engine, 7)
    assert engine.gauges()["active"] == 1 + (hog is not None)
    assert engine.store.flush()
    if stage == "preempted":  # behind an equal that needs 10 pages
        submit(engine, prompt(140, 3))
    tier.shut = stage in {"resolving", "waiting"}
    engine.preempt(request)
    engine.step()
    if stage == "waiting":  # while it resolves another one takes the room
        engine.submit(prompt(10, 4), 90, stop_token_ids=[])  # 7 pages; asks no tier
        until(engine, lambda: engine.gauges()["active"] == 2)
    if stage in {"waiting", "arrived"}:
        settle(engine)
    if stage == "waiting":
        engine.step()
    assert engine.gauges()[stage] >= 1, engine.gauges()
    return request


@pytest.mark.parametrize("stage", ["preempted", "resolving", "arrived", "waiting"])
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a11_a_preempted_request_ends_wherever_it_is(
    gated: tuple[Assembly, Any], stage: str, end: str
) -> None:
    """Cancelled or closed at every stage it says what it had sampled, and nothing stays taken."""
    parts, tier = gated
    engine = parts.engine
    request = preempted_in(engine, tier, stage)
    if end == "close":
        engine.close()
        results = engine.take_results()
    else:
        engine.cancel(request)
        results = {}
        until(engine, lambda: results.update(engine.take_results()) or request in results)
    result = results[request]
    assert (result.finish, result.preemptions) == (Finish.CANCELLED, 1)
    assert len(result.tokens) >= 4
    tier.open()
    engine.run()


def test_a11_cancel_of_a_preempted_parent_lets_its_branches_begin(gated: tuple[Assembly, Any]) -> None:
    """Before the prompt was done: the others want it all the same."""
    parts, tier = gated
    engine, tokens = parts.engine, prompt(45, 1)
    assert engine.set_retention(False).wait(WAIT_S).done
    ids = engine.submit_parallel(tokens, 5, 3, sampling=SAMPLED, stop_token_ids=[])
    settle(engine)
    engine.step()
    assert engine.store is not None
    assert engine.store.flush()
    tier.shut = True
    engine.preempt(ids[0])
    engine.step()
    assert engine.gauges()["resolving"] == 1
    engine.cancel(ids[0])
    tier.open()
    results = engine.run()
    assert [results[number].finish for number in ids] == [Finish.CANCELLED, Finish.LENGTH, Finish.LENGTH]


def test_c11_a_reset_waits_for_a_preempted_request(gated: tuple[Assembly, Any]) -> None:
    """It was submitted before, so it finds its pages and ends first, wherever it lies meanwhile."""
    parts, tier = gated
    engine = parts.engine
    first = preempted_in(engine, tier, "resolving")
    pending = engine.reset()
    tier.open()
    settle(engine)
    assert not pending.done
    result = engine.run()[first]
    assert pending.wait(WAIT_S).done
    assert result.recomputed_tokens < PAGE


def test_c11_a_reset_beside_the_engine_costs_a_recompute(case: Tiny) -> None:
    """Somebody else resets the store while the request rests: nothing is found, and nothing is lost."""
    tokens = prompt(45, 1)
    expected = plain(case, tokens)
    with assembled(case, pages=6) as (parts, _):  # one request at a time
        engine, reports = parts.engine, []
        assert parts.store is not None
        request = submit(engine, tokens)
        steps(engine, 8)
        high = submit(engine, prompt(45, 2), priority=1)
        until(engine, lambda: engine.gauges()["preempted"] and engine.gauges()["active"])
        store = parts.store
        reset = threading.Thread(target=lambda: reports.append(store.reset()))
        reset.start()
        now = ResolvePolicy(deadline_s=0.0)
        wait_for(lambda: "a reset was under way" in store.resolve("0", tokens, policy=now).degraded)
        results = engine.run()
        reset.join()
        assert reports[0].done
        assert same(results[request], expected)
        assert results[request].recomputed_tokens == 50
        assert results[high].finish is Finish.LENGTH


def test_d1_a_preempted_request_keeps_its_adapter(case: Tiny, tmp_path: Any) -> None:
    """It resolves in its own scope, and goes on with the adapter; an unload waits for it."""
    folder = write_adapter(tmp_path / "x", case.model, 1)
    with assembled(case) as (parts, _):
        engine, tokens = parts.engine, prompt(45, 1)
        assert engine.load_adapter("x", folder).wait(WAIT_S).done
        undisturbed = submit(engine, prompt(45, 2), scope=Scope(lora="x"))
        expected = engine.run()[undisturbed]
        base = submit(engine, prompt(45, 2))
        assert engine.run()[base].tokens != expected.tokens
        assert engine.reset().wait(WAIT_S).done
        request = submit(engine, prompt(45, 2), scope=Scope(lora="x"))
        steps(engine, 8)
        engine.preempt(request)
        pending = engine.unload_adapter("x")
        engine.step()
        assert not pending.done
        result = engine.run()[request]
        assert (result.tokens, result.preemptions) == (expected.tokens, 1)
        assert result.recomputed_tokens < PAGE
        assert pending.wait(WAIT_S).done
        assert tokens


# Everything at once

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.integers(-1, 2)),
        st.tuples(st.just("preempt"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS)
def test_b20_any_mix_of_priorities_preemptions_cancels_and_resets(
    case: Tiny, actions: Sequence[tuple[str, int, int]]
) -> None:
    """Every request ends, with the tokens it has alone or the first of them; the books always balance."""
    lengths = (20, 33, 45, 60, 16, 7)
    with assembled(case, pages=13, gate=True) as (parts, _):
        engine = parts.engine
        ids: dict[int, int] = {}
        results: dict[int, Result] = {}
        pendings = []
        for verb, number, priority in actions:
            if verb == "submit":
                tokens = prompt(lengths[number], number)
                request = engine.submit(tokens, 12, stop_token_ids=[], sampling=SAMPLED, priority=priority)
                ids[request] = number
            elif verb == "step":
                for _ in range(number):
                    engine.step()
                    parts.pool.check_books()
            elif verb == "reset":
                pendings.append(engine.reset())
            else:
                (engine.preempt if verb == "preempt" else engine.cancel)(number)
        results |= engine.run()
        assert all(pending.wait(WAIT_S).done for pending in pendings)
        assert set(results) == set(ids)
        for request, number in ids.items():
            expected = alone(case, prompt(lengths[number], number))
            result = results[request]
            assert result.finish in {Finish.LENGTH, Finish.CANCELLED}
            assert result.tokens == expected[: len(result.tokens)]
            assert len(result.tokens) == 12 or result.finish is Finish.CANCELLED


_ALONE: dict[tuple[int, ...], tuple[int, ...]] = {}


def alone(case: Tiny, tokens: list[int]) -> tuple[int, ...]:
    """What a prompt gives undisturbed; remembered."""
    key = tuple(tokens)
    if key not in _ALONE:
        _ALONE[key] = plain(case, tokens, 12, sampling=SAMPLED).tokens
    return _ALONE[key]
