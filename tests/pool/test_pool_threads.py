"""One pool under several threads: promises are kept and the books stay true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from making import KEYER, Prefix, decode, prefill

from kvcontract.contract.model import Scope
from kvcontract.core.jit import warm_up
from kvcontract.pool import BlockPool, Content, Entitlement, EventLog, RequestKv, admit
from kvcontract.pool.events import replay

SECONDS = 1.5
CHAINS = np.random.default_rng(5).integers(1, 2**63, (6, 24, 2), np.uint64)
TOLD = Content(np.zeros(24 * 16, np.int64))
Turn = Callable[[BlockPool, np.random.Generator], None]


def request(pool: BlockPool, rng: np.random.Generator) -> None:
    """A request of random length over one of a few prompts: match, admit, draw, name, save, release."""
    keys = CHAINS[rng.integers(len(CHAINS))][: rng.integers(1, 25)].copy()
    with pool.match(keys[: rng.integers(0, len(keys) + 1)]) as hold:
        answer = pool.try_admit(len(keys) + 2, hold)
        if not isinstance(answer, Entitlement):
            return
    with answer:
        while answer.remaining_pages:
            pool.draw(answer, min(5, answer.remaining_pages))  # B11: never fails
            pool.register(answer, keys[answer.registered_pages : len(answer.pages)], TOLD)
        if rng.integers(4) == 0:
            pool.mark_reset(answer, int(rng.integers(0, len(keys))))
        saved = answer.pages[rng.integers(0, 5) : len(keys)].copy()
        pool.pin(saved)
        branch = pool.fork(answer, answer.lifetime_pages, shared_pages=len(keys) - 1, copied_pages=1)
    pool.unpin(saved)
    if isinstance(branch, Entitlement):
        with branch:
            pool.draw(branch, branch.remaining_pages)  # B11
            pool.copied(branch)


def restore(pool: BlockPool, rng: np.random.Generator) -> None:
    """A restore behind a hit, committed in time or late, or failed."""
    keys = CHAINS[rng.integers(len(CHAINS))].copy()
    with pool.match(keys[: rng.integers(0, 20)]) as base:
        start, count = base.hit_pages, int(rng.integers(1, 5))
        staged = pool.reserve(count)
        if staged is None:
            return
        with staged:
            fate = rng.integers(3)
            names = keys[start : start + count]
            if fate == 0:
                pool.commit(staged, names, int(rng.integers(0, count + 1)), base=base, content=TOLD).release()
            elif fate == 1:
                parent = base.keys[-1] if start else None
                base.release()
                pool.commit_late(staged, names, count, parent=parent, content=TOLD)


def probe(pool: BlockPool, rng: np.random.Generator) -> None:
    """Probes take what they can get, several at once, and keep it for a moment (B5)."""
    holds = [pool.match(CHAINS[rng.integers(len(CHAINS))].copy()) for _ in range(rng.integers(1, 5))]
    assert pool.rooms_without(holds)[0] >= 0
    for hold in holds:
        if rng.integers(2):
            hold.trim(int(rng.integers(0, hold.hit_pages + 1)))
        hold.release()


def hammer(pool: BlockPool, turns: tuple[Turn, ...], seconds: float, *, threads: int = 4) -> None:
    """Random turns side by side; what any of them raises is raised here."""
    warm_up()
    end = time.monotonic() + seconds
    failures: list[BaseException] = []
    done = [0] * threads

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            while time.monotonic() < end and not failures:
                turns[rng.integers(len(turns))](pool, rng)
                done[number] += 1
                if done[number] % 50 == 0:
                    pool.check_books()
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    assert min(done) > 0
    pool.check_books()
    gauges = pool.gauges()
    assert (gauges.held, gauges.entitled, gauges.pinned) == (0, 0, 0)
    assert (gauges.requests, gauges.holds, gauges.reservations) == (0, 0, 0)


def test_b11_threads_hammering_one_pool_break_no_promise() -> None:
    """Requests, branches, restores, probes and audits side by side: no draw fails, all comes back."""
    log = EventLog()
    pool = BlockPool(65, 16, events=log)
    hammer(pool, (request, request, restore, probe), SECONDS)
    resident = {key.tobytes() for key in pool._books.index.keys[pool._books.state == 3]}
    assert set(replay(log.take())) == resident  # I7


def admitted_against_probes(pool: BlockPool, rng: np.random.Generator) -> None:
    """A request that draws all of its promise, page by page, while others probe what is cached."""
    keys = CHAINS[rng.integers(len(CHAINS))]
    answer = pool.try_admit(len(keys))
    if isinstance(answer, Entitlement):
        with answer:
            for _ in range(len(keys)):
                pool.draw(answer, 1)  # B11
            pool.register(answer, keys.copy())


@pytest.mark.parametrize(
    "seconds", [0.5, pytest.param(60.0, marks=pytest.mark.slow)], ids=["short", "a minute"]
)
def test_b5_probes_never_starve_an_admitted_draw(seconds: float) -> None:
    """Four threads, half of them probing all that is cached: every admitted draw has its page."""
    pool = BlockPool(61, 16)
    hammer(pool, (admitted_against_probes, probe), seconds)


def whole_request(pool: BlockPool, rng: np.random.Generator) -> None:
    """A request from prompt to end: hits, speculation, preemption, branches."""
    tokens = rng.integers(0, 2, rng.integers(1, 30))
    keys = KEYER.chain(tokens[:-1], Scope())
    with pool.match(keys) as hold:
        prefix = Prefix(hold, 4 * hold.hit_pages)
        answer = admit(
            pool, prompt_tokens=tokens, max_new_tokens=9, keyer=KEYER, scope=Scope(), prefix=prefix
        )
    if not isinstance(answer, RequestKv):
        return
    with answer as req:
        prefill(req, int(rng.integers(1, 9)))
        chunk = req.schedule_speculative(rng.integers(0, 2, 6))
        drafts = chunk.token_ids[1 : 1 + rng.integers(0, chunk.drafts + 1)].tolist()
        req.apply_speculative(chunk, [*drafts, 1])
        if not req.finished and rng.integers(2):
            branch = req.fork(0)
            if isinstance(branch, RequestKv):
                with branch:
                    decode(branch, 3)
        if not req.finished and rng.integers(2):
            req.preempt()
            if req.resume() is not None:
                return
            prefill(req)
        decode(req)


def test_b20_and_b23_whole_requests_side_by_side() -> None:
    """Requests that hit, speculate, branch and are preempted on four threads leave nothing behind."""
    hammer(BlockPool(41, 4), (whole_request,), SECONDS)
