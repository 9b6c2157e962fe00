"""A store over tiers that break the rules: shorter hits and unsaved pages, nothing stuck, nothing raised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcontract import (
    Arena,
    BlockPool,
    Field,
    Group,
    KvModel,
    KvStore,
    Rank,
    RequestKv,
    Scope,
    WeightIdentity,
    admit,
)
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout
from kvcontract.core.pending import Pending
from kvcontract.memory.binding import Binding
from kvcontract.store.policy import ResolvePolicy
from kvcontract.tiers.dram import DramTier

PAGE = 4
MODEL = KvModel(
    contract=1,
    name="wild",
    weights=WeightIdentity(kind="unresolved"),
    numerics="float16",
    page_tokens=PAGE,
    groups=(Group(name="kv"),),
    arenas=(Arena.planes(name="a", group="kv", fields=(Field(name="k", dtype="float16", axes={"dim": 8}),)),),
)
PROMPT = list(range(13))


class Wild:
    """A DRAM tier of which one verb does something else; it lends only if that is a verb of lending."""

    def __init__(self, tier: DramTier, verb: str, act: Any) -> None:
        self._tier, self._verb, self._act = tier, verb, act

    def __getattr__(self, name: str) -> Any:
        if name in _LENDING and self._verb not in _LENDING:
            raise AttributeError(name)
        return self._act if name == self._verb else getattr(self._tier, name)


_LENDING = ("reserve", "borrow")


def serve(store: KvStore, pool: BlockPool, binding: Binding) -> tuple[int, Any]:
    """One request from resolve to retire; its hit and what became of the saves."""
    prefix = store.resolve("0", PROMPT, policy=ResolvePolicy(deadline_s=5.0))
    req = admit(pool, prompt_tokens=PROMPT, max_new_tokens=2, keyer=store.keyer, scope=Scope(), prefix=prefix)
    assert isinstance(req, RequestKv)
    chunk = req.schedule_prefill(32)
    for view in binding.views.values():
        view[torch.tensor(chunk.pages["full"])] = 1.0
    req.apply_prefill(chunk, 1)
    return prefix.hit_tokens, store.retire(req).wait(5.0)


def boom(*_: Any, **__: Any) -> Any:
    """Fail."""
    raise OSError("gone")


def quits(*_: Any, **__: Any) -> Any:
    """Try to end the process."""
    raise SystemExit(1)


def invented(keys: Any, *_: Any, **__: Any) -> Any:
    """A code that does not exist, for every record."""
    return Pending.of(np.full(len(keys), 200, np.uint8))


@pytest.mark.parametrize("verb", ["save", "reserve"])
@pytest.mark.parametrize("act", [boom, quits, invented, lambda *_, **__: None])
def test_r8_a_save_always_settles(verb: str, act: Any) -> None:
    """Whatever a tier answers, the report comes, pins are back, the barrier ends, the store drains."""
    pool = BlockPool(9, PAGE)
    binding = Binding.allocate(layout(MODEL).space("full"), 9)
    tier = Wild(DramTier(1 << 20), verb, act)
    store = KvStore(MODEL, [Rank(pool, {"full": binding})], [tier], save_budget=1.0)
    _, report = serve(store, pool, binding)
    assert (report.saved, report.failed) == (0, {"failed": 3})
    assert store.flush() is True
    assert pool.pinned_blocks == 0
    assert store.close(5.0).drained
    pool.check_books()


@pytest.mark.parametrize("verb", ["lookup", "load", "borrow"])
@pytest.mark.parametrize("act", [boom, quits, lambda *_, **__: None, lambda *_, **__: Pending.of(None)])
def test_r4_a_failing_look_up_or_load_is_a_shorter_hit(verb: str, act: Any) -> None:
    """The prompt is computed; no lease, reservation or hold stays out."""
    pool = BlockPool(9, PAGE)
    binding = Binding.allocate(layout(MODEL).space("full"), 9)
    dram = DramTier(1 << 20)
    store = KvStore(MODEL, [Rank(pool, {"full": binding})], [Wild(dram, verb, act)])
    serve(store, pool, binding)
    assert store.flush() is True
    pool.set_retention(False)
    pool.set_retention(True)
    hit, _ = serve(store, pool, binding)
    assert hit == 0
    assert store.close(5.0).drained
    assert dram.stats()["leases"] == 0
    assert (pool.held, pool.entitled) == (0, 0)


@pytest.mark.parametrize(("verb", "act"), [("flush", boom), ("flush", lambda *_: None), ("close", boom)])
def test_c10_barriers_and_close_never_raise(verb: str, act: Any) -> None:
    """A tier that cannot flush is not flushed; one that cannot close is told in the report."""
    pool = BlockPool(9, PAGE)
    binding = Binding.allocate(layout(MODEL).space("full"), 9)
    store = KvStore(MODEL, [Rank(pool, {"full": binding})], [Wild(DramTier(1 << 20), verb, act)])
    serve(store, pool, binding)
    assert store.flush() is (verb != "flush")
    report = store.close(5.0)
    assert report.tiers == (("dram",) if verb == "close" else ())


def test_c6_retire_with_a_step_outstanding_gives_everything_back() -> None:
    """The step is reverted and the request released; what was complete is still found."""
    pool = BlockPool(9, PAGE)
    binding = Binding.allocate(layout(MODEL).space("full"), 9)
    with KvStore(MODEL, [Rank(pool, {"full": binding})]) as store:
        req = admit(pool, prompt_tokens=PROMPT, max_new_tokens=2, keyer=store.keyer, scope=Scope())
        assert isinstance(req, RequestKv)
        req.apply_prefill(req.schedule_prefill(8), None)
        req.schedule_prefill(8)
        store.retire(req)
        assert req.released
        assert (pool.held, pool.entitled, pool.cached) == (0, 0, 2)


@pytest.mark.parametrize("deadline", [float("nan"), -1.0, None, "5"])
def test_a_deadline_that_is_none_is_refused(deadline: Any) -> None:
    """Not silently a resolve that never asks a tier."""
    with pytest.raises(UsageFault, match="deadline_s"):
        ResolvePolicy(deadline_s=deadline)


def test_a_max_tp_below_one_is_refused() -> None:
    """A record cut for no worker cannot be."""
    pool = BlockPool(9, PAGE)
    binding = Binding.allocate(layout(MODEL).space("full"), 9)
    with pytest.raises(UsageFault, match="max_tp 0"):
        KvStore(MODEL, [Rank(pool, {"full": binding})], max_tp=0)
