"""Digests of configuration and weights: what changes a number changes them, nothing else does (D6)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcontract.contract.errors import UsageFault
from kvcontract.core.identity import config_digest, load_config, weight_files, weight_identity

CONFIG = {"model_type": "m", "hidden_size": 8, "rope": {"theta": 1e6, "scaling": None}, "eos_token_id": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder; the digest reads bytes, so they need not be tensors."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_d6_inert_keys_leave_the_config_digest_alone() -> None:
    """Ids of special tokens, dtype, paths, order, null and 1 for 1.0 change nothing (D6)."""
    changed = {
        "eos_token_id": [9],
        "torch_dtype": "bfloat16",
        "_name_or_path": "x",
        "rope": {"theta": 1000000},
        "hidden_size": 8,
        "model_type": "m",
    }
    assert config_digest(changed) == config_digest(CONFIG)


@pytest.mark.parametrize("change", [{"hidden_size": 9}, {"rope": {"theta": 5e5}}, {"new_key": 0}])
def test_d6_keys_that_change_a_number_change_the_digest(change: dict[str, object]) -> None:
    """Geometry, rotation and keys we do not know all count (D6)."""
    assert config_digest({**CONFIG, **change}) != config_digest(CONFIG)


def test_d6_weight_identity_follows_content(folder: Path) -> None:
    """Other bytes, another file name, or another number in config.json: another identity (D6)."""
    first = weight_identity(folder)
    assert (first.kind, first.config) == ("digest", config_digest(CONFIG))
    assert weight_identity(folder) == first
    (folder / "model.safetensors").write_bytes(b"weightz")
    second = weight_identity(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert len({first.value, second.value, weight_identity(folder).value}) == 3


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    """A folder without config and with two shards of three names what is missing."""
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "two.safetensors").write_bytes(b"")
    with pytest.raises(UsageFault, match=r"missing: config\.json, one\.safetensors, three\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageFault, match="no weight_map"):
        weight_files(tmp_path)
    with pytest.raises(UsageFault, match="no such folder"):
        weight_files(tmp_path / "absent")


def test_an_index_decides_which_files_count(folder: Path) -> None:
    """Files beside the index's shards are no weights."""
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "b.safetensors", "c": "a.safetensors", "d": "a.safetensors"}})
    )
    (folder / "a.safetensors").write_bytes(b"")
    (folder / "b.safetensors").write_bytes(b"")
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]


def test_config_is_read_from_folder_or_file(folder: Path) -> None:
    """Both spellings work; what is no JSON object is refused with its path."""
    assert load_config(folder) == load_config(folder / "config.json") == CONFIG
    (folder / "list.json").write_text("[]")
    (folder / "torn.json").write_text("{")
    for name, message in {
        "list.json": "found list",
        "torn.json": "not readable",
        "no.json": "no such",
    }.items():
        with pytest.raises(UsageFault, match=message):
            load_config(folder / name)
