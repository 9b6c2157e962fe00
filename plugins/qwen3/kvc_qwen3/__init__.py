"""The Qwen3 family (dense): grouped-query attention, one paged group, K and V planes per layer.

Every number is read from the checkpoint's config.json.  A 4B model in bfloat16 at page 16 keeps
36 layers x 2 planes x 16 tokens x 8 heads x 128 channels x 2 B = 2,359,296 B a page.
"""

from __future__ import annotations

from typing import Any

from kvcontract import Arena, Attention, Config, Context, Field, Group, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16, 64)
PAGE_TOKENS_REASON = "accuracy gates were run at page sizes 16 and 64 only"

SAMPLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""The geometry of Qwen3-0.6B: what is declared, and what the suite shrinks, when no config is given."""


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """One group of full attention; K and V of a layer lie one after the other in its arena."""
    config = _config(ctx)
    layers, heads, head_dim = config.counts("num_hidden_layers", "num_key_value_heads", "head_dim")
    dtype = _dtype(ctx, config)

    def plane(name: str) -> Field:
        return Field(name=name, dtype=dtype, axes={"head": heads, "dim": head_dim}, shard_axis="head")

    return KvModel(
        contract=KVC_CONTRACT,
        name="qwen3",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=(Group(name="kv"),),
        arenas=tuple(
            Arena.planes(name=_arena(layer), group="kv", layer=layer, fields=(plane("k"), plane("v")))
            for layer in range(layers)
        ),
    )


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The generic executor runs the family: each layer's K and V go to its arena."""
    (layers,) = _config(ctx).counts("num_hidden_layers")
    return HfLayers(
        {i: Attention(keys=(_arena(i), "k"), values=(_arena(i), "v")) for i in range(layers)},
    )


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """A real geometry for the suite to shrink."""
    del ctx
    return (SAMPLE,)


def _arena(layer: int) -> str:
    return f"layers.{layer}.kv"


def _config(ctx: Context) -> Config:
    config = ctx.config if ctx.config is not None else Config(SAMPLE)
    if config["model_type"] != "qwen3":
        raise ctx.refuse("config.model_type", allowed="qwen3", why="this plugin declares one family only")
    if config.get("use_sliding_window"):
        why = "its sliding-window layers have another reach than full attention"
        raise ctx.refuse("config.use_sliding_window", allowed="false", why=why)
    return config


def _dtype(ctx: Context, config: Config) -> str:
    if ctx.options.drafter is not None:
        why = "a drafter's state is not declared for this family yet"
        raise ctx.refuse("drafter", allowed="no drafter", why=why)
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        why = "accuracy gates were run with unquantised caches only"
        source = "kv_dtype" if ctx.options.kv_dtype else "config.dtype"
        if source == "config.dtype" and not config.get("dtype"):
            source = "config.torch_dtype"  # the key's former name
        raise ctx.refuse(source, allowed=", ".join(DTYPES), why=why)
    return dtype
