"""Adapters: what they compute, that their pages never meet others', and how they come and go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import PAGE, TARGETS, WAIT_S, assembled, greedy, merged, prompt, until, write_adapter
from safetensors.torch import load_file, save_file
from test_own_arenas import LayerFirst
from tiny_models import Tiny, bind_poisoned, tiny

from kvcontract.contract.errors import InternalFault, UsageFault
from kvcontract.contract.executor import Step, TakesAdapters
from kvcontract.contract.model import Scope
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.engine.control import ControlReport
from kvcontract.engine.drafter import NgramDrafter
from kvcontract.engine.engine import Engine
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.request import Finish, Result

X, Y = Scope(lora="x"), Scope(lora="y")
NEW = 8


@pytest.fixture(scope="module")
def case() -> Tiny:
    """A small dense model."""
    return tiny("qwen3")


@pytest.fixture
def folders(case: Tiny, tmp_path: Path) -> dict[str, Path]:
    """Two adapters of other weights, and of other ranks."""
    return {
        "x": write_adapter(tmp_path / "x", case.model, 1),
        "y": write_adapter(tmp_path / "y", case.model, 2, rank=3, alpha=5.0),
    }


@pytest.fixture
def parts(case: Tiny, folders: dict[str, Path]) -> Iterator[Assembly]:
    """An engine with both adapters loaded."""
    with assembled(case) as (made, _):
        for name, folder in folders.items():
            assert load(made.engine, name, folder).done
        yield made


def load(engine: Engine, name: str, folder: Path, **more: Any) -> ControlReport:
    """Load, and wait for it."""
    return engine.load_adapter(name, folder, **more).wait(WAIT_S)


def run_one(parts: Assembly, tokens: list[int], scope: Scope | None = None, new: int = NEW) -> Result:
    """One request alone, to its full length."""
    request = parts.engine.submit(tokens, new, scope=scope, stop_token_ids=[], capture_logits=True)
    return parts.engine.run()[request]


def agrees(result: Result, model: Any, tokens: list[int]) -> bool:
    """Whether tokens and logits are those of an unmodified model."""
    expected, logits = greedy(model, tokens, len(result.tokens))
    assert result.logits is not None
    torch.testing.assert_close(result.logits, logits, rtol=0, atol=1e-4)
    return result.tokens == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|down)_proj"},
    ],
    ids=["plain", "rslora", "pattern"],
)
def test_d1_an_adapter_computes_what_merged_weights_compute(
    case: Tiny, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Tokens and fp32 logits equal those of a plain model whose weights are W + s B A, and not the base's."""
    folder, tokens = write_adapter(tmp_path / "x", case.model, 1, **config), prompt(40, 1)
    with assembled(case) as (parts, _):
        assert load(parts.engine, "x", folder).done
        base, adapted = run_one(parts, tokens), run_one(parts, tokens, X)
        assert agrees(base, case.model, tokens)
        assert agrees(adapted, merged(case.model, folder), tokens)
        assert base.tokens != adapted.tokens
        assert base.logits is not None
        assert adapted.logits is not None
        assert (base.logits[0] - adapted.logits[0]).abs().max() > 0.1


def test_d2_all_linear_and_one_layer_kind(case: Tiny, tmp_path: Path) -> None:
    """What is targeted decides which tensors must be there."""
    folder = write_adapter(tmp_path / "x", case.model, 1, target_modules="all-linear")
    executor = HfExecutor(case.model, case.layers, case.kv)
    with pytest.raises(
        UsageFault, match=r"missing tensors: model\.layers\.0\.mlp\.gate_proj\.lora_A.* and 4"
    ):
        executor.read_adapter(folder)
    weights = folder / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(weights).items() if ".q_proj." in n}, weights)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    assert sorted(executor.read_adapter(folder).pairs) == [
        f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)
    ]


