"""`shrink`: small configs of real checkpoints keep kinds and ratios, and build."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvcontract.core.shrink import layer_count, shrink

CONFIGS = {
    file.stem: json.loads(file.read_text()) for file in Path(__file__).parents[1].glob("configs/*.json")
}


def text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config."""
    return config.get("text_config", config)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_small_config_builds_with_at_most_20_million_parameters(name: str) -> None:
    """Transformers accepts the small config, and runs it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = shrink(CONFIGS[name]).config
    rest = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **copy.deepcopy(rest))
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 20_000_000
    with torch.no_grad():
        logits = model(torch.arange(40).unsqueeze(0)).logits
    assert logits.shape == (1, 40, text(config)["vocab_size"])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_input_is_untouched_and_changes_are_exact(name: str) -> None:
    """`changes` lists precisely what differs, with both values; unknown keys stay."""
    before = copy.deepcopy(CONFIGS[name])
    before["strange_key"] = {"kept": [1, 2]}
    given = copy.deepcopy(before)
    small = shrink(given)
    assert given == before
    assert small.config["strange_key"] == {"kept": [1, 2]}
    assert set(small.config) == set(before)
    for key, (old, new) in small.changes.items():
        assert old != new
        sides = (before, small.config)
        for part in key.split("."):
            sides = tuple(side[part] for side in sides)
        assert sides == (old, new)


@pytest.mark.parametrize("name", sorted(name for name in CONFIGS if name.startswith("qwen3-")))
def test_head_ratios_and_divisibility_are_kept(name: str) -> None:
    """As many query heads share a key/value head, and what tp 2 divides stays divisible."""
    before, after = CONFIGS[name], shrink(CONFIGS[name]).config
    ratio = before["num_attention_heads"] // before["num_key_value_heads"]
    assert after["num_attention_heads"] == ratio * after["num_key_value_heads"]
    assert after["num_key_value_heads"] % 2 == 0
    assert after["head_dim"] < before["head_dim"]
    assert after["num_hidden_layers"] >= 4
    assert after["max_position_embeddings"] >= 4096


def test_special_tokens_stay_apart_and_inside_the_vocabulary() -> None:
    """Equal ids stay equal, different ones different, lists stay lists."""
    config = {
        **CONFIGS["qwen3-4b"],
        "eos_token_id": [151645, 151643],
        "pad_token_id": None,
        "image_token_id": 7,
    }
    small = shrink(config).config
    assert small["eos_token_id"][1] == small["bos_token_id"]
    assert len(set(small["eos_token_id"])) == 2
    assert all(0 <= token < small["vocab_size"] for token in small["eos_token_id"])
    assert small["pad_token_id"] is None
    assert small["image_token_id"] == 7


def test_layers_hold_the_prefix_and_one_period() -> None:
    """The layers before a pattern sets in, then one period, raised to at least four."""
    assert layer_count(CONFIGS["qwen3-4b"]) == 4
    assert layer_count(CONFIGS["qwen3.5-4b"]["text_config"]) == 4
    glm = shrink(CONFIGS["glm-5.2"]).config
    # Three dense layers with an indexer each, then shared, shared, shared, full.
    assert glm["indexer_types"] == ["full"] * 3 + ["shared"] * 3 + ["full"]
    assert glm["first_k_dense_replace"] == 3
    six = {"num_hidden_layers": 26, "sliding_window_pattern": 6}
    assert layer_count(six) == 6
    assert layer_count({"num_hidden_layers": 24, "layer_types": ["a", "b"] * 12}) == 4
    assert layer_count({"num_hidden_layers": 3}) == 3


def test_sparse_indexers_keep_sixteen_heads() -> None:
    """With fewer index heads, scores tie at the top-k boundary."""
    small = shrink(CONFIGS["glm-5.2"]).config
    assert small["index_n_heads"] >= 16
    assert small["index_head_dim"] >= 2 * small["qk_rope_head_dim"]


@pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (8, 4), (4, 1)])
def test_expert_routing_stays_valid(groups: int, topk_groups: int) -> None:
    """Groups divide the experts, and the chosen groups hold enough of them."""
    config = {**CONFIGS["glm-5.2"], "n_group": groups, "topk_group": topk_groups}
    small = shrink(config).config
    assert small["n_routed_experts"] % small["n_group"] == 0
    each = small["n_routed_experts"] // small["n_group"]
    assert each >= 2
    assert small["num_experts_per_tok"] <= each * small["topk_group"] <= small["n_routed_experts"]


def test_multi_axis_rotation_adds_up() -> None:
    """The sections of a multi-axis rotation are half of the rotated part of a head."""
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_type": "default"}
    config = {**CONFIGS["qwen3.5-4b"]["text_config"], "rope_parameters": rope}
    small = shrink(config).config
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 8
    assert small["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_other_widths_of_full_layers_are_kept_apart() -> None:
    """Wider global heads stay wider, and their own key/value heads divide the query heads."""
    before = CONFIGS["gemma4-12b"]["text_config"]
    after = text(shrink(CONFIGS["gemma4-12b"]).config)
    assert after["layer_types"] == before["layer_types"][:6]
    assert after["global_head_dim"] == 2 * after["head_dim"]
    assert after["num_attention_heads"] == 2 * after["num_key_value_heads"]
    assert after["num_attention_heads"] % after["num_global_key_value_heads"] == 0
    four = shrink({**before, "num_global_key_value_heads": 4}).config
    assert four["num_global_key_value_heads"] == 2


def test_layers_that_share_keep_one_period_on_either_side() -> None:
    """Of those that keep keys and values one period, and of those that share the last one."""
    before = {**CONFIGS["gemma4-12b"]["text_config"], "num_kv_shared_layers": 18}
    small = shrink(before).config
    assert small["num_hidden_layers"] == 12
    assert small["num_kv_shared_layers"] == 6
    assert small["layer_types"] == before["layer_types"][:6] + before["layer_types"][-6:]
    assert layer_count({**before, "num_kv_shared_layers": 0}) == 6


def test_layers_spelt_out_one_by_one_are_made_small_too() -> None:
    """`per_layer_config` follows its layers, in whatever way its keys are written."""
    wide = {"head_dim": 512, "num_key_value_heads": 1}
    before = {
        **CONFIGS["gemma4-12b"]["text_config"],
        "num_kv_shared_layers": 18,
        "per_layer_config": {f"{index:02}": wide for index in range(5, 48, 6)},
    }
    small = shrink(before).config["per_layer_config"]
    assert small == {index: {"head_dim": 64, "num_key_value_heads": 1} for index in ("5", "11")}


def test_towers_for_what_is_no_text_are_left_out() -> None:
    """They would be most of a small model's parameters, and keep nothing in its cache."""
    config = {**CONFIGS["gemma4-12b"], "vision_config": {"hidden_size": 1152}, "audio_config": None}
    small = shrink(config)
    assert small.config["vision_config"] is None
    assert small.changes["vision_config"] == ({"hidden_size": 1152}, None)
