"""Right, if odd: multi-head latent attention keeps one latent and one rotated key a token, for all heads.

The fields of a layer differ in width, have no axis of heads, and cannot be cut by tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from kvcontract import Arena, Attention, Config, Context, Field, Group, HfLayers, KvModel, hookimpl

KVC_CONTRACT = 1

SAMPLE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def config_of(ctx: Context) -> Config:
    """The facts; of one family only."""
    config = Config(SAMPLE) if ctx.config is None else ctx.config
    if config["model_type"] != "deepseek_v3":
        raise ctx.refuse("config.model_type", allowed="deepseek_v3", why="it is another family")
    return config


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """One group of full attention; a layer's latents lie before its keys."""
    config = config_of(ctx)
    layers, latent, rope = config.counts("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    dtype = ctx.options.kv_dtype or config.dtype
    fields = tuple(
        Field(name=name, dtype=dtype, axes={"dim": size})
        for name, size in (("latent", latent), ("rope", rope))
    )
    return KvModel(
        contract=KVC_CONTRACT,
        name="mla",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or 64,
        key_tokens=ctx.options.key_tokens,
        groups=(Group(name="kv"),),
        arenas=tuple(
            Arena.planes(name=f"layers.{layer}", group="kv", layer=layer, fields=fields)
            for layer in range(layers)
        ),
    )


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The model hands its cache the latent first, then the rotated key."""
    return HfLayers({a.layer: Attention((a.name, "latent"), (a.name, "rope")) for a in ctx.model.arenas})


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """The geometry of DeepSeek-V3."""
    del ctx
    return (SAMPLE,)