def test_a_batch_mixes_adapters_and_the_base_stays_bit_equal(
    case: Tiny, parts: Assembly, folders: dict[str, Path]
) -> None:
    """In one step each request has its own adapter; one without gives the bits of an engine without any."""
    tokens = prompt(40, 1)
    with assembled(case) as (plain, _):
        alone = run_one(plain, tokens)
    scopes = [X, None, Y, X]
    ids = [
        parts.engine.submit(tokens, NEW, scope=scope, stop_token_ids=[], capture_logits=True)
        for scope in scopes
    ]
    results = parts.engine.run()
    for number, scope in zip(ids, scopes, strict=True):
        result = results[number]
        name = None if scope is None else scope.lora
        model = case.model if name is None else merged(case.model, folders[name])
        assert agrees(result, model, tokens)
        if name is None:
            assert result.logits is not None
            assert alone.logits is not None
            assert torch.equal(result.logits, alone.logits)


def test_d1_pages_never_cross_adapters_and_are_shared_within_one(parts: Assembly) -> None:
    """The same prompt hits only under the same adapter: on the device, and in the tier (D1, D2)."""
    tokens = prompt(50, 1)
    for scope in (None, X, Y):
        assert run_one(parts, tokens, scope).hit_tokens == 0
    for scope in (None, X, Y):
        assert run_one(parts, tokens, scope).sources == {"device": 48}
    assert parts.store is not None
    assert parts.store.flush()
    for seed in range(2, 9):
        run_one(parts, prompt(100, seed))
    for scope in (X, Y, None):
        assert run_one(parts, tokens, scope).sources == {"dram": 48}
    assert run_one(parts, tokens, Scope(lora="x", salt="tenant")).hit_tokens == 0


def test_d1_another_adapter_under_the_same_name_meets_no_old_pages(
    case: Tiny, parts: Assembly, folders: dict[str, Path]
) -> None:
    """Loaded again by name alone, nothing of before is found, and what comes out is the new adapter's."""
    tokens = prompt(50, 1)
    old = run_one(parts, tokens, X)
    first = parts.engine.adapters["x"]
    assert parts.engine.unload_adapter("x").wait(WAIT_S).done
    assert load(parts.engine, "x", folders["y"]).done
    assert parts.engine.adapters["x"] != first
    new = run_one(parts, tokens, X)
    assert (new.hit_tokens, new.tokens == old.tokens) == (0, False)
    assert agrees(new, merged(case.model, folders["y"]), tokens)
    assert run_one(parts, tokens, X).hit_tokens == 48


def test_d1_a_revision_names_its_content(parts: Assembly, folders: dict[str, Path]) -> None:
    """With a revision pages are found again after a reload; other weights under it are refused."""
    engine, tokens = parts.engine, prompt(50, 1)
    report = load(engine, "z", folders["x"], revision="1")
    assert (report.done, report.revision) == (True, "1")
    run_one(parts, tokens, Scope(lora="z"))
    assert engine.unload_adapter("z").wait(WAIT_S).revision == "1"
    report = load(engine, "z", folders["y"], revision="1")
    assert not report.done
    assert "pages of that may still be kept" in report.reason
    assert load(engine, "z", folders["x"], revision="1").done
    assert run_one(parts, tokens, Scope(lora="z", lora_revision="1")).hit_tokens == 48
    wrong = run_one(parts, tokens, Scope(lora="z", lora_revision="2"))
    assert (wrong.finish, wrong.reason) == (Finish.REFUSED, "adapter 'z' is loaded as '1', not '2'")


