"""The KV cache of toy_sliding.

Keys and values of layers that see all tokens, and of layers that see a window.

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
    Window,
    fill_in,
    hookimpl,
)

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16,)
PAGE_TOKENS_REASON = "the suite was run at these page sizes only"

FULL, SLIDING = "full_attention", "sliding_attention"

SAMPLE: dict[str, Any] = {
    "model_type": fill_in("model_type", "ministral"),
    "dtype": fill_in("dtype", "bfloat16"),
    "head_dim": fill_in("head_dim", 64),
    "hidden_size": fill_in("hidden_size", 512),
    "intermediate_size": fill_in("intermediate_size", 1024),
    "layer_types": fill_in("layer_types", ["sliding_attention", "full_attention"] * 2),
    "max_position_embeddings": fill_in("max_position_embeddings", 8192),
    "num_attention_heads": fill_in("num_attention_heads", 8),
    "num_hidden_layers": fill_in("num_hidden_layers", 4),
    "num_key_value_heads": fill_in("num_key_value_heads", 4),
    "sliding_window": fill_in("sliding_window", 128),
    "vocab_size": fill_in("vocab_size", 32000),
}
"""The config.json of a released checkpoint: what is declared, and shrunk by the suite, if none is given."""


# What the model keeps.


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """`full` for all tokens, `win` for those of the window; K and V of a layer in its arena."""
    config = _config(ctx)
    kinds, dtype = _kinds(ctx, config), _dtype(ctx, config)
    groups = [Group(name="full")]
    if SLIDING in kinds:
        (tokens,) = config.counts("sliding_window")  # the current one counts
        groups.append(Group(name="win", reach=Window(tokens=tokens)))
    return KvModel(
        contract=KVC_CONTRACT,
        name="toy_sliding",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=tuple(groups),
        arenas=tuple(_arena(config, layer, kind, dtype) for layer, kind in enumerate(kinds)),
    )


def _arena(config: Config, layer: int, kind: str, dtype: str) -> Arena:
    heads, head_dim = config.counts("num_key_value_heads", "head_dim")
    axes = {"head": heads, "dim": head_dim}
    fields = tuple(Field(name=name, dtype=dtype, axes=axes, shard_axis="head") for name in ("k", "v"))
    group = "win" if kind == SLIDING else "full"
    return Arena.planes(name=_kv(layer), group=group, layer=layer, fields=fields)


def _kv(layer: int) -> str:
    return f"layers.{layer}.kv"


# Where the model's own code puts it: the generic executor runs the model over the arenas.


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """Each layer's keys and values go to its arena."""
    layers = range(len(_kinds(ctx, _config(ctx))))
    return HfLayers({i: Attention(keys=(_kv(i), "k"), values=(_kv(i), "v")) for i in layers})


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
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        allowed, why = f"a list of {layers}, {FULL} or {SLIDING} each", "each layer is one of two kinds"
        raise ctx.refuse("config.layer_types", allowed=allowed, why=why)
    return list(kinds)


def _dtype(ctx: Context, config: Config) -> str:
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        option = "kv_dtype" if ctx.options.kv_dtype else "config.dtype"
        raise ctx.refuse(option, allowed=", ".join(DTYPES), why="no quantised cache was certified")
    return dtype
