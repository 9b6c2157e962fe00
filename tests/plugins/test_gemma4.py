"""The gemma4 plugin: bytes of the 12B geometry, layers that share, what it refuses.

The config beside these tests is no released file.  It rests on facts that are asserted here (48 layers, each
sixth one full; 8 key/value heads of 256 in a window of 1,024, 1 of 512 without one) and on how transformers'
own text config spells them; its other sizes (hidden, intermediate, query heads) move no byte of the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from declared import NOT_SERVED_YET, config, declare, layers, plugin, sound
from transformers import AutoConfig

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.layout import layout, tp_faults
from kvcontract.contract.model import Full, Window
from kvcontract.core.shrink import shrink
from kvcontract.engine.checkpoint import load_model, random_checkpoint
from kvcontract.engine.hf import HfExecutor
from kvcontract.engine.request import check_prompt

NAME = "gemma4"
REAL = config("gemma4-12b")
KINDS = REAL["text_config"]["layer_types"]


def text(**changes: Any) -> dict[str, Any]:
    """The config with keys of the text model changed; None leaves one out."""
    inner = {**REAL["text_config"], **changes}
    return {**REAL, "text_config": {key: value for key, value in inner.items() if value is not None}}


def test_the_12b_geometry_gives_the_published_bytes() -> None:
    """40 sliding layers of 320 KiB a token in all, 8 full ones of 16 KiB, at both page sizes."""
    for page_tokens in (16, 64):
        model = sound(NAME, REAL, page_tokens=page_tokens)
        laid = layout(model)
        assert laid.space("full").content_bytes == 16 * 1024 * page_tokens
        assert laid.space("window-1024").content_bytes == 320 * 1024 * page_tokens
        assert len(laid.space("window-1024").arenas) == 40
        assert [arena.layer for arena in laid.space("full").arenas] == list(range(5, 48, 6))
        assert {group.name: group.reach for group in model.groups} == {
            "full": Full(),
            "win": Window(tokens=1024),
        }


def test_the_sample_has_the_geometry_of_the_config() -> None:
    """Without a config the same groups and arenas are declared."""
    real, sample = sound(NAME, REAL), sound(NAME, None)
    assert (sample.groups, sample.arenas) == (real.groups, real.arenas)


def test_a_config_as_transformers_writes_it_is_the_same_cache() -> None:
    """Full layers spelt out one by one (`per_layer_config`) instead of by `global_head_dim`."""
    given = {key: value for key, value in REAL.items() if key != "model_type"}
    written = AutoConfig.for_model(REAL["model_type"], **given).to_dict()
    assert "per_layer_config" in written["text_config"]
    assert "global_head_dim" not in written["text_config"]
    written["text_config"]["dtype"] = "bfloat16"
    assert sound(NAME, written).arenas == sound(NAME, REAL).arenas


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_text_model_alone_is_the_same_cache(kind: str) -> None:
    """Both spellings of the family, by themselves or inside a multimodal model."""
    inner = {**REAL["text_config"], "model_type": f"{kind}_text"}
    nested = {"model_type": kind, "text_config": inner}
    assert sound(NAME, inner).arenas == sound(NAME, nested).arenas == sound(NAME, REAL).arenas


def test_full_layers_have_their_own_heads_only_where_keys_are_values() -> None:
    """`num_global_key_value_heads` counts under `attention_k_eq_v` alone, as transformers reads it."""
    model = sound(NAME, text(attention_k_eq_v=False))
    assert model.arenas[5].fields[0].axes.items() == {"head": 8, "dim": 512}.items()
    assert sound(NAME, text(num_global_key_value_heads=None)).arenas == model.arenas
    assert sound(NAME, REAL).arenas[5].fields[0].axes.items() == {"head": 1, "dim": 512}.items()


def test_layers_that_share_own_no_arena() -> None:
    """The last layers read what earlier ones keep: no arena, no entry in the map."""
    given = text(num_kv_shared_layers=18)
    model = sound(NAME, given)
    assert [arena.layer for arena in model.arenas] == list(range(30))
    assert sorted(layers(NAME, given).layers) == list(range(30))


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_a_worker_holds_its_heads(tp: int) -> None:
    """Sliding layers are cut; the one head of full layers is held by every worker."""
    model = sound(NAME, REAL, tp=tp)
    assert not tp_faults(model, tp)
    laid = layout(model, 0, tp)
    assert laid.space("full").content_bytes == 16 * 1024 * 16
    assert laid.space("window-1024").content_bytes == 320 * 1024 * 16 // min(tp, 8)


def test_only_the_runtime_stands_in_the_way() -> None:
    """The declaration breaks one clause, that of groups which the runtime does not serve yet."""
    _, findings = plugin(NAME).declare(declare(NAME, REAL)[2])
    assert {item.clause for item in findings} <= {NOT_SERVED_YET}


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({**REAL, "model_type": "gemma3"}, "config.model_type", "one family only"),
        ({**REAL, "model_type": "gemma4"}, "config.text_config.model_type", "no text model"),
        (text(use_bidirectional_attention="all"), "use_bidirectional_attention", "attends both ways"),
        (text(layer_types=KINDS[:-1]), "config.text_config.layer_types", "two kinds"),
        (text(layer_types=[*KINDS[:-1], KINDS[0]]), "config.text_config.layer_types", "two kinds"),
        (text(layer_types=["chunked_attention", *KINDS[1:]]), "config.text_config.layer_types", "two kinds"),
        (text(num_kv_shared_layers=48), "num_kv_shared_layers", "keeps its own"),
        (text(num_kv_shared_layers=43), "num_kv_shared_layers", "keeps its own"),
        (text(num_kv_shared_layers=True), "num_kv_shared_layers", "keeps its own"),
        (text(per_layer_config={"05": {"sliding_window": 7}}), "per_layer_config", "not declared"),
        (text(per_layer_config={"48": {"head_dim": 7}}), "per_layer_config", "not declared"),
        (text(per_layer_config=[1]), "per_layer_config", "not declared"),
        (text(per_layer_config={"5": {"head_dim": 0}}), "head_dim", "positive integer"),
        (text(global_head_dim=None), "global_head_dim", "lacks"),
        (text(sliding_window=None), "sliding_window", "lacks"),
        (text(dtype="float8_e4m3fn"), "config.text_config.dtype", "unquantised"),
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
    """Image tokens attend both ways, and the generic executor takes text: a prompt with one is named."""
    small = shrink(REAL).config
    model = load_model(random_checkpoint(small, tmp_path / "new", seed=3))
    limits = HfExecutor(model, layers(NAME, small), sound(NAME, small, kv_dtype="float32")).limits
    ids = {small[f"{kind}_token_id"] for kind in ("image", "video", "audio")}
    assert limits.placeholder_ids == ids
    assert len(ids) == 3
    check_prompt([1, 2, 3], 4, limits)
    for token in ids:
        with pytest.raises(
            UsageFault, match=f"token id {token} at position 1 stands for an image or a sound"
        ):
            check_prompt([1, token, 3], 4, limits)
