"""Checkpoint folders: written with seeded weights, read back offline, refused with every fault named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCAB

from kvcontract.contract.errors import UsageFault
from kvcontract.engine.checkpoint import (
    load_config,
    load_model,
    random_checkpoint,
    random_model,
    weight_identity,
)

CONFIG = {**CONFIGS["qwen3"], "torch_dtype": "bfloat16"}
IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    return random_checkpoint(CONFIG, tmp_path_factory.mktemp("checkpoint") / "new", seed=5)


def test_a_random_checkpoint_is_two_files_that_load_back(folder: Path) -> None:
    """config.json as given but for its dtype, and float32 weights; the loaded model equals the built one."""
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert load_config(folder) == {**CONFIG, "torch_dtype": "float32"}
    model = load_model(folder)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, random_model(CONFIG, 5)(IDS).logits)
    assert next(load_model(folder, dtype="bfloat16").parameters()).dtype == torch.bfloat16


def test_d6_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    """Equal seeds give equal identities, others do not; the process's own random state is left alone (D6)."""
    before = torch.get_rng_state()
    same = weight_identity(random_checkpoint(CONFIG, tmp_path / "same", seed=5))
    other = weight_identity(random_checkpoint(CONFIG, tmp_path / "other", seed=6))
    assert torch.equal(torch.get_rng_state(), before)
    assert same == weight_identity(folder)
    assert same.value != other.value
    assert same.config == other.config


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_random_weights_make_every_token_count(name: str) -> None:
    """A changed token moves later logits well above rounding, and the best token is no tie."""
    model = random_model(CONFIGS[name], seed=3)
    ids = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(ids).logits[0], model(changed).logits[0]
    assert (after - before).abs().amax(-1)[4:].min() > 1e-2
    best, second = before.topk(2, -1).values.unbind(-1)
    assert (best - second).median() > 0.1


def test_shards_with_an_index_load(folder: Path, tmp_path: Path) -> None:
    """Two shards and their index are one checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(IDS).logits, load_model(folder)(IDS).logits)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(UsageFault, match=r"missing: a\.safetensors"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """A tensor that is not there would be random: refused, all of them named."""
    tensors = load_file(folder / "model.safetensors")
    lost = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageFault) as fault:
        load_model(tmp_path)
    assert all(f"missing tensor {name}" in str(fault.value) for name in lost)


def test_what_cannot_be_loaded_says_why(folder: Path, tmp_path: Path) -> None:
    """Unknown model types, unknown dtypes and a folder in use are refused before anything is written."""
    with pytest.raises(UsageFault, match="no_such_type"):
        random_checkpoint({"model_type": "no_such_type"}, tmp_path / "x", seed=1)
    with pytest.raises(UsageFault, match="no model_type"):
        random_checkpoint({}, tmp_path / "x", seed=1)
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageFault, match=r"already holds config\.json, model\.safetensors"):
        random_checkpoint(CONFIG, folder, seed=1)
    with pytest.raises(UsageFault, match="float8"):
        load_model(folder, dtype="float8")
    with pytest.raises(UsageFault, match=r"missing: config\.json, model\.safetensors"):
        load_model(tmp_path)