def test_d3_what_is_not_loaded_is_refused_with_the_nearest_names(parts: Assembly, case: Tiny) -> None:
    """Before anything is resolved for it; the branches of one prompt too."""
    result = run_one(parts, prompt(40, 1), Scope(lora="xx"))
    assert (result.finish, result.reason) == (Finish.REFUSED, "adapter 'xx' is not loaded; nearest: x")
    ids = parts.engine.submit_parallel(prompt(40, 1), NEW, 3, scope=Scope(lora="support"))
    results = parts.engine.take_results()
    assert {results[number].reason for number in ids} == {"adapter 'support' is not loaded; loaded: x, y"}
    result = run_one(parts, prompt(40, 1), Scope(lora_revision="1"))
    assert result.reason == "revision '1' of no adapter: name it in Scope.lora"
    assert parts.store is not None
    assert parts.store.stats().counters.get("resolves", 0) == 0
    with assemble(case.kv, LayerFirst(case), pages=12) as other:
        assert not isinstance(other.executor, TakesAdapters)
        assert run_one(other, prompt(40, 1), X).reason == "adapter 'x': this executor takes none"
        with pytest.raises(UsageFault, match="LayerFirst takes no adapters"):
            other.engine.load_adapter("x", "nowhere")
        with pytest.raises(UsageFault, match="LayerFirst takes no adapters"):
            other.engine.unload_adapter("x")


def test_c11_unload_waits_for_requests_and_refuses_those_behind(parts: Assembly) -> None:
    """What was submitted before it runs with the adapter to its end; what comes after it is refused."""
    engine = parts.engine
    before = engine.submit(prompt(40, 1), NEW, scope=X)
    pending = engine.unload_adapter("x")
    behind, other = engine.submit(prompt(40, 1), NEW, scope=X), engine.submit(prompt(40, 1), NEW, scope=Y)
    until(engine, lambda: engine.gauges()["active"])
    assert (pending.done, engine.gauges()["behind"]) == (False, 2)
    results = engine.run()
    assert pending.wait(WAIT_S).done
    assert (results[before].finish, results[other].finish) == (Finish.LENGTH, Finish.LENGTH)
    assert results[behind].reason == "adapter 'x' is not loaded; loaded: y"
    again = engine.unload_adapter("x").wait(WAIT_S)
    assert (again.done, again.reason) == (False, "adapter 'x' is not loaded; loaded: y")


def test_c11_a_request_behind_a_load_is_served(case: Tiny, folders: dict[str, Path]) -> None:
    """It may name what is not loaded yet; if the load fails it is refused."""
    with assembled(case) as (parts, _):
        engine = parts.engine
        busy = engine.submit(prompt(40, 1), NEW)
        good, bad = engine.load_adapter("x", folders["x"]), engine.load_adapter("y", folders["x"] / "no")
        ids = [engine.submit(prompt(40, 1), NEW, scope=scope) for scope in (X, Y)]
        results = engine.run()
        assert (good.wait(WAIT_S).done, bad.wait(WAIT_S).done) == (True, False)
        assert results[busy].finish is Finish.LENGTH
        assert [results[number].finish for number in ids] == [Finish.LENGTH, Finish.REFUSED]
        taken = load(engine, "x", folders["y"])
        assert (taken.done, taken.reason) == (False, "adapter 'x' is loaded; unload it first")


