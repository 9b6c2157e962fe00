"""The KV cache of toy_mla.

A latent and a rotated key of every layer, for all heads at once.

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
    fill_in,
    hookimpl,
)

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16,)
PAGE_TOKENS_REASON = "the suite was run at these page sizes only"

SAMPLE: dict[str, Any] = {
    "model_type": fill_in("model_type", "deepseek_v3"),
    "dtype": fill_in("dtype", "bfloat16"),
    "first_k_dense_replace": fill_in("first_k_dense_replace", 4),
    "hidden_size": fill_in("hidden_size", 512),
    "intermediate_size": fill_in("intermediate_size", 1024),
    "kv_lora_rank": fill_in("kv_lora_rank", 256),
    "max_position_embeddings": fill_in("max_position_embeddings", 8192),
    "num_attention_heads": fill_in("num_attention_heads", 8),
    "num_hidden_layers": fill_in("num_hidden_layers", 4),
    "num_key_value_heads": fill_in("num_key_value_heads", 8),
    "q_lora_rank": fill_in("q_lora_rank", 192),
    "qk_nope_head_dim": fill_in("qk_nope_head_dim", 64),
    "qk_rope_head_dim": fill_in("qk_rope_head_dim", 32),
    "v_head_dim": fill_in("v_head_dim", 64),
    "vocab_size": fill_in("vocab_size", 32000),
}
"""The config.json of a released checkpoint: what is declared, and shrunk by the suite, if none is given."""


# What the model keeps.


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """One group of full attention, the same on every worker; a layer's parts lie one after the other."""
    config = _config(ctx)
    layers, dtype = config.counts("num_hidden_layers")[0], _dtype(ctx, config)
    return KvModel(
        contract=KVC_CONTRACT,
        name="toy_mla",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=(Group(name="kv"),),
        arenas=tuple(_arena(config, layer, dtype) for layer in range(layers)),
    )


def _arena(config: Config, layer: int, dtype: str) -> Arena:
    latent, rope = config.counts("kv_lora_rank", "qk_rope_head_dim")
    sizes = {"latent": latent, "rope": rope}
    fields = tuple(Field(name=name, dtype=dtype, axes={"dim": size}) for name, size in sizes.items())
    return Arena.planes(name=_kv(layer), group="kv", layer=layer, fields=fields)


def _kv(layer: int) -> str:
    return f"layers.{layer}.kv"


# Where the model's own code puts it: the generic executor runs the model over the arenas.


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The model's cache is handed the latent first, then the rotated key."""
    config = _config(ctx)
    (layers,) = config.counts("num_hidden_layers")

    def parts(layer: int) -> Attention:
        return Attention(keys=(_kv(layer), "latent"), values=(_kv(layer), "rope"))

    return HfLayers({layer: parts(layer) for layer in range(layers)})


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


def _dtype(ctx: Context, config: Config) -> str:
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        option = "kv_dtype" if ctx.options.kv_dtype else "config.dtype"
        raise ctx.refuse(option, allowed=", ".join(DTYPES), why="no quantised cache was certified")
    return dtype
