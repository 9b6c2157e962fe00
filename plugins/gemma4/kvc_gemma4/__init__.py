"""The Gemma 4 family: sliding-window attention, and full attention with wider heads every few layers.

Every number is read from the checkpoint's config.json.  A 12B model in bfloat16 keeps, for a token,
40 sliding layers x 2 planes x 8 heads x 256 channels x 2 B = 320 KiB while the token lies in the window of
1,024, and 8 full layers x 2 planes x 1 head x 512 channels x 2 B = 16 KiB for good.

Layers that share another layer's keys and values keep none of their own.  The generic executor serves text:
prompts with image, video or audio tokens are refused.  Image tokens attend both ways, so an engine that
computes them hands each image to the store as an uncut item: no chunk and no prefix may end inside one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
PAGE_TOKENS = (16, 64)
PAGE_TOKENS_REASON = "accuracy gates were run at page sizes 16 and 64 only"

SLIDING, FULL = "sliding_attention", "full_attention"

SAMPLE: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "text_config": {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "dtype": "bfloat16",
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": [*[SLIDING] * 5, FULL] * 8,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    },
}
"""The geometry of a 12B model: what is declared, and what the suite shrinks, when no config is given."""

TEXT_TYPES = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
"""Model type of the text model inside a multimodal one; each is taken by itself too."""

PLACEHOLDERS = ("audio_token_id", "image_token_id", "video_token_id")


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps: keys and values of its own."""

    kind: str
    heads: int
    head_dim: int


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """`full` for all tokens, `win` for those of the window; K and V of a layer in its arena."""
    config = _config(ctx)
    layers, dtype = _layers(ctx, config), _dtype(ctx, config)
    groups = [Group(name="full")]
    if any(layer.kind == SLIDING for layer in layers):
        (tokens,) = config.counts("sliding_window")
        groups.append(Group(name="win", reach=Window(tokens=tokens)))
    return KvModel(
        contract=KVC_CONTRACT,
        name="gemma4",
        weights=ctx.weights,
        numerics=dtype,
        page_tokens=ctx.options.page_tokens or PAGE_TOKENS[0],
        page_tokens_allowed=PAGE_TOKENS,
        page_tokens_reason=PAGE_TOKENS_REASON,
        key_tokens=ctx.options.key_tokens,
        groups=tuple(groups),
        arenas=tuple(_arena(index, layer, dtype) for index, layer in enumerate(layers)),
    )


@hookimpl
def kvc_executor(ctx: Context) -> HfLayers:
    """The generic executor runs the family; layers that share are left out."""
    layers = _layers(ctx, _config(ctx))
    whole = ctx.config if ctx.config is not None else {}
    ids = (whole.get(key) for key in PLACEHOLDERS)
    return HfLayers(
        {i: Attention(keys=(_name(i), "k"), values=(_name(i), "v")) for i in range(len(layers))},
        placeholder_ids=frozenset(item for item in ids if item is not None),
    )


@hookimpl
def kvc_samples(ctx: Context) -> tuple[dict[str, Any], ...]:
    """A real geometry for the suite to shrink."""
    del ctx
    return (SAMPLE,)


def _arena(index: int, layer: Layer, dtype: str) -> Arena:
    fields = tuple(
        Field(name=name, dtype=dtype, axes={"head": layer.heads, "dim": layer.head_dim}, shard_axis="head")
        for name in ("k", "v")
    )
    group = "win" if layer.kind == SLIDING else "full"
    return Arena.planes(name=_name(index), group=group, layer=index, fields=fields)


def _name(layer: int) -> str:
    return f"layers.{layer}.kv"


def _config(ctx: Context) -> Config:
    """The text model's config, wherever it stands."""
    config = ctx.config if ctx.config is not None else Config(SAMPLE)
    kind = config["model_type"]
    if kind not in {*TEXT_TYPES, *TEXT_TYPES.values()}:
        allowed = " or ".join([*TEXT_TYPES, *TEXT_TYPES.values()])
        raise ctx.refuse("config.model_type", allowed=allowed, why="this plugin declares one family only")
    if kind in TEXT_TYPES:
        text = config["text_config"]
        if not isinstance(text, Mapping) or text.get("model_type") != TEXT_TYPES[kind]:
            why = "it is no text model of this family"
            raise ctx.refuse("config.text_config.model_type", allowed=TEXT_TYPES[kind], why=why)
        config = Config(text)
    if config.get("use_bidirectional_attention") == "all":
        why = "where every token attends both ways, a row depends on the tokens after it"
        raise ctx.refuse(_path(ctx, "use_bidirectional_attention"), allowed="vision or null", why=why)
    return config


