"""The qwen35 plugin: bytes of a real config, slices of workers, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from declared import NOT_SERVED_YET, config, declare, layers, plugin, sound
from tiny_models import Tiny

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.executor import Attention, Recurrent
from kvcontract.contract.layout import layout, tp_faults
from kvcontract.contract.wire import parts, wire_record
from kvcontract.core.shrink import shrink
from kvcontract.engine.checkpoint import load_model, random_checkpoint
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.request import check_prompt

NAME = "qwen35"
REAL = config("qwen3.5-4b")


def text(**changes: Any) -> dict[str, Any]:
    """The real config with keys of the text model changed; None leaves one out."""
    inner = {**REAL["text_config"], **changes}
    return {**REAL, "text_config": {key: value for key, value in inner.items() if value is not None}}


def test_a_real_config_gives_the_published_bytes() -> None:
    """51,511,296 B a snapshot and 32,768 B a token, whatever the page size; f32 state beside bf16 conv."""
    for page_tokens in (16, 64):
        laid = layout(sound(NAME, REAL, page_tokens=page_tokens))
        assert laid.page_bytes == 32_768 * page_tokens
        slot = laid.space("slots-gdn")
        assert slot.content_bytes == 51_511_296
        assert len(slot.arenas) == 2 * 24
        assert [arena.content_bytes for arena in slot.arenas[:2]] == [2_097_152, 49_152]
        assert [field.dtype for field in slot.arenas[0].fields] == ["float32"]
        assert {field.dtype for field in slot.arenas[1].fields} == {"bfloat16"}


def test_the_sample_has_the_geometry_of_the_real_config() -> None:
    """Without a config the same groups and arenas are declared."""
    real, sample = sound(NAME, REAL), sound(NAME, None)
    assert (sample.groups, sample.arenas) == (real.groups, real.arenas)
    assert layers(NAME, None) == layers(NAME, REAL)


def test_the_text_model_alone_is_the_same_cache() -> None:
    """`qwen3_5_text` at the top level declares what it does inside `qwen3_5`."""
    assert sound(NAME, REAL["text_config"]).arenas == sound(NAME, REAL).arenas


def test_layers_are_mapped_by_their_kind() -> None:
    """Every fourth layer keeps rows, the others a state and the convolution of q, k and v, in that order."""
    found = layers(NAME, REAL).layers
    assert [isinstance(found[index], Attention) for index in range(32)] == [False, False, False, True] * 8
    assert found[1] == Recurrent(
        state=("layers.1.state", "state"),
        conv=(("layers.1.conv", "q"), ("layers.1.conv", "k"), ("layers.1.conv", "v")),
    )


@pytest.mark.parametrize("tp", [2, 4, 8, 16, 32])
def test_a_worker_holds_its_heads_of_every_field(tp: int) -> None:
    """Heads of q, k, v and state are cut side by side; beyond 16 workers key heads have replicas."""
    model = sound(NAME, REAL, tp=tp)
    assert not tp_faults(model, tp)
    state, conv = layout(model, 0, tp).space("slots-gdn").arenas[:2]
    keys = max(1, 16 // tp)
    assert state.fields[0].shape == (32 // tp, 128, 128)
    assert [field.shape for field in conv.fields] == [(keys, 128, 3), (keys, 128, 3), (32 // tp, 128, 3)]


def test_shards_of_a_snapshot_cover_whole_heads() -> None:
    """Shard 1 of 8 has key heads 2 and 3, value heads 4 to 7, of everything."""
    model = sound(NAME, REAL)
    part = next(part for part in parts(model) if part.name == "gdn")
    assert part.shards(8) == 8
    cuts = wire_record(model, part, 1, 8).cuts
    assert cuts["layers.0.conv", "q"] == ("head", 2, 4)
    assert cuts["layers.0.conv", "v"] == ("head", 4, 8)
    assert cuts["layers.0.state", "state"] == ("head", 4, 8)


def test_only_the_runtime_stands_in_the_way() -> None:
    """The declaration breaks one clause, that of groups which the runtime does not serve yet."""
    _, findings = plugin(NAME).declare(declare(NAME, REAL)[2])
    assert {item.clause for item in findings} <= {NOT_SERVED_YET}


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({**REAL, "model_type": "qwen3_next"}, "config.model_type", "one family only"),
        ({**REAL, "text_config": {"model_type": "llama"}}, "config.text_config.model_type", "no text model"),
        ({**REAL, "text_config": 3}, "config.text_config.model_type", "no text model"),
        (text(layer_types=["full_attention"] * 3), "config.text_config.layer_types", "two kinds"),
        (text(layer_types=["sliding_attention"] * 32), "config.text_config.layer_types", "two kinds"),
        (text(mamba_ssm_dtype="bfloat16"), "config.text_config.mamba_ssm_dtype", "full precision"),
        (text(linear_num_key_heads=5), "config.text_config.linear_num_key_heads", "evenly"),
        (text(linear_conv_kernel_dim=1), "config.text_config.linear_conv_kernel_dim", "keeps no state"),
        (text(dtype="float8_e4m3fn"), "config.text_config.dtype", "unquantised"),
        (text(linear_value_head_dim=None), "linear_value_head_dim", "lacks"),
        (text(layer_types=None), "layer_types", "lacks"),
        (text(head_dim="256"), "head_dim", "positive integer"),
    ],
)
def test_i3_what_is_not_understood_is_refused(given: dict[str, Any], path: str, says: str) -> None:
    """Each refusal names the key, its value and what is allowed (I3)."""
    _, findings, _ = declare(NAME, given)
    assert len(findings) == 1
    assert path in f"{findings[0].path} {findings[0].message}"
    assert says in findings[0].message


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"page_tokens": 32}, "page_tokens"),
        ({"drafter": "mtp"}, "drafter"),
        ({"kv_dtype": "int8"}, "kv_dtype"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], path: str) -> None:
    """Other page sizes, drafters and quantised caches."""
    _, findings, _ = declare(NAME, REAL, **options)
    assert [path in item.path for item in findings] == [True]


def test_prompts_with_images_are_refused(tmp_path: Path) -> None:
    """The checkpoint is loaded as the text model it holds; an image's token in a prompt names itself."""
    given = {**REAL, "image_token_id": 248056, "video_token_id": 248057}
    small = shrink(given).config
    folder = random_checkpoint(small, tmp_path / "new", seed=3)
    case = Tiny(load_model(folder), sound(NAME, small, kv_dtype="float32"), layers(NAME, small))
    limits = HfExecutor(case.model, case.layers, case.kv).limits
    assert limits.placeholder_ids == {small["image_token_id"], small["video_token_id"]}
    check_prompt([1, 2, 3], 4, limits)
    with pytest.raises(UsageFault, match=r"token id 5\d\d at position 1 stands for an image"):
        check_prompt([1, small["image_token_id"], 3], 4, limits)
    assert not any("visual" in name for name, _ in case.model.named_modules())
    with torch.no_grad():
        assert torch.isfinite(case.model(torch.arange(20).unsqueeze(0)).logits).all()
