"""The engine over a store with a DRAM tier: hits, restores, waiting for slow tiers, and letting go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import PAGE, assembled, prompt
from tiny_models import CONFIGS, declare, tiny

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Scope
from kvcontract.engine.build import Assembly, assemble
from kvcontract.engine.checkpoint import random_checkpoint
from kvcontract.engine.request import Finish, Result
from kvcontract.pool.chunk import FULL
from kvcontract.store.policy import ResolvePolicy


def run_one(parts: Assembly, tokens: list[int], **options: Any) -> Result:
    """One request alone."""
    request = parts.engine.submit(tokens, 5, capture_logits="all", **options)
    return parts.engine.run()[request]


def same_tail(warm: Result, cold: Result) -> bool:
    """Whether the rows that both computed have equal bits."""
    assert warm.logits is not None
    assert cold.logits is not None
    return warm.tokens == cold.tokens and torch.equal(warm.logits, cold.logits[warm.hit_tokens :])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_hit_and_a_restore_equal_the_cold_run(name: str, dtype: str) -> None:
    """After a device hit and after a DRAM restore, at the same split, not one bit differs (golden gate b)."""
    with assembled(tiny(name, dtype=dtype)) as (parts, _):
        tokens = prompt(70, 1)
        cold = run_one(parts, tokens)
        assert (cold.hit_tokens, dict(cold.sources)) == (0, {})
        resident = run_one(parts, tokens)
        assert (resident.hit_tokens, dict(resident.sources)) == (64, {"device": 64})
        assert same_tail(resident, cold)
        assert parts.store is not None
        assert parts.store.flush()
        for seed in range(2, 9):
            run_one(parts, prompt(100, seed))
        restored = run_one(parts, tokens)
        assert (restored.hit_tokens, dict(restored.sources)) == (64, {"dram": 64})
        assert same_tail(restored, cold)


def test_e5_nothing_writes_over_restored_rows() -> None:
    """E5: pages that come back hold to the end of their request what was saved, bit for bit."""
    with assembled(tiny("qwen3")) as (parts, _):
        assert parts.store is not None
        tokens, views = prompt(70, 1), parts.bindings[FULL].views
        keys = parts.store.keyer.chain(tokens[:64], Scope())

        def rows() -> dict[tuple[str, str], torch.Tensor]:
            with parts.pool.match(keys) as hold:
                assert len(hold.pages) == 4
                return {name: view[hold.pages.tolist()].clone() for name, view in views.items()}

        run_one(parts, tokens)
        saved = rows()
        assert parts.store.flush()
        parts.store.set_retention(False)  # every page is wiped of its name, and issued as a fresh one
        parts.store.set_retention(True)
        restored = run_one(parts, tokens)
        assert dict(restored.sources) == {"dram": 64}
        for name, found in rows().items():
            assert torch.equal(found, saved[name]), name


def test_what_was_sampled_is_a_prefix_of_the_next_turn() -> None:
    """Pages completed while decoding are sealed too: the next turn starts after them."""
    with assembled(tiny("qwen3")) as (parts, _):
        tokens = prompt(30, 1)
        first = parts.engine.submit(tokens, 20)
        answer = parts.engine.run()[first].tokens
        turn = run_one(parts, [*tokens, *answer, *prompt(9, 2)])
        # 30 + 20 tokens, of which the last has no keys and values yet.
        assert turn.hit_tokens == 48


def test_d2_scopes_never_meet() -> None:
    """Equal prompts in other scopes compute everything (D2)."""
    with assembled(tiny("qwen3")) as (parts, _):
        tokens = prompt(40, 1)
        run_one(parts, tokens, scope=Scope(salt="a"))
        assert run_one(parts, tokens).hit_tokens == 0
        assert run_one(parts, tokens, scope=Scope(salt="")).hit_tokens == 0
        assert run_one(parts, tokens, scope=Scope(salt="a")).hit_tokens == 32


def test_a25_a_resolving_request_blocks_nobody() -> None:
    """A request that waits for a tier occupies no queue: one behind it starts and ends first (A25)."""
    with assembled(tiny("qwen3"), gate=True) as (parts, tier):
        engine = parts.engine
        tier.shut = True
        slow = engine.submit(prompt(40, 1), 3)
        quick = engine.submit(prompt(10, 2), 3)  # one page: no tier is asked
        results: dict[int, Result] = {}
        while quick not in results:
            engine.step()
            results |= engine.take_results()
        assert slow not in results
        assert engine.gauges()["resolving"] == 1
        tier.open()
        assert engine.run()[slow].finish is Finish.LENGTH


def test_a11_cancel_while_resolving_ends_promptly() -> None:
    """A cancelled resolve gives an empty result at once, and nothing stays taken (A11)."""
    with assembled(tiny("qwen3"), gate=True) as (parts, tier):
        tier.shut = True
        request = parts.engine.submit(prompt(40, 1), 3)
        parts.engine.cancel(request)
        assert parts.engine.run()[request].finish is Finish.CANCELLED
        tier.open()


def test_close_ends_what_is_resolving() -> None:
    """Closing the engine cancels resolves: every request has its result, every page comes back."""
    with assembled(tiny("qwen3"), gate=True) as (parts, tier):
        tier.shut = True
        request = parts.engine.submit(prompt(40, 1), 3)
        parts.engine.close()
        assert parts.engine.take_results()[request].finish is Finish.CANCELLED
        tier.open()


def test_a_prefix_that_leaves_nothing_to_compute_is_refused() -> None:
    """A policy for the decode side's full hits has no place here: refused with a reason, pages given back."""
    with assembled(tiny("qwen3")) as (parts, _):
        tokens = prompt(32, 1)
        run_one(parts, tokens)
        result = run_one(parts, tokens, policy=ResolvePolicy(full_pages=True))
        assert result.finish is Finish.REFUSED
        assert "leave a token to compute" in result.reason


