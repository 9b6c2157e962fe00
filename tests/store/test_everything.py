"""All verbs at once: in threads over real tiers, and twice on virtual time with the same choices."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from bench_store import PAGE, SCOPE, Setup, model_of, prompt, row

from kvcontract import BlockPool, FleetSecret, KvStore, Rank, admit
from kvcontract.contract.layout import layout
from kvcontract.core.lane import ThreadLane
from kvcontract.memory.binding import Binding
from kvcontract.pool.events import EventLog
from kvcontract.pool.request import RequestKv
from kvcontract.store.events import TierEvents
from kvcontract.store.policy import CancelToken, ResolvePolicy
from kvcontract.tiers.base import SaveClass
from kvcontract.tiers.dram import DramTier

CALM_S = 60.0
HEADS, TP, PAGES = 2, 2, 48


class Machine:
    """Two workers, two tiers of which the first is small, and a store in threads of its own."""

    def __init__(self) -> None:
        model = model_of(HEADS)
        memory = [
            {"full": Binding.allocate(layout(model, number, TP).space("full"), PAGES)} for number in range(TP)
        ]
        self.lane = ThreadLane("copies", workers=2)
        self.rank = Rank(BlockPool(PAGES, PAGE, events=EventLog()), memory)
        self.tiers = [DramTier(30 * 128, lane=self.lane), DramTier(1 << 20, lane=self.lane, name="disk")]
        self.store = KvStore(model, [self.rank], self.tiers, events=TierEvents())
        self.wrong: list[str] = []

    def row_of(self, worker: int, page: int, at: int) -> np.ndarray[Any, Any]:
        """uint8[layers, heads, dim]: what a worker has."""
        views = self.rank.memory[worker]["full"].views
        return np.stack([views[f"layer.{layer}", "kv"][page, at].numpy() for layer in range(2)])

    def check(self, tokens: list[int], pages: list[int]) -> None:
        """Note every row that is not what its tokens leave."""
        for at in range(len(pages) * PAGE):
            wanted = row(tokens[: at + 1], HEADS)
            for worker in range(TP):
                share = wanted[:, worker * HEADS // TP : (worker + 1) * HEADS // TP]
                if (self.row_of(worker, pages[at // PAGE], at % PAGE) != share).any():
                    self.wrong.append(f"token {at} of {len(tokens)}, worker {worker}")

    def write(self, req: RequestKv) -> None:
        """Prefill, in chunks."""
        while req.committed_tokens < req.prompt_len:
            chunk = req.schedule_prefill(7)
            for at in range(chunk.start, chunk.end):
                content = torch.from_numpy(row(req.tokens[: at + 1].tolist(), HEADS).copy())
                for worker in range(TP):
                    share = content[:, worker * HEADS // TP : (worker + 1) * HEADS // TP]
                    views = self.rank.memory[worker]["full"].views
                    for layer in range(2):
                        views[f"layer.{layer}", "kv"][int(chunk.pages["full"][at // PAGE]), at % PAGE] = (
                            share[layer]
                        )
            req.apply_prefill(chunk, 5 if chunk.emits else None)
            self.store.seal(req)


def turn(machine: Machine, rng: np.random.Generator, number: int) -> None:
    """One request of one engine."""
    store = machine.store
    tokens = prompt(7, seed=int(rng.integers(6)))[: int(rng.integers(1, 7 * PAGE))]
    token = CancelToken()
    if rng.random() < 0.2:
        threading.Timer(float(rng.random()) * 0.002, token.cancel).start()
    deadline = 0.0005 if rng.random() < 0.2 else 5.0
    prefix = store.resolve("0", tokens, SCOPE, ResolvePolicy(deadline), cancel=token, label="same")
    store.explain(prefix)
    if prefix.hold is not None:
        machine.check(tokens, prefix.hold.pages.tolist())
    req = admit(
        machine.rank.pool,
        prompt_tokens=tokens,
        max_new_tokens=1,
        keyer=store.keyer,
        scope=SCOPE,
        prefix=prefix,
    )
    if not isinstance(req, RequestKv):
        prefix.release()
        return
    machine.write(req)
    machine.check(tokens, req.pages.tolist()[: len(tokens) // PAGE])
    if rng.random() < 0.3:
        name = f"handoff-{number}-{rng.integers(1 << 30)}"
        store.retire(req, SaveClass.HANDOFF, handoff=name)
        store.flush_handoff(name)
        store.release_handoff(name)
    else:
        store.retire(req)


def operate(machine: Machine, stop: threading.Event) -> None:
    """An operator who pins, flushes, resets and switches."""
    rng = np.random.default_rng(99)
    while not stop.wait(0.003):
        tokens = prompt(7, seed=int(rng.integers(6)))
        match int(rng.integers(6)):
            case 0:
                machine.store.pin("0", tokens, SCOPE, ttl_s=0.01)
            case 1:
                machine.store.flush(deadline_s=0.05)
            case 2:
                machine.store.reset(deadline_s=0.002)
            case 3:
                machine.store.set_retention(False)
                machine.store.set_retention(True)
            case 4:
                machine.store.set_prefix_cache(False)
                machine.store.set_prefix_cache(True)
            case _:
                machine.store.probe(tokens, SCOPE)
                machine.store.take_events()


def run_for(machine: Machine, seconds: float, *, kill: bool) -> None:
    """Three engines and an operator; in the middle, perhaps, a tier dies."""
    end, stop, errors = time.monotonic() + seconds, threading.Event(), list[BaseException]()

    def engine(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            while time.monotonic() < end:
                turn(machine, rng, number)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
    operator = threading.Thread(target=operate, args=(machine, stop))
    for thread in (*threads, operator):
        thread.start()
    if kill:
        threading.Timer(seconds / 2, lambda: machine.tiers[1].close(time.monotonic() + CALM_S)).start()
    for thread in threads:
        thread.join(seconds + CALM_S)
    stop.set()
    operator.join(CALM_S)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in (*threads, operator))


def check_end(machine: Machine) -> None:
    """R8: nothing is taken, all pages are accounted for, and no row was wrong."""
    store, pool = machine.store, machine.rank.pool
    assert store.flush(deadline_s=CALM_S)
    end = time.monotonic() + CALM_S
    while any(store.stats().gauges.values()) and time.monotonic() < end:
        threading.Event().wait(0.005)  # pins have a time to live
    assert not any(store.stats().gauges.values()), store.stats().gauges
    pool.check_books()
    gauges = pool.gauges()
    assert (gauges.held, gauges.pinned, gauges.entitled) == (0, 0, 0)
    for tier in machine.tiers:
        stats = tier.stats()
        assert (stats["leases"], stats["operations"], stats["handoffs"], stats["faults"]) == (0, 0, 0, 0)
    assert store.close().drained
    assert machine.wrong == []
    assert machine.lane.close(CALM_S)


@pytest.mark.parametrize("kill", [False, True])
def test_r8_everything_at_once_ends_with_nothing_taken(*, kill: bool) -> None:
    """R8, R3, E3, C1, A6: engines cancel, time out and hand off, an operator interferes, a tier may die."""
    machine = Machine()
    run_for(machine, 2.0, kill=kill)
    check_end(machine)
    assert machine.store.stats().hit_tokens["device"] > 0


@pytest.mark.slow
def test_r8_everything_at_once_for_two_minutes() -> None:
    """R8: the same, longer."""
    machine = Machine()
    run_for(machine, 120.0, kill=True)
    check_end(machine)


def open_all(s: Setup) -> None:
    """Let every verb of every tier through."""
    for tier in s.tiers:
        for verb in ("lookup", "load", "save"):
            tier.open(verb)


async def one_request(s: Setup, rng: np.random.Generator) -> None:
    """From resolve to retire, at times of its own."""
    await asyncio.sleep(float(rng.random()))
    tokens = prompt(int(rng.integers(1, 7)), seed=int(rng.integers(5)))
    prefix = await s.resolve(tokens, deadline_s=float(rng.random()) * 4)
    req = admit(
        s.pool,
        prompt_tokens=tokens,
        max_new_tokens=1,
        keyer=s.store.keyer,
        scope=SCOPE,
        prefix=prefix,
    )
    if not isinstance(req, RequestKv):
        prefix.release()
        return
    req.apply_prefill(req.schedule_prefill(len(tokens)), 5)
    await asyncio.sleep(float(rng.random()))
    s.store.retire(req)


def played(seed: int) -> tuple[list[Any], dict[str, int]]:
    """A seeded mix of verbs on virtual time; what tiers were asked, and the counters."""
    s = Setup(pages=24, tiers=2, tp=2, save_budget=0.25, secret=FleetSecret(bytes(range(32))))
    rng = np.random.default_rng(seed)

    async def interfere() -> None:
        for step in range(60):
            await asyncio.sleep(0.05)
            tier, verb = s.tiers[int(rng.integers(2))], ("lookup", "load", "save")[int(rng.integers(3))]
            tier.open(verb)
            if rng.random() < 0.6:
                tier.holding.add(verb)
            if step % 20 == 19:
                await s.store.areset(deadline_s=0.1)
        open_all(s)

    async def scenario() -> None:
        await asyncio.gather(interfere(), *(one_request(s, rng) for _ in range(60)))
        open_all(s)
        assert await s.store.flush_saves()
        assert await s.store.flush_loads()

    s.loop.run(scenario())
    s.check_idle()
    trace, counters = [tier.asked for tier in s.tiers], s.store.stats().counters
    assert s.loop.run(s.store.aclose()).drained
    s.loop.close()
    return trace, counters


@pytest.mark.parametrize("seed", range(5))
def test_the_same_choices_give_the_same_calls(seed: int) -> None:
    """Design: no hidden thread, clock or order: a run on virtual time is repeated by its seed."""
    assert played(seed) == played(seed)