def _path(ctx: Context, key: str) -> str:
    """Where a key of the text model stands in config.json."""
    nested = ctx.config is None or ctx.config["model_type"] in TEXT_TYPES
    return f"config.text_config.{key}" if nested else f"config.{key}"


def _layers(ctx: Context, config: Config) -> list[Layer]:
    """The layers that keep keys and values of their own: the last ones may share those of earlier ones."""
    kinds = _kinds(ctx, config)
    shared = config.get("num_kv_shared_layers", 0)
    own = kinds[: len(kinds) - shared] if type(shared) is int and shared >= 0 else []
    if set(own) != set(kinds):
        why = "of every kind, one layer at least keeps its own"
        raise ctx.refuse(_path(ctx, "num_kv_shared_layers"), allowed=f"0 <= n < {len(kinds)}", why=why)
    heads, head_dim = config.counts("num_key_value_heads", "head_dim")
    wide = _overrides(ctx, config, kinds)
    return [
        Layer(kind, **{"heads": heads, "head_dim": head_dim, **wide.get(index, {})})
        for index, kind in enumerate(own)
    ]


def _kinds(ctx: Context, config: Config) -> list[str]:
    """What each layer is; transformers makes the last one full whatever the config says."""
    (layers,) = config.counts("num_hidden_layers")
    (kinds,) = config.facts("layer_types")
    known = isinstance(kinds, list) and len(kinds) == layers and not set(kinds) - {SLIDING, FULL}
    if not known or kinds[-1] != FULL:
        allowed = f"a list of {layers}, {SLIDING} or {FULL} each, {FULL} last"
        raise ctx.refuse(_path(ctx, "layer_types"), allowed=allowed, why="each layer is one of two kinds")
    return list(kinds)


OVERRIDES = {"num_key_value_heads": "heads", "head_dim": "head_dim"}


def _overrides(ctx: Context, config: Config, kinds: list[str]) -> dict[int, dict[str, int]]:
    """What layers keep otherwise than the config says for all: released files have one of two spellings."""
    listed = config.get("per_layer_config")
    if listed is None:
        (head_dim,) = config.counts("global_head_dim")
        # Only where keys stand for values too do full layers have a number of heads of their own.
        own = config.get("attention_k_eq_v", False) and config.get("num_global_key_value_heads") is not None
        heads = config.counts("num_global_key_value_heads" if own else "num_key_value_heads")[0]
        wide = {"heads": heads, "head_dim": head_dim}
        return {index: wide for index, kind in enumerate(kinds) if kind == FULL}
    found: dict[int, dict[str, int]] = {}
    for key, values in listed.items() if isinstance(listed, Mapping) else [("", listed)]:
        inside = str(key).isdigit() and int(key) < len(kinds)
        if not inside or not isinstance(values, Mapping) or set(values) - set(OVERRIDES):
            why = "what else may differ between layers is not declared"
            allowed = f"layers below {len(kinds)} with {', '.join(OVERRIDES)}"
            raise ctx.refuse(_path(ctx, "per_layer_config"), allowed=allowed, why=why)
        counts = Config(values).counts(*values)
        found[int(key)] = dict(zip((OVERRIDES[name] for name in values), counts, strict=True))
    return found


def _dtype(ctx: Context, config: Config) -> str:
    if ctx.options.drafter is not None:
        why = "a drafter's state is not declared for this family yet"
        raise ctx.refuse("drafter", allowed="no drafter", why=why)
    dtype = ctx.options.kv_dtype or config.dtype
    if dtype not in DTYPES:
        why = "accuracy gates were run with unquantised caches only"
        source = "kv_dtype" if ctx.options.kv_dtype else _path(ctx, "dtype")
        raise ctx.refuse(source, allowed=", ".join(DTYPES), why=why)
    return dtype