def test_b8_waiting_holds_do_not_lock_each_other_out() -> None:
    """Two waiting requests whose prefixes leave room for neither: one lets go, both end (B8)."""
    with assembled(tiny("qwen3"), pages=31) as (parts, _):
        engine = parts.engine
        for seed in (1, 2):
            run_one(parts, prompt(12 * PAGE, seed))
        # 11 or 12 pages each are held, and each needs 24 in all: 30 - 24 leaves 6.
        ids = [
            engine.submit(prompt(12 * PAGE, seed) + prompt(9 * PAGE, seed + 5), 3 * PAGE) for seed in (1, 2)
        ]
        while engine.gauges()["resolving"]:
            parts.pool.gauges()
        results = engine.run()
        assert [results[request].finish for request in ids] == [Finish.LENGTH] * 2


def test_keys_and_values_lie_in_one_slab_alone() -> None:
    """All layers share one page-first allocation, and the executor keeps no cache of its own."""
    with assembled(tiny("qwen3")) as (parts, _):
        (binding,) = parts.bindings.values()
        assert len({arena.storage.data_ptr() for arena in binding.arenas.values()}) == 1
        run_one(parts, prompt(40, 1))
        held = [item for item in vars(parts.executor).values() if "Cache" in type(item).__name__]
        assert held == []


def test_assemble_from_a_checkpoint_folder(tmp_path: Path) -> None:
    """Weights, end-of-sequence ids and limits come from the folder; the parts close together."""
    folder = random_checkpoint(CONFIGS["qwen3"], tmp_path / "checkpoint", seed=3)
    kv, layers = declare("qwen3", dtype="float32", page_tokens=PAGE)
    with assemble(kv, layers, checkpoint=folder, pages=12) as parts:
        first = parts.engine.submit(prompt(20, 1), 5)
        tokens = parts.engine.run()[first].tokens
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{tokens[1]}]}}')
    with assemble(kv, layers, checkpoint=folder, pages=12, prefix_cache=False) as parts:
        again = parts.engine.submit(prompt(20, 1), 5)
        assert parts.engine.run()[again].finish is Finish.STOP
        assert parts.store is None
    with pytest.raises(UsageFault, match="needs weights"):
        assemble(kv, layers, pages=12)
    with pytest.raises(UsageFault, match="never be asked"):
        assemble(kv, layers, checkpoint=folder, pages=12, tiers=[object()], prefix_cache=False)  # type: ignore[list-item] # refused before it is looked at
