"""What a caller may ask for, and what is refused or cancelled (A11, A20, A21, A23, A24, media)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from bench_store import PAGE, SCOPE, Setup, prompt, setup

from kvcontract import KvStore, Scope, admit
from kvcontract.contract.errors import UsageFault
from kvcontract.pool.media import MediaItem
from kvcontract.pool.request import RequestKv
from kvcontract.store.cost import MIN_MEASURED_BYTES, CostFigures
from kvcontract.store.policy import CancelToken, KvPrefix, ResolvePolicy

TOKENS = prompt(4)


async def rounds(number: int = 30) -> None:
    """Let everybody go on as far as they can."""
    for _ in range(number):
        await asyncio.sleep(0)


# A11


@pytest.mark.parametrize("stage", ["before", "lookup", "load", "room", "producer", "gate"])
def test_a11_a_token_ends_a_resolve_with_an_empty_prefix(stage: str) -> None:
    """A11: seen before, between and during waits; promptly; copies settle in the background."""
    with setup(pages=9) as s:
        s.stored(TOKENS)
        s.store.retire(s.compute(TOKENS[: PAGE + 1]))
        busy = s.admit(prompt(5, seed=1)) if stage in {"room", "gate"} else None
        s.tier.holding.add(stage)
        token, tokens = CancelToken(), prompt(4, seed=7) if stage == "producer" else TOKENS

        async def scenario() -> KvPrefix:
            reset = asyncio.ensure_future(s.store.areset()) if stage == "gate" else None
            await rounds()
            if stage == "before":
                token.cancel()
            policy = ResolvePolicy(full_hit=True)
            task = asyncio.ensure_future(s.store.resolve_prefix("0", tokens, SCOPE, policy, cancel=token))
            await asyncio.sleep(1.0)
            token.cancel()
            prefix = await asyncio.wait_for(task, 0.001)
            if busy is not None:
                busy.release()
            if reset is not None:
                await reset
            return prefix

        prefix = s.loop.run(scenario())
        assert (prefix.hit_tokens, prefix.hold, prefix.degraded) == (0, None, ("cancelled",))
        assert s.store.stats().counters["resolves_cancelled"] == 1
        assert s.store.stats().degraded["cancelled"] == 1
        for verb in ("lookup", "load"):
            s.tier.open(verb)
        s.check_idle()
        assert token._callbacks == {}


@pytest.mark.paged
def test_a11_a_token_from_another_thread_ends_a_blocking_resolve() -> None:
    """A11: the façade's caller is released promptly."""
    from test_store import threaded  # noqa: PLC0415

    with threaded() as (store, _, tier):
        tier.holding.add("lookup")
        token, asked = CancelToken(), threading.Event()
        lookup = tier.lookup
        tier.lookup = lambda *args: (lookup(*args), asked.set())[0]

        def cancel() -> None:
            assert asked.wait(30.0)
            token.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        prefix = store.resolve("0", TOKENS, SCOPE, cancel=token)
        thread.join()
        assert prefix.degraded == ("cancelled",)
        tier.open("lookup")


def test_a11_one_token_may_serve_many() -> None:
    """A11: all resolves of a request group end together."""
    with setup() as s:
        s.tier.holding.add("lookup")
        token = CancelToken()

        async def scenario() -> list[KvPrefix]:
            work = [
                s.store.resolve_prefix("0", prompt(3, seed=seed), SCOPE, cancel=token) for seed in range(5)
            ]
            tasks = [asyncio.ensure_future(item) for item in work]
            await rounds()
            token.cancel()
            return await asyncio.gather(*tasks)

        assert [prefix.hit_tokens for prefix in s.loop.run(scenario())] == [0] * 5
        assert s.loop.time() == 0.0
        s.tier.open("lookup")


# A23, A24, D5


