"""What a config.json tells about a model's cache, and what it leaves open.

Nothing here knows a model: kinds and rules are told apart by the keys of the config alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, Literal

from kvc_templates.literal import Missing
from kvcontract.contract.errors import UsageFault

Kind = Literal["gqa", "mla", "sliding", "hybrid"]

KINDS: Final[dict[Kind, str]] = {
    "gqa": "keys and values of every layer, all tokens",
    "mla": "a latent and a rotated key of every layer, all tokens",
    "sliding": "keys and values, of some layers only those of a window",
    "hybrid": "keys and values of some layers, linear-attention state of the others",
}

FULL, SLIDING, LINEAR, INDEXED = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "indexed_attention",
)

DTYPES: Final = ("bfloat16", "float16", "float32")

_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_HEADS: Final = ("head_dim", "num_key_value_heads")
COUNTS: Final[dict[Kind, tuple[str, ...]]] = {
    "gqa": (*_SIZES, *_HEADS),
    "mla": (*_SIZES, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "sliding": (*_SIZES, *_HEADS, "sliding_window"),
    "hybrid": (
        *_SIZES,
        *_HEADS,
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    ),
}
"""By kind, the keys that count something which a declaration, or the small model of it, needs."""

_OPTIONAL_COUNTS: Final = (
    "full_attention_interval",
    "global_head_dim",
    "index_head_dim",
    "num_global_key_value_heads",
    "sliding_window_pattern",
)
_LEFT_OUT: Final = frozenset({"_name_or_path", "auto_map", "quantization_config", "transformers_version"})
_TOWERS: Final = ("audio_config", "vision_config")
_MEDIA: Final = ("audio", "image", "video")
_ID_ENDS: Final = ("_token_id", "_token_index")

BY_HAND: Final = (
    "`kvc contract` says how such state is declared by hand; `--kind hybrid` writes a package to begin with"
)
"""What is left to do where no template fits."""

# Keys, and beginnings of keys, that speak of state which no template declares.
_OTHER_STATE: Final = (
    "attention_chunk_size",
    "attn_layer_period",
    "compress_ratios",
    "hybrid_override_pattern",
    "linear_attn_config",
    "mamba_",
    "per_layer_config",
    "rwkv_",
    "ssm_",
    "state_size",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a fact that a config leaves out follows from others.

    Attributes:
        name: by which templates know it.
        fact: what follows.
        needs: the keys it follows from.
        kinds: in models of which it holds.
        says: the rule, in words.
        holds: whether it does for the values that these keys have.
    """

    name: str
    fact: str
    needs: tuple[str, ...]
    kinds: tuple[Kind, ...]
    says: str
    holds: Callable[[Mapping[str, Any]], bool] = lambda _: True


_WITH_HEADS: Final[tuple[Kind, ...]] = ("gqa", "sliding", "hybrid")
_RULES: Final = (
    Rule(
        "even_heads",
        "head_dim",
        ("hidden_size", "num_attention_heads"),
        _WITH_HEADS,
        "hidden_size / num_attention_heads, as the config leaves it out",
        lambda text: text["hidden_size"] % text["num_attention_heads"] == 0,
    ),
    Rule(
        "all_heads",
        "num_key_value_heads",
        ("num_attention_heads",),
        _WITH_HEADS,
        "num_attention_heads, as the config leaves it out",
    ),
    Rule(
        "interval",
        "layer_types",
        ("full_attention_interval",),
        ("hybrid",),
        "every full_attention_interval-th layer is full",
    ),
    Rule(
        "pattern",
        "layer_types",
        ("sliding_window_pattern",),
        ("sliding",),
        "every sliding_window_pattern-th layer is full",
    ),
    Rule(
        "late",
        "layer_types",
        ("max_window_layers",),
        ("sliding",),
        "the layers from max_window_layers on slide",
    ),
)


@dataclass(slots=True)
class Facts:
    """What a plugin package is made from.

    Attributes:
        kind: of the model's cache.
        sample: a parsed config.json; what is not known stands in it as `Missing`.
        rules: names of the rules that a template follows beside what its kind always needs.
        placeholder_ids: keys of token ids that stand for an image or a sound.
        nested: whether the text model's config lies in ``text_config``.
        inherited: keys that the text model's config lacks and the whole one has.
        missing: facts that are to be filled in, in order.
        derived: by fact, how it was come by, where it is not the value of its key.
        left_out: keys of the config that the sample does not take over.
        assumed: what no config tells, and what is taken for it, in words.
    """

    kind: Kind
    sample: dict[str, Any]
    rules: set[str] = field(default_factory=set)
    placeholder_ids: tuple[str, ...] = ()
    nested: bool = False
    inherited: tuple[str, ...] = ()
    missing: list[str] = field(default_factory=list)
    derived: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    assumed: list[str] = field(default_factory=list)


