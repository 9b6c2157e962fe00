"""Small Hugging Face models with random weights, and hand-written declarations of what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcontract.contract.executor import Attention, FieldRef, HfLayers
from kvcontract.contract.layout import layout
from kvcontract.contract.model import (
    TOKEN_AXIS,
    Arena,
    Axes,
    Chunk,
    Field,
    Full,
    Group,
    KvModel,
    WeightIdentity,
    Window,
)
from kvcontract.engine.checkpoint import random_model
from kvcontract.engine.views import executor_views
from kvcontract.memory.binding import Binding

VOCAB = 199
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {
    **_SMALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        **_SMALL,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_SMALL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "llama4": {
        "model_type": "llama4_text",
        **_SMALL,
        "intermediate_size_mlp": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_MLA},
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **_MLA,
        "index_n_heads": 16,
        "index_head_dim": 24,
        "index_topk": 9,
    },
}
_REACHES = {"sliding_attention": Window(tokens=7), "chunked_attention": Chunk(tokens=8)}


@dataclass(frozen=True)
class Tiny:
    """A model, its declaration, and the map between them."""

    model: nn.Module
    kv: KvModel
    layers: HfLayers


def tiny(
    name: str, *, dtype: str = "float32", page_tokens: int = 16, axes: tuple[str, ...] = ("head", "dim")
) -> Tiny:
    """Build one of `CONFIGS`; `axes` is the memory order of keys and values."""
    model = random_model(CONFIGS[name], seed=3).to(getattr(torch, dtype))
    kv, layers = declare(name, dtype=dtype, page_tokens=page_tokens, axes=axes)
    return Tiny(model, kv, layers)


def declare(
    name: str, *, dtype: str, page_tokens: int, axes: tuple[str, ...] = ("head", "dim")
) -> tuple[KvModel, HfLayers]:
    """What a plugin for that model would say."""
    config = CONFIGS[name]
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    arenas, layers = [], {}
    for index, kind in enumerate(kinds):
        fields = _fields(config, dtype, axes)
        arenas.append(Arena.planes(name=f"layer-{index}", group=kind, layer=index, fields=fields))
        refs = [(f"layer-{index}", field.name) for field in fields]
        layers[index] = Attention(*refs)
    groups = tuple(Group(name=kind, reach=_REACHES.get(kind, Full())) for kind in dict.fromkeys(kinds))
    kv = KvModel(
        contract=1,
        name=name,
        weights=WeightIdentity(kind="unresolved"),
        numerics=dtype,
        page_tokens=page_tokens,
        groups=groups,
        arenas=tuple(arenas),
    )
    return kv, HfLayers(layers)


def _fields(config: Mapping[str, Any], dtype: str, axes: tuple[str, ...]) -> tuple[Field, ...]:
    if "kv_lora_rank" in config:
        sizes = {"latent": config["kv_lora_rank"], "rope": config["qk_rope_head_dim"]}
        if "index_head_dim" in config:
            sizes["index"] = config["index_head_dim"]
        return tuple(Field(name=name, dtype=dtype, axes=Axes([("dim", n)])) for name, n in sizes.items())
    size = {TOKEN_AXIS: 1, "head": config["num_key_value_heads"], "dim": config["head_dim"]}
    return tuple(
        Field(name=name, dtype=dtype, axes=Axes([(axis, size[axis]) for axis in axes])) for name in "kv"
    )


def bind_poisoned(kv: KvModel, blocks: int) -> dict[FieldRef, Tensor]:
    """Views of page-first arenas of `blocks` pages, every byte 0xFF: NaN in every dtype."""
    bindings = {space.key: Binding.allocate(space, blocks) for space in layout(kv).spaces}
    for binding in bindings.values():
        next(iter(binding.arenas.values())).storage.fill_(0xFF)
    return executor_views(bindings)