def test_a23_outputs_of_every_position_are_computed() -> None:
    """A23: such a request is never resolved and gets no credit, though everything is there."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        asked = s.tier.count("lookup")
        prefix = s.loop.run(s.resolve(TOKENS, per_position=True))
        assert (prefix.hit_tokens, prefix.hold, s.tier.count("lookup")) == (0, None, asked)
        assert prefix.degraded == ("outputs of every position are wanted",)
        assert s.store.stats().hit_tokens == {"computed": len(TOKENS)}


def test_a24_what_cannot_be_restored_here_is_refused_with_the_reasons() -> None:
    """A24: a full hit without tiers, without a prefix cache, or for outputs that need computing."""
    full = ResolvePolicy(full_hit=True, per_position=True)
    with setup(tiers=0) as s:
        s.store.set_prefix_cache(False)
        with pytest.raises(UsageFault, match=r"every position.*no tier.*caching is off"):
            s.loop.run(s.store.resolve_prefix("0", TOKENS, SCOPE, full))
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0


def test_d5_bad_token_ids_are_refused_by_position() -> None:
    """D5: before anything is looked up."""
    with setup() as s:
        with pytest.raises(UsageFault, match="-1 at position 2"):
            s.loop.run(s.store.resolve_prefix("0", [1, 2, -1], SCOPE))
        assert s.tier.asked == []


def test_options_are_checked_by_name_and_range() -> None:
    """I3: all that is wrong with the options is told at once."""
    with setup() as s:
        for wrong, text in (
            (
                {"save_budget": 2.0, "max_tp": 0},
                "save_budget 2.0: expected 0 to 1; max_tp 0: expected at least 1",
            ),
            ({"save_budgte": 0.5}, "no such option: save_budgte; options are max_tp"),
        ):
            with pytest.raises(UsageFault, match=text):
                KvStore(s.model, [], loop=s.loop, **wrong)
        with pytest.raises(UsageFault, match=r"prefill_tokens_per_s is 0.*tier_setup_s\['dram'\] is -1"):
            CostFigures(prefill_tokens_per_s=0, tier_setup_s={"dram": -1})


# A21


def figures(prefill: float, dram: float, setup_s: float = 0.0) -> CostFigures:
    """Tokens a second, bytes a second."""
    return CostFigures(prefill, {"dram": dram}, {"dram": setup_s})


def test_a21_a_tier_that_is_slower_than_recomputing_is_not_restored_from() -> None:
    """A21: judged by given figures; said in the prefix and counted; a handoff restores all the same."""
    with setup(cost=figures(prefill=1000.0, dram=10.0)) as s:
        s.stored(TOKENS)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert (prefix.hit_tokens, prefix.degraded) == (0, ("dram: recomputing is faster",))
        assert s.store.stats().counters["restores_not_worth_dram"] == 1
        assert (s.tier.count("load"), s.tier.stats()["leases"]) == (0, 0)
        prefix = s.loop.run(s.resolve(TOKENS, full_hit=True))
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


def test_a21_a_hit_too_small_for_its_transfer_is_not_restored() -> None:
    """A21: the setup time is worth it for four pages, not for one."""
    with setup(cost=figures(prefill=1000.0, dram=1e9, setup_s=0.006)) as s:
        s.stored(TOKENS)
        assert s.loop.run(s.resolve(TOKENS[: PAGE + 1])).hit_tokens == 0  # 4 ms to compute
        prefix = s.loop.run(s.resolve(TOKENS))  # 16 ms
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


def test_a21_the_next_tier_may_be_worth_it() -> None:
    """A21: each tier is judged by its own figures."""
    cost = CostFigures(1000.0, {"dram": 10.0, "disk": 1e9})
    with setup(tiers=2, cost=cost) as s:
        s.stored(TOKENS)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert dict(prefix.sources) == {"disk": 4 * PAGE}
        prefix.release()


def test_a21_what_is_not_given_is_measured() -> None:
    """A21: off until enough was measured; then speeds of tier and executor decide."""
    with setup(cost=CostFigures()) as s:
        s.stored(TOKENS)
        s.store.computed(1000, 1.0)
        assert s.store._core.cost.prefill_tokens_per_s == 1000.0
        assert s.store._core.cost.worth("dram", 16, 1000)
        s.store._core.tally.moved("dram", "load", 1, MIN_MEASURED_BYTES, MIN_MEASURED_BYTES / 100)  # 100 B/s
        assert not s.store._core.cost.worth("dram", 16, 1000)
        assert s.loop.run(s.resolve(TOKENS)).hit_tokens == 0


def test_a21_without_figures_everything_is_restored() -> None:
    """A21: the model is off unless asked for, whatever was measured."""
    with setup() as s:
        s.stored(TOKENS)
        s.store.computed(10**9, 1.0)
        prefix = s.loop.run(s.resolve(TOKENS))
        assert prefix.hit_tokens == 4 * PAGE
        prefix.release()


# Media


def with_image(s: Setup, media: list[MediaItem], tokens: list[int]) -> RequestKv:
    """A request with items, its pages registered; rows are not written."""
    req = admit(
        s.pool,
        prompt_tokens=tokens,
        max_new_tokens=1,
        keyer=s.store.keyer,
        scope=SCOPE,
        media=media,
    )
    assert isinstance(req, RequestKv)
    req.apply_prefill(req.schedule_prefill(len(tokens)), 5)
    return req


@pytest.mark.paged
def test_media_are_part_of_the_name_and_are_not_cut() -> None:
    """D1, design: other images are other pages, and no hit ends inside an uncut one."""
    tokens = prompt(5)
    cat, dog = (MediaItem(digest=bytes([n]) * 16, start=PAGE + 1, tokens=PAGE) for n in (1, 2))
    with setup() as s:
        s.store.retire(with_image(s, [cat], tokens))

        def hit(media: list[MediaItem], length: int = len(tokens)) -> int:
            prefix = s.loop.run(s.store.resolve_prefix("0", tokens[:length], SCOPE, media=media))
            prefix.release()
            return prefix.hit_tokens // PAGE

        assert (hit([cat]), hit([dog]), hit([])) == (5, 1, 1)
        # Pages 1 and 2 hold the image: a prompt that ends right after page 1's end may hit page 0 only.
        assert hit([cat], 2 * PAGE + 2) == 1
        s.pool.clear()
        assert hit([cat]) == 5
        assert s.store.probe(tokens, SCOPE, media=[cat]) == {"0": 5 * PAGE}
        assert s.store.probe(tokens, SCOPE, media=[dog]) == {"0": PAGE}


@pytest.mark.paged
def test_a_hit_that_would_end_inside_an_item_is_cut_to_its_start() -> None:
    """Design: the tier has the first half of an image only: the hit ends before it, surplus pages go back."""
    tokens, item = prompt(4), MediaItem(digest=b"x" * 16, start=PAGE, tokens=2 * PAGE)
    with setup() as s:
        s.store.retire(with_image(s, [item], tokens))
        s.pool.clear()

        def first_two(lease: Any) -> Any:
            lease.present[2:] = False
            return lease

        s.tier.answer = first_two
        prefix = s.loop.run(s.store.resolve_prefix("0", tokens, SCOPE, media=[item]))
        assert (prefix.hit_tokens, s.pool.held) == (PAGE, 1)
        prefix.release()


def test_numpy_and_lists_name_the_same_pages() -> None:
    """D1: however the tokens come."""
    with setup() as s:
        s.store.retire(s.compute(TOKENS))
        for tokens in (TOKENS, np.array(TOKENS, np.int32), np.array(TOKENS, np.uint16), tuple(TOKENS)):
            prefix = s.loop.run(s.store.resolve_prefix("0", tokens, SCOPE))
            assert prefix.hit_tokens == 4 * PAGE
            prefix.release()
        assert s.loop.run(s.store.resolve_prefix("0", TOKENS, Scope())).hit_tokens == 0
