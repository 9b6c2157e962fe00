"""The KV cache of toy_nested.

Keys and values of layers that see all tokens, and of layers that see a window.

Every number is read from the checkpoint's config.json.
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
    Window,
    hookimpl,
)

KVC_CONTRACT = 1

DTYPES = ("bfloat16", "float16", "float32")
PAGE_TOKENS = (16,)
PAGE_TOKENS_REASON = "the suite was run at these page sizes only"

FULL, SLIDING = "full_attention", "sliding_attention"

SAMPLE: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "image_token_id": 258880,
    "video_token_id": 258884,
    "audio_token_id": 258881,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "dtype": "bfloat16",
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
}
"""The config.json of a released checkpoint: what is declared, and shrunk by the suite, if none is given."""

MODEL_TYPES = (SAMPLE["model_type"], SAMPLE["text_config"]["model_type"])
PLACEHOLDERS = ("audio_token_id", "image_token_id", "video_token_id")
"""Keys of token ids that stand for what is no text: the generic executor refuses prompts that hold one."""


# What the model keeps.


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """`full` for all tokens, `win` for those of the window; K and V of a layer in its arena."""
    config = _config(ctx)
    kinds, dtype = _own(ctx, config), _dtype(ctx, config)
    groups = [Group(name="full")]
    if SLIDING in kinds:
        (tokens,) = config.counts("sliding_window")  # the current one counts
        groups.append(Group(name="win", reach=Window(tokens=tokens)))
    return KvModel(
        contract=KVC_CONTRACT,
        name="toy_nested",
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
    heads, head_dim = _heads_of(config, kind)
    axes = {"head": heads, "dim": head_dim}
    fields = tuple(Field(name=name, dtype=dtype, axes=axes, shard_axis="head") for name in ("k", "v"))
    group = "win" if kind == SLIDING else "full"
    return Arena.planes(name=_kv(layer), group=group, layer=layer, fields=fields)


def _kv(layer: int) -> str:
    return f"layers.{layer}.kv"


# Where the model's own code puts it: the generic executor runs the model over the arenas.


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """Each layer's keys and values go to its arena; layers that share another's are left out."""
    layers = range(len(_own(ctx, _config(ctx))))
    whole = ctx.config if ctx.config is not None else Config(SAMPLE)
    ids = frozenset(whole[key] for key in PLACEHOLDERS if whole.get(key) is not None)
    return HfLayers(
        {i: Attention(keys=(_kv(i), "k"), values=(_kv(i), "v")) for i in layers},
        placeholder_ids=ids,
    )


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """Configs for the suite to shrink and run."""
    del ctx
    return (SAMPLE,)


# Facts, out of the config.


def _config(ctx: Context) -> Config:
    """The text model's config, wherever it stands."""
    whole = ctx.config if ctx.config is not None else Config(SAMPLE)
    if whole["model_type"] not in MODEL_TYPES:
        allowed, why = " or ".join(MODEL_TYPES), "this plugin declares one family only"
        raise ctx.refuse("config.model_type", allowed=allowed, why=why)
    text = whole.get("text_config", whole)
    if not isinstance(text, Mapping):
        raise ctx.refuse("config.text_config", allowed="the text model's config", why="it is none")
    return Config(text)


def _kinds(ctx: Context, config: Config) -> list[str]:
    """What each layer is."""
    (layers,) = config.counts("num_hidden_layers")
    (kinds,) = config.facts("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        allowed, why = f"a list of {layers}, {FULL} or {SLIDING} each", "each layer is one of two kinds"
        raise ctx.refuse("config.layer_types", allowed=allowed, why=why)
    return list(kinds)


def _own(ctx: Context, config: Config) -> list[str]:
    """What the layers are that keep keys and values; the last ones may share those of earlier ones."""
    kinds, shared = _kinds(ctx, config), config.get("num_kv_shared_layers", 0)
    own = kinds[: len(kinds) - shared] if type(shared) is int and shared >= 0 else []
    if set(own) != set(kinds):
        allowed, why = f"0 <= n < {len(kinds)}", "of every kind, one layer at least keeps its own"
        raise ctx.refuse("config.num_kv_shared_layers", allowed=allowed, why=why)
    return own


def _heads_of(config: Config, kind: str) -> tuple[int, int]:
    """Heads of keys and values, and their width; full layers have ones of their own."""
    if kind == SLIDING:
        heads, head_dim = config.counts("num_key_value_heads", "head_dim")
        return heads, head_dim
    # Only where keys stand for values too do full layers have a number of heads of their own.
    own = config.get("attention_k_eq_v", False) and config.get("num_global_key_value_heads") is not None
    key = "num_global_key_value_heads" if own else "num_key_value_heads"
    heads, head_dim = config.counts(key, "global_head_dim")
    return heads, head_dim


def _dtype(ctx: Context, config: Config) -> str:
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        option = "kv_dtype" if ctx.options.kv_dtype else "config.dtype"
        raise ctx.refuse(option, allowed=", ".join(DTYPES), why="no quantised cache was certified")
    return dtype