def test_i3_faults_of_a_folder_are_named_together(case: Tiny, parts: Assembly, tmp_path: Path) -> None:
    """Everything that is wrong, at once; the engine goes on, and nothing is loaded."""
    folder = write_adapter(
        tmp_path / "bad",
        case.model,
        1,
        use_dora=True,
        bias="lora_only",
        rank_pattern={"q_proj": 2},
        modules_to_save=["lm_head"],
        init_lora_weights="pissa",
        something_new=7,
        target_modules=[*TARGETS, "query", "embed_tokens"],
    )
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    del tensors[name.format(0, "q", "A")]
    tensors[name.format(1, "k", "B")] = torch.zeros(60, 5)
    tensors[name.format(2, "v", "A")][0, 0] = torch.nan
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 199)
    save_file(tensors, weights)
    report = load(parts.engine, "bad", folder)
    assert not report.done
    for part in (
        "use_dora = True is not served",
        "bias = 'lora_only' is not served",
        "rank_pattern = {'q_proj': 2} is not served",
        "modules_to_save = ['lm_head'] is not served",
        "init_lora_weights 'pissa' changes the base model's weights",
        "something_new = 7 is not served",
        "target module 'query' is not in the model; nearest:",
        "not linear in a plain float: model.embed_tokens (Embedding)",
        "missing tensors: model.layers.0.self_attn.q_proj.lora_A",
        "another shape: model.layers.1.self_attn.k_proj.lora_B [60, 5], expected [60, 4]",
        "no numbers: model.layers.2.self_attn.v_proj.lora_A",
        "does not name: model.layers.0.mlp.up_proj.lora_A",
        "tensors that are not served: base_model.model.model.embed_tokens.lora_embedding_A",
    ):
        assert part in report.reason, part
    assert sorted(parts.engine.adapters) == ["x", "y"]
    assert run_one(parts, prompt(40, 1), X).finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected an object"),
        ("{}", "expected an object"),
        ('{"peft_type": "IA3", "r": 0, "lora_alpha": "8", "target_modules": 3}', "peft_type 'IA3'"),
        ('{"peft_type": "LORA", "r": true, "lora_alpha": NaN, "target_modules": "("}', "r True"),
    ],
)
def test_i3_broken_files(case: Tiny, tmp_path: Path, config: str, fault: str) -> None:
    """No config, no weights, truncated ones: named, never an exception of another kind."""
    executor = HfExecutor(case.model, case.layers, case.kv)
    with pytest.raises(
        UsageFault, match=r"adapter_config\.json is missing; adapter_model\.safetensors is miss"
    ):
        executor.read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UsageFault, match=r"adapter_model\.safetensors is not readable") as found:
        executor.read_adapter(tmp_path)
    assert fault in str(found.value)


def test_a_step_with_an_unknown_adapter_is_refused(case: Tiny) -> None:
    """The executor checks what it is handed: names, and one for each request."""
    executor = HfExecutor(case.model, case.layers, case.kv)
    executor.bind(bind_poisoned(case.kv, 4))
    step = Step(
        token_ids=np.array([5, 6]),
        positions=np.array([0, 1]),
        query_start=np.array([0, 2]),
        context_len=np.array([0]),
        page_table={"full": np.array([[1]], np.int32)},
        want=np.array([1]),
        adapters=("x",),
    )
    with pytest.raises(InternalFault, match="request 0 names adapter 'x': not loaded"):
        executor.forward(step)
    with pytest.raises(InternalFault, match="2 adapters for 1 requests"):
        executor.forward(Step(**{**_fields(step), "adapters": (None, None)}))


def _fields(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in Step.__dataclass_fields__}


def test_b23_branches_and_speculation_with_an_adapter(case: Tiny, folders: dict[str, Path]) -> None:
    """They give what each gives alone, with the adapter."""
    tokens = prompt(20, 1) * 2
    expected, _ = greedy(merged(case.model, folders["x"]), tokens, 12)
    with assembled(case, drafter=NgramDrafter(8), limits=EngineLimits(max_chunk_tokens=PAGE)) as (parts, _):
        assert load(parts.engine, "x", folders["x"]).done
        ids = parts.engine.submit_parallel(tokens, 12, 2, scope=X, stop_token_ids=[])
        results = parts.engine.run()
        assert {results[number].tokens for number in ids} == {expected}


def test_r5_a_folder_that_cannot_be_read_in_time(case: Tiny, folders: dict[str, Path]) -> None:
    """A file system that hangs costs the load its deadline and nobody else anything."""
    stuck = folders["x"] / "adapter_model.safetensors"
    stuck.unlink()
    os.mkfifo(stuck)
    with assembled(case) as (parts, _):
        pending = parts.engine.load_adapter("x", folders["x"], deadline_s=0.05)
        request = parts.engine.submit(prompt(40, 1), NEW)
        assert parts.engine.run()[request].finish is Finish.LENGTH
        assert not pending.value.done
        assert "the deadline passed" in pending.value.reason
        stuck.open("wb").close()  # the thread that reads it ends
        assert parts.engine.adapters == {}