def stand_ins(kind: Kind) -> dict[str, Any]:
    """A small config of a kind, every value of it a stand-in."""
    text = files("kvc_templates").joinpath("stand_ins", f"{kind}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def bare_facts(kind: Kind) -> Facts:
    """The facts of a package for a model of which only the kind is known: all of them are missing."""
    known = stand_ins(kind)
    sample = {key: Missing(key, value) for key, value in known.items()}
    untold = ["boundary_tokens"] if kind == "hybrid" else []
    return Facts(kind, sample, _rules(kind, known), missing=[*untold, *known])


def facts_of(config: Mapping[str, Any], asked: Kind | None) -> Facts:
    """Derive what can be derived from a config.json.

    Args:
        config: the parsed file.
        asked: the kind that the user named, if any.

    Raises:
        UsageFault: values cannot be what their keys say, the kind cannot be told or is another one, or the
            config speaks of state that no template declares; every fault is named.
    """
    nested = isinstance(config.get("text_config"), Mapping)
    text = dict(config["text_config"]) if nested else dict(config)
    faults = _unserved(config, text)
    kind = _kind(text, asked, faults)
    inherited = tuple(key for key in ("dtype", "torch_dtype") if nested and config.get(key))
    if text.get("dtype") or text.get("torch_dtype"):
        inherited = ()
    faults += _wrong({**{key: config[key] for key in inherited}, **text}, kind or "gqa")
    if faults or kind is None:
        raise UsageFault(f"no plugin can be made from this config: {'; '.join(faults)}; {BY_HAND}")
    found = Facts(kind, {}, _rules(kind, text), nested=nested, inherited=inherited[:1])
    _derive(found, text)
    rest = _taken(text)
    marks = {fact: Missing(fact, _stand_in(kind, fact, text)) for fact in found.missing}
    sample = {**rest, **marks}
    if nested:
        outer = {key: value for key, value in _taken(config).items() if key != "text_config"}
        ids = sorted(key for key in outer if key.startswith(_MEDIA) and key.endswith(_ID_ENDS))
        found.placeholder_ids = tuple(key for key in ids if type(outer[key]) is int)
        found.sample = {**outer, "text_config": sample}
    else:
        found.sample = {"model_type": sample.get("model_type"), **sample}
    found.assumed = _assumed(kind, text)
    found.left_out = tuple(sorted({*config, *text} - {*_taken(config), *_taken(text)}))
    return found


def _taken(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _LEFT_OUT and key not in _TOWERS}


def _kind(text: Mapping[str, Any], asked: Kind | None, faults: list[str]) -> Kind | None:
    """The kind that the keys tell; faults are added to the list."""
    kinds = text.get("layer_types")
    types = {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    told: dict[Kind, str] = {}
    if text.get("kv_lora_rank") is not None:
        told["mla"] = "kv_lora_rank"
    if LINEAR in types or (not types and text.get("full_attention_interval") is not None):
        told["hybrid"] = "layer_types" if types else "full_attention_interval"
    if _slides(text, types):
        told["sliding"] = "layer_types" if types else "sliding_window"
    if not told and (types or text.get("num_attention_heads") is not None):
        told["gqa"] = "num_attention_heads"
    if len(told) > 1:
        keys = ", ".join(f"{kind} by {key}" for kind, key in told.items())
        faults.append(f"it is of several kinds at once ({keys}), which no template declares")
        return asked
    if not told:
        if asked is None:
            faults.append(f"its kind cannot be told from its keys: name it with --kind {'|'.join(KINDS)}")
        return asked
    [(kind, key)] = told.items()
    if asked is not None and asked != kind:
        faults.append(f"--kind {asked}: by its {key} it is of kind {kind}")
    return kind


def _slides(text: Mapping[str, Any], types: set[str]) -> bool:
    if types:
        return SLIDING in types
    return text.get("sliding_window") is not None and bool(text.get("use_sliding_window", True))


def _unserved(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """State that the config speaks of and no template declares."""
    faults = []
    if config.get("is_encoder_decoder"):
        faults.append("is_encoder_decoder: cross-attention is not served by this version")
    kinds = text.get("layer_types")
    other = (
        sorted({str(kind) for kind in kinds} - {FULL, SLIDING, LINEAR, INDEXED})
        if isinstance(kinds, list)
        else []
    )
    if other:
        faults.append(f"layer_types: no template declares {', '.join(other)}")
    linear = isinstance(kinds, list) and LINEAR in kinds
    keys = [
        key
        for key, value in text.items()
        if value is not None and key.startswith(_OTHER_STATE) and not (linear and key.startswith("mamba_"))
    ]
    if keys:
        faults.append(f"{', '.join(sorted(keys))}: no template declares the state these keys speak of")
    return faults


def _wrong(text: Mapping[str, Any], kind: Kind) -> list[str]:
    """Values that are there and cannot be."""
    faults = []
    for key in (*COUNTS[kind], *_OPTIONAL_COUNTS):
        value = text.get(key)
        if value is not None and (type(value) is not int or value < 1):
            faults.append(f"{key} = {value!r}: expected a positive integer")
    dtype = text.get("dtype") or text.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        faults.append(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    model_type = text.get("model_type")
    if model_type is not None and not (isinstance(model_type, str) and model_type.isprintable()):
        faults.append(f"model_type = {model_type!r}: expected printable text")
    faults += [f"{key} = {value!r}: JSON has no such number" for key, value in _odd_numbers(text)]
    layers = text.get("num_hidden_layers")
    for key in ("layer_types", "indexer_types"):
        value = text.get(key)
        if value is not None and not (isinstance(value, list) and len(value) == layers):
            faults.append(f"{key}: expected a list of num_hidden_layers = {layers} kinds")
    kinds = text.get("layer_types")
    if kind in {"sliding", "hybrid"} and isinstance(kinds, list) and FULL not in kinds:
        faults.append(
            f"layer_types: without {FULL} in it, this version of the runtime does not serve the model"
        )
    return faults


def _odd_numbers(value: Any, path: str = "") -> list[tuple[str, float]]:
    """NaN and infinities, with where they stand."""
    if isinstance(value, Mapping):
        return [
            found for key, item in value.items() for found in _odd_numbers(item, f"{path}.{key}".strip("."))
        ]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in _odd_numbers(item, f"{path}[{index}]")]
    return [(path, value)] if isinstance(value, float) and not math.isfinite(value) else []


def _rules(kind: Kind, text: Mapping[str, Any]) -> set[str]:
    """What of a family's spelling a template must follow."""
    rules = set()
    if kind == "mla":
        rules |= {"index"} if text.get("index_head_dim") is not None else set()
        return rules | ({"index_kinds"} if "index" in rules and _some_share(text) else set())
    if kind == "sliding":
        rules |= {"wide"} if text.get("global_head_dim") is not None else set()
        rules |= {"shared"} if text.get("num_kv_shared_layers") is not None else set()
    return rules


def _some_share(text: Mapping[str, Any]) -> bool:
    return any(key in text for key in ("indexer_types", "index_topk_freq", "index_topk_pattern"))


def _stand_in(kind: Kind, fact: str, text: Mapping[str, Any]) -> Any:
    """What stands for a fact; where it is a list of layers, one for each."""
    known = stand_ins(kind)
    layers = int(text.get("num_hidden_layers") or known["num_hidden_layers"])
    if fact == "indexer_types":
        return ["full"] * layers
    if fact == "layer_types":
        kinds = known[fact]
        return [kinds[(index - layers) % len(kinds)] for index in range(layers)]
    return known[fact]


def _assumed(kind: Kind, text: Mapping[str, Any]) -> list[str]:
    found = []
    if kind == "hybrid":
        found.append(
            "boundary_tokens = 64, tokens that the linear kernel works through at a time (KVC-BOUNDED-01)"
        )
    if text.get("num_nextn_predict_layers"):
        found.append("num_nextn_predict_layers: draft layers are not run, so what they keep is not declared")
    return found


def _derive(found: Facts, text: Mapping[str, Any]) -> None:
    """Note what is missing, and by which rule the rest is come by."""
    lacking = [key for key in ("model_type", *COUNTS[found.kind]) if text.get(key) is None]
    if not (found.inherited or text.get("dtype") or text.get("torch_dtype")):
        lacking.append("dtype")
    if found.kind in {"sliding", "hybrid"} and text.get("layer_types") is None:
        lacking.append("layer_types")
    if "index_kinds" in found.rules and text.get("indexer_types") is None:
        lacking.append("indexer_types")
    for rule in _RULES:
        known = all(text.get(key) is not None for key in rule.needs)
        if rule.fact in lacking and found.kind in rule.kinds and known and rule.holds(text):
            lacking.remove(rule.fact)
            found.rules.add(rule.name)
            found.derived[rule.fact] = rule.says
    found.missing = lacking
