"""Small models with linear-attention layers, and hand-written declarations of what they keep."""

from __future__ import annotations

from typing import Any, Final

import torch
from tiny_models import VOCAB, Tiny
from transformers import AutoConfig, DynamicCache

from kvcontract.contract.executor import Attention, Combined, HfLayers, Recurrent
from kvcontract.contract.model import Arena, Axes, Field, Full, Group, KvModel, WeightIdentity
from kvcontract.engine.checkpoint import random_model

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SMALL,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    # Attention and linear attention in one layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        **_SMALL,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
    },
    # A convolution's state and no recurrent one.
    "lfm2": {
        "model_type": "lfm2",
        **_SMALL,
        "num_hidden_layers": 3,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention"],
    },
}
# By model: the recurrent state's axes, and the convolution's channels and columns.
STATES: Final[dict[str, tuple[tuple[int, ...] | None, tuple[int, ...], int]]] = {
    "qwen3_next": ((4, 8, 16), (16, 16, 64), 3),
    "falcon_h1": ((8, 8, 16), (64, 32), 3),
    "lfm2": (None, (64,), 2),
}


def linear(name: str, *, dtype: str = "float32", page_tokens: int = 16) -> Tiny:
    """Build one of `CONFIGS` with what a plugin would say of it."""
    model = random_model(CONFIGS[name], seed=3).to(getattr(torch, dtype))
    kv, layers = declare(name, dtype=dtype, page_tokens=page_tokens)
    return Tiny(model, kv, layers)


def declare(name: str, *, dtype: str, page_tokens: int) -> tuple[KvModel, HfLayers]:
    """A paged group for attention, a bounded one for the rest."""
    config = AutoConfig.for_model(**CONFIGS[name])
    arenas: list[Arena] = []
    entries: dict[int, Attention | Recurrent | Combined] = {}
    for index, own in enumerate(DynamicCache(config=config).layers):
        kind = type(own).__name__
        attention = Attention((f"kv-{index}", "k"), (f"kv-{index}", "v"))
        recurrent = _recurrent(name, index)
        if kind == "DynamicLayer" or "FullAttention" in kind:
            arenas.append(_rows(index, dtype))
        if kind.startswith("LinearAttention"):
            arenas += _state(name, index, dtype)
        if kind == "DynamicLayer":
            entries[index] = attention
        else:
            entries[index] = Combined(attention, recurrent) if "FullAttention" in kind else recurrent
    kv = KvModel(
        contract=1,
        name=name,
        weights=WeightIdentity(kind="unresolved"),
        numerics=dtype,
        page_tokens=page_tokens,
        groups=(Group(name="kv", reach=Full()), Group(name="state", kind="bounded")),
        arenas=tuple(arenas),
    )
    return kv, HfLayers(entries)


def _rows(index: int, dtype: str) -> Arena:
    fields = tuple(Field(name=name, dtype=dtype, axes=Axes([("head", 2), ("dim", 16)])) for name in "kv")
    return Arena.planes(name=f"kv-{index}", group="kv", layer=index, fields=fields)


def _state(name: str, index: int, dtype: str) -> list[Arena]:
    shape, channels, columns = STATES[name]
    conv = tuple(
        Field(name=f"part{number}", dtype=dtype, axes=Axes([("channel", count), ("column", columns)]))
        for number, count in enumerate(channels)
    )
    arenas = [Arena.planes(name=f"conv-{index}", group="state", layer=index, fields=conv)]
    if shape is not None:
        axes = Axes([(f"axis{number}", size) for number, size in enumerate(shape)])
        field = Field(name="state", dtype="float32", axes=axes)
        arenas.append(Arena.planes(name=f"state-{index}", group="state", layer=index, fields=(field,)))
    return arenas


def _recurrent(name: str, index: int) -> Recurrent:
    shape, channels, _ = STATES[name]
    conv = tuple((f"conv-{index}", f"part{number}") for number in range(len(channels)))
    return Recurrent(None if shape is None else (f"state-{index}", "state"), conv)
