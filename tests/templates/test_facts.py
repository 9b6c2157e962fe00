"""What is derived from a config.json: the kind, the family's spelling, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES

from kvc_templates.facts import COUNTS, KINDS, Kind, bare_facts, facts_of
from kvc_templates.literal import Missing
from kvcontract.contract.errors import UsageFault

CONFIGS = Path(__file__).parents[1] / "configs"

DERIVED: dict[str, tuple[str, set[str]]] = {
    "llama": ("gqa", {"head_dim"}),
    "mistral": ("gqa", {"head_dim"}),
    "qwen2": ("gqa", {"head_dim"}),
    "many_heads": ("gqa", {"head_dim", "num_key_value_heads"}),
    "late_windows": ("sliding", {"head_dim", "layer_types"}),
    "gemma3": ("sliding", {"layer_types"}),
    "gpt_oss": ("sliding", set()),
    "qwen3_next": ("hybrid", {"layer_types"}),
    "deepseek_v3": ("mla", set()),
}


def read(name: str) -> dict[str, Any]:
    """A real config."""
    found: dict[str, Any] = json.loads((CONFIGS / name).read_text())
    return found


def refusal(config: dict[str, Any], asked: Kind | None = None) -> str:
    """Why no plugin can be made."""
    with pytest.raises(UsageFault) as caught:
        facts_of(config, asked)
    return str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_tell_their_kind(name: str) -> None:
    """By the keys of their configs; what they leave out follows from others, and nothing is missing."""
    kind, derived = DERIVED[name]
    found = facts_of(FAMILIES[name], None)
    assert (found.kind, set(found.derived), found.missing) == (kind, derived, [])


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("qwen3-0.6b.json", "gqa"),
        ("qwen3-32b.json", "gqa"),
        ("qwen3.5-4b.json", "hybrid"),
        ("gemma4-12b.json", "sliding"),
        ("glm-5.2.json", "mla"),
    ],
)
def test_real_configs_leave_nothing_open(file: str, kind: str) -> None:
    """Multimodal ones are read where their text model stands."""
    config = read(file)
    found = facts_of(config, None)
    assert (found.kind, found.missing, found.nested) == (kind, [], "text_config" in config)


def test_what_concerns_no_cache_is_left_out() -> None:
    """Quantised weights, code of the release, towers."""
    config = {**FAMILIES["deepseek_v3"], "vision_config": {"depth": 3}}
    found = facts_of(config, None)
    assert found.left_out == ("auto_map", "quantization_config", "vision_config")
    assert not {*found.left_out} & set(found.sample)
    assert any("num_nextn_predict_layers" in text for text in found.assumed)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys_are_all_named_and_stood_in_for(kind: Kind) -> None:
    """An empty config with a kind leaves every key that counts missing."""
    found = facts_of({}, kind)
    assert {*COUNTS[kind], "model_type", "dtype"} <= set(found.missing)
    assert all(found.sample[fact] == Missing(fact, found.sample[fact].stand_in) for fact in found.missing)
    assert set(bare_facts(kind).missing) >= set(found.missing)


def test_a_released_config_that_leaves_much_out() -> None:
    """The text model's keys that the file leaves to transformers are missing, never guessed."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    found = facts_of({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}, None)
    assert found.kind == "sliding"
    assert set(found.missing) == {
        "head_dim",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    }
    assert len(found.sample["text_config"]["layer_types"].stand_in) == 34
    assert found.inherited == ("torch_dtype",)


def test_every_wrong_value_is_named_at_once() -> None:
    """Counts, types of layers, dtype, numbers that JSON has not."""
    said = refusal(
        {
            **FAMILIES["gpt_oss"],
            "num_hidden_layers": "24",
            "head_dim": -1,
            "torch_dtype": "float8_e4m3fn",
            "swiglu_limit": float("inf"),
            "model_type": 3,
        }
    )
    for words in (
        "num_hidden_layers = '24': expected a positive integer",
        "head_dim = -1: expected a positive integer",
        "dtype = 'float8_e4m3fn': expected one of bfloat16",
        "swiglu_limit = inf: JSON has no such number",
        "model_type = 3: expected printable text",
        "layer_types: expected a list of num_hidden_layers",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 512, "sliding_window": 9}, "of several kinds at once"),
        ({"is_encoder_decoder": True}, "cross-attention is not served"),
        ({"mamba_d_state": 16, "ssm_cfg": {}}, "mamba_d_state, ssm_cfg: no template declares the state"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: no template declares"),
        ({"layer_types": ["mamba", "full_attention"] * 16}, "layer_types: no template declares mamba"),
        ({"layer_types": ["sliding_attention"] * 32}, "without full_attention in it"),
    ],
)
def test_state_that_no_template_declares_is_refused(change: dict[str, Any], said: str) -> None:
    """A scaffold that forgets state would be wrong from the first line."""
    assert said in refusal({**FAMILIES["llama"], **change})


def test_the_kind_that_is_asked_for_must_be_the_configs() -> None:
    """And where nothing tells it, it must be asked for."""
    assert "--kind mla: by its num_attention_heads it is of kind gqa" in refusal(FAMILIES["llama"], "mla")
    assert "name it with --kind gqa|mla|sliding|hybrid" in refusal({"n_head": 12, "n_layer": 12})
