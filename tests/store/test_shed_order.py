"""What is saved later than it was asked for still waits for what writes it; a tier that hangs is given up."""

from __future__ import annotations

import pytest
from bench_store import PAGE, Setup, prompt, setup

from kvcontract.pool.request import Chunk, RequestKv
from kvcontract.store.core import StoreOptions
from kvcontract.store.tier_policy import TierPolicy

TOKENS = prompt(6)


def issued(s: Setup, tokens: list[int]) -> tuple[RequestKv, list[Chunk]]:
    """A request whose steps are issued: the device has written nothing of them yet."""
    req, chunks = s.admit(tokens), []
    while req.prefilling:
        chunks.append(req.schedule_prefill(len(tokens)))
        req.apply_prefill(chunks[-1], 5 if chunks[-1].emits else None)
    return req, chunks


@pytest.mark.parametrize("budget", [0.1, 0.02])
def test_c2_what_was_shed_waits_for_the_step_that_writes_it(budget: float) -> None:
    """C2, C5: pins come back, and it is saved then, after its event and not before."""
    other = prompt(6, seed=1)
    with setup(pages=40, save_budget=budget) as s:
        s.tier.holding.add("save")
        s.store.retire(s.compute(other))
        req, chunks = issued(s, TOKENS)
        done = []

        def written() -> None:
            if not done:
                done.append(True)
                for chunk in chunks:
                    s.write(TOKENS, chunk)

        s.store.retire(req, after=written)
        s.tier.open("save")
        s.evict()
        prefix = s.loop.run(s.resolve(TOKENS))
        assert done or not prefix.hit_tokens
        if prefix.hold is not None:
            s.check_content(TOKENS, prefix)
        prefix.release()


def test_c2_what_was_never_written_is_not_saved_by_another_try() -> None:
    """C2, C4: its event failed; the further try that a retire asks for asks it again."""
    with setup(pages=40) as s:
        req, _ = issued(s, TOKENS)

        def failed() -> None:
            raise RuntimeError("the step failed")

        def while_retired() -> None:
            if not req.released:
                s.store.retire(req, after=failed)
            failed()

        s.store.seal(req, after=while_retired)
        s.evict()
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0


@pytest.mark.parametrize("pages", [6, 12])
def test_a20_a_tier_that_hangs_has_its_time_once(pages: int) -> None:
    """A20: however many boundaries there are where it has the state."""
    tokens = prompt(pages)
    with setup(pages=64, options=StoreOptions(tiers={"dram": TierPolicy(load_deadline_s=0.5)})) as s:
        s.stored(tokens)
        s.tier.holding.add("load")
        begun = s.loop.time()
        prefix = s.loop.run(s.resolve(tokens, deadline_s=15.0))
        assert s.loop.time() - begun <= 3 * 0.5
        assert prefix.hit_tokens <= pages * PAGE
        prefix.release()
        s.tier.open("load")


def test_r5_a_state_that_cannot_be_loaded_is_asked_for_once_a_boundary() -> None:
    """R5: a resolve does not take its own loads for somebody else's, and ask again behind them."""
    with setup() as s:
        s.stored(TOKENS)
        spaces = 1 + len(list(s.pool.sides))
        s.tier.codes["load"] = lambda codes: codes + 6
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0
        assert s.tier.count("load") <= 6 * spaces
