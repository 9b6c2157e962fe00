"""The KV cache of toy_hybrid.

Keys and values of the full-attention layers, and the state of gated delta nets between them.

Every number is read from the checkpoint's config.json.
`fill_in(fact, stand-in)` marks what is still missing: put the fact there, and the mark goes.
"""

from __future__ import annotations

from typing import Any

from kvcontract import (
    Arena,
    Attention,
    Config,
    Context,
    Field,
    Group,
    HfLayers,
    KvModel,
    Recurrent,
    fill_in,
    hookimpl,
)

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16,)
PAGE_TOKENS_REASON = "the suite was run at these page sizes only"

FULL, LINEAR = "full_attention", "linear_attention"

STATE_DTYPE = "float32"
"""Of the recurrent state, whatever the model computes in."""

CHUNK_TOKENS = fill_in("boundary_tokens", 64)
"""The linear kernel works through so many tokens at a time: a prefill cut between two changes no bit."""

SAMPLE: dict[str, Any] = {
    "model_type": fill_in("model_type", "qwen3_5_text"),
    "dtype": fill_in("dtype", "bfloat16"),
    "head_dim": fill_in("head_dim", 64),
    "hidden_size": fill_in("hidden_size", 512),
    "intermediate_size": fill_in("intermediate_size", 1024),
    "layer_types": fill_in("layer_types", ["linear_attention", "full_attention"] * 2),
    "linear_conv_kernel_dim": fill_in("linear_conv_kernel_dim", 4),
    "linear_key_head_dim": fill_in("linear_key_head_dim", 64),
    "linear_num_key_heads": fill_in("linear_num_key_heads", 4),
    "linear_num_value_heads": fill_in("linear_num_value_heads", 8),
    "linear_value_head_dim": fill_in("linear_value_head_dim", 64),
    "max_position_embeddings": fill_in("max_position_embeddings", 8192),
    "num_attention_heads": fill_in("num_attention_heads", 8),
    "num_hidden_layers": fill_in("num_hidden_layers", 4),
    "num_key_value_heads": fill_in("num_key_value_heads", 4),
    "vocab_size": fill_in("vocab_size", 32000),
}
"""The config.json of a released checkpoint: what is declared, and shrunk by the suite, if none is given."""


# What the model keeps.


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """`kv` grows with tokens; `linear` is a recurrent and a convolution state for each linear layer."""
    config = _config(ctx)
    kinds, dtype = _kinds(ctx, config), _dtype(ctx, config)
    arenas: list[Arena] = []
    for layer, kind in enumerate(kinds):
        arenas += [_attention(config, layer, dtype)] if kind == FULL else _linear(ctx, config, layer, dtype)
    return KvModel(
        contract=KVC_CONTRACT,
        name="toy_hybrid",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=(Group(name="kv"), Group(name="linear", kind="bounded", boundary_tokens=CHUNK_TOKENS)),
        arenas=tuple(arenas),
    )


def _attention(config: Config, layer: int, dtype: str) -> Arena:
    heads, head_dim = config.counts("num_key_value_heads", "head_dim")
    axes = {"head": heads, "dim": head_dim}
    fields = tuple(Field(name=name, dtype=dtype, axes=axes, shard_axis="head") for name in ("k", "v"))
    return Arena.planes(name=_kv(layer), group="kv", layer=layer, fields=fields)


def _linear(ctx: Context, config: Config, layer: int, dtype: str) -> list[Arena]:
    key_heads, key_dim = config.counts("linear_num_key_heads", "linear_key_head_dim")
    value_heads, value_dim = config.counts("linear_num_value_heads", "linear_value_head_dim")
    (kernel,) = config.counts("linear_conv_kernel_dim")
    if kernel == 1:
        why = "a convolution over one token keeps no state"
        raise ctx.refuse("config.linear_conv_kernel_dim", allowed="2 or more", why=why)
    axes = {"head": value_heads, "key": key_dim, "value": value_dim}
    state = Field(name="state", dtype=STATE_DTYPE, axes=axes, shard_axis="head")

    # Three fields, not one of all channels: a worker's slice has its heads of each.
    def channels(name: str, heads: int, dim: int) -> Field:
        axes = {"head": heads, "dim": dim, "column": kernel - 1}
        return Field(name=name, dtype=dtype, axes=axes, shard_axis="head")

    conv = (
        channels("q", key_heads, key_dim),
        channels("k", key_heads, key_dim),
        channels("v", value_heads, value_dim),
    )
    return [
        Arena.planes(name=_state(layer), group="linear", layer=layer, fields=(state,)),
        Arena.planes(name=_conv(layer), group="linear", layer=layer, fields=conv),
    ]


def _kv(layer: int) -> str:
    return f"layers.{layer}.kv"


def _state(layer: int) -> str:
    return f"layers.{layer}.state"


def _conv(layer: int) -> str:
    return f"layers.{layer}.conv"


# Where the model's own code puts it: the generic executor runs the model over the arenas.


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """Rows of full layers go to pages, states of linear ones to a slot."""
    layers: dict[int, Attention | Recurrent] = {}
    for i, kind in enumerate(_kinds(ctx, _config(ctx))):
        if kind == FULL:
            layers[i] = Attention(keys=(_kv(i), "k"), values=(_kv(i), "v"))
        else:
            conv = ((_conv(i), "q"), (_conv(i), "k"), (_conv(i), "v"))
            layers[i] = Recurrent(state=(_state(i), "state"), conv=conv)
    return HfLayers(layers)


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """Configs for the suite to shrink and run."""
    del ctx
    return (SAMPLE,)


# Facts, out of the config.


def _config(ctx: Context) -> Config:
    config = ctx.config if ctx.config is not None else Config(SAMPLE)
    if config["model_type"] != SAMPLE["model_type"]:
        why = "this plugin declares one family only"
        raise ctx.refuse("config.model_type", allowed=SAMPLE["model_type"], why=why)
    return config


def _kinds(ctx: Context, config: Config) -> list[str]:
    """What each layer is."""
    (layers,) = config.counts("num_hidden_layers")
    (kinds,) = config.facts("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {FULL, LINEAR}:
        allowed, why = f"a list of {layers}, {FULL} or {LINEAR} each", "each layer is one of two kinds"
        raise ctx.refuse("config.layer_types", allowed=allowed, why=why)
    return list(kinds)


def _dtype(ctx: Context, config: Config) -> str:
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        option = "kv_dtype" if ctx.options.kv_dtype else "config.dtype"
        raise ctx.refuse(option, allowed=", ".join(DTYPES), why="no quantised cache was certified")
    return dtype
