"""One pool under several threads: promises are kept and the books stay true."""

from __future__ import annotations

import threading
import time

import numpy as np

from kvcontract.core.jit import warm_up
from kvcontract.pool import BlockPool, Entitlement

SECONDS = 1.0
CHAINS = np.random.default_rng(5).integers(1, 2**63, (6, 24, 2), np.uint64)


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
            pool.register(answer, keys[answer.registered_pages : len(answer.pages)])
        saved = answer.pages[rng.integers(0, 5) : len(keys)].copy()
        pool.pin(saved)
    pool.unpin(saved)


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
                pool.commit(staged, names, int(rng.integers(0, count + 1)), base=base).release()
            elif fate == 1:
                parent = base.keys[-1] if start else None
                base.release()
                pool.commit_late(staged, names, count, parent=parent)


def test_b11_threads_hammering_one_pool_break_no_promise() -> None:
    """Requests, restores and audits side by side: no draw fails, the books hold, all comes back."""
    warm_up()
    pool = BlockPool(65, 16)
    end = time.monotonic() + SECONDS
    failures: list[BaseException] = []
    turns = [0] * 4

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            while time.monotonic() < end:
                (request, request, restore)[rng.integers(3)](pool, rng)
                turns[number] += 1
                if turns[number] % 50 == 0:
                    pool.check_books()
        except BaseException as failure:  # noqa: BLE001 - reported by the test
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(turns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert min(turns) > 0
    pool.check_books()
    gauges = pool.gauges()
    assert (gauges.held, gauges.entitled, gauges.pinned) == (0, 0, 0)
