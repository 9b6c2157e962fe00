"""The Qwen3.5 family (dense): full attention every few layers, gated delta nets between.

Every number is read from the checkpoint's config.json.  A 4B model in bfloat16 keeps, for a token, 8 layers
x 2 planes x 4 heads x 256 channels x 2 B = 32,768 B; and for a request, whatever its length, 24 layers x
(32 heads x 128 x 128 x 4 B + 8,192 channels x 3 columns x 2 B) = 51,511,296 B.

The model is served as the text model it holds: prompts with image or video tokens are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    hookimpl,
)

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16, 64)
PAGE_TOKENS_REASON = "accuracy gates were run at page sizes 16 and 64 only"

STATE_DTYPE = "float32"
"""Of the recurrent state, whatever the model computes in."""

CHUNK_TOKENS = 64
"""The linear kernel works in chunks of so many tokens, counted from where a prefill begins: cutting it
between two chunks changes no bit of the state that the kernel computes, cutting it inside one does."""

SAMPLE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "vocab_size": 248320,
    },
}
"""The geometry of Qwen3.5-4B: what is declared, and what the suite shrinks, when no config is given."""

WHOLE, TEXT = "qwen3_5", "qwen3_5_text"
MODEL_TYPES = (WHOLE, TEXT)
LINEAR, FULL = "linear_attention", "full_attention"
PLACEHOLDERS = ("image_token_id", "video_token_id")


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """`kv` grows with tokens; `gdn` is a recurrent and a convolution state for each linear layer."""
    config = _config(ctx)
    dtype = _dtype(ctx, config)
    arenas: list[Arena] = []
    for layer, kind in enumerate(_kinds(ctx, config)):
        if kind == FULL:
            arenas.append(_attention(config, layer, dtype))
        else:
            arenas += _delta_net(ctx, config, layer, dtype)
    return KvModel(
        contract=KVC_CONTRACT,
        name="qwen35",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=(
            Group(name="kv"),
            Group(name="gdn", kind="bounded", boundary_tokens=CHUNK_TOKENS),
        ),
        arenas=tuple(arenas),
    )


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The generic executor runs the family: rows of full layers to pages, states of linear ones to a slot."""
    config = _config(ctx)
    layers: dict[int, Attention | Recurrent] = {}
    for layer, kind in enumerate(_kinds(ctx, config)):
        if kind == FULL:
            layers[layer] = Attention(keys=(_kv(layer), "k"), values=(_kv(layer), "v"))
        else:
            conv = _conv(layer)
            layers[layer] = Recurrent(
                state=(_state(layer), "state"), conv=((conv, "q"), (conv, "k"), (conv, "v"))
            )
    whole = ctx.config if ctx.config is not None else {}
    ids = (whole.get(key) for key in PLACEHOLDERS)
    return HfLayers(layers, placeholder_ids=frozenset(item for item in ids if item is not None))


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """A real geometry for the suite to shrink."""
    del ctx
    return (SAMPLE,)


def _attention(config: Config, layer: int, dtype: str) -> Arena:
    heads, head_dim = config.counts("num_key_value_heads", "head_dim")
    fields = tuple(
        Field(name=name, dtype=dtype, axes={"head": heads, "dim": head_dim}, shard_axis="head")
        for name in ("k", "v")
    )
    return Arena.planes(name=_kv(layer), group="kv", layer=layer, fields=fields)


def _delta_net(ctx: Context, config: Config, layer: int, dtype: str) -> tuple[Arena, Arena]:
    key_heads, value_heads, key_dim, value_dim, kernel = config.counts(
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    if value_heads % key_heads:
        why = f"{value_heads} value heads do not share {key_heads} key heads evenly"
        raise ctx.refuse(_path(ctx, "linear_num_key_heads"), allowed=f"a divisor of {value_heads}", why=why)
    if kernel == 1:
        why = "a convolution over one token keeps no state"
        raise ctx.refuse(_path(ctx, "linear_conv_kernel_dim"), allowed="2 or more", why=why)
    state = Field(
        name="state",
        dtype=STATE_DTYPE,
        axes={"head": value_heads, "key": key_dim, "value": value_dim},
        shard_axis="head",
    )

    # Three fields, not one of all channels: a worker's slice has its heads of each.
    def channels(name: str, heads: int, dim: int) -> Field:
        axes = {"head": heads, "dim": dim, "column": kernel - 1}
        return Field(name=name, dtype=dtype, axes=axes, shard_axis="head")

    conv = (
        channels("q", key_heads, key_dim),
        channels("k", key_heads, key_dim),
        channels("v", value_heads, value_dim),
    )
    return (
        Arena.planes(name=_state(layer), group="gdn", layer=layer, fields=(state,)),
        Arena.planes(name=_conv(layer), group="gdn", layer=layer, fields=conv),
    )


def _kv(layer: int) -> str:
    return f"layers.{layer}.kv"


def _state(layer: int) -> str:
    return f"layers.{layer}.state"


def _conv(layer: int) -> str:
    return f"layers.{layer}.conv"


def _config(ctx: Context) -> Config:
    """The text model's config, wherever it stands."""
    config = ctx.config if ctx.config is not None else Config(SAMPLE)
    if config["model_type"] not in MODEL_TYPES:
        why = "this plugin declares one family only"
        raise ctx.refuse("config.model_type", allowed=" or ".join(MODEL_TYPES), why=why)
    if config["model_type"] == WHOLE:
        text = config["text_config"]
        if not isinstance(text, Mapping) or text.get("model_type") != TEXT:
            why = "it is no text model of this family"
            raise ctx.refuse("config.text_config.model_type", allowed=TEXT, why=why)
        config = Config(text)
    if config.get("mamba_ssm_dtype", STATE_DTYPE) != STATE_DTYPE:
        why = "accuracy gates were run with states of full precision only"
        raise ctx.refuse(_path(ctx, "mamba_ssm_dtype"), allowed=STATE_DTYPE, why=why)
    return config


def _path(ctx: Context, key: str) -> str:
    """Where a key of the text model stands in config.json."""
    nested = ctx.config is None or ctx.config["model_type"] == WHOLE
    return f"config.text_config.{key}" if nested else f"config.{key}"


def _kinds(ctx: Context, config: Config) -> list[str]:
    """What each layer is."""
    (layers,) = config.counts("num_hidden_layers")
    (kinds,) = config.facts("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {LINEAR, FULL}:
        why = "each layer is one of two kinds"
        raise ctx.refuse(
            _path(ctx, "layer_types"), allowed=f"a list of {layers}, {LINEAR} or {FULL} each", why=why
        )
    return kinds


def _dtype(ctx: Context, config: Config) -> str:
    """Of keys, values and convolutions."""
    if ctx.options.drafter is not None:
        why = "a drafter's state is not declared for this family yet"
        raise ctx.refuse("drafter", allowed="no drafter", why=why)
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        why = "accuracy gates were run with unquantised caches only"
        source = "kv_dtype" if ctx.options.kv_dtype else _path(ctx, "dtype")
        raise ctx.refuse(source, allowed=", ".join(DTYPES), why=why)
    return dtype
