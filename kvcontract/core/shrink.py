"""A small model of any real one: the same kinds of layers and ratios, few enough parameters for a CPU.

What makes a model's cache hard to serve is kept: one full period of its layer kinds, the ratio of query to
key/value heads and their divisibility, partial rotation, expert routing, sparse indexing.  What only makes
it large is cut.  Pure arithmetic over a parsed config.json; a key that is not known here stays untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

MIN_LAYERS: Final = 4
_MIN_PERIODIC: Final = 2
VOCAB: Final = 512
MAX_POSITIONS: Final = 8192
WINDOW_TOKENS: Final = 32
INDEX_HEADS: Final = 16
INDEX_TOPK: Final = 64
_HEAD_RATIO: Final = 16
_DIM_DIVISOR: Final = 8
_MIN_DIM: Final = 8
_STEP: Final = 16
_MIN_HIDDEN: Final = 64
_MLA_HIDDEN: Final = 128
_EXPERTS: Final = 8

# Layer i is of another kind where i is a multiple of the value, or one less.
_INTERVAL_KEYS: Final = (
    "attn_layer_period",
    "decoder_sparse_step",
    "expert_layer_period",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "moe_layer_freq",
    "sliding_window_pattern",
)
_LAYER_INDEX_KEYS: Final = ("mlp_only_layers", "moe_layers")
_EXPERT_KEYS: Final = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOPK_KEYS: Final = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
_HEAD_DIM_KEYS: Final = (
    "global_head_dim",
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "query_pre_attn_scalar",
    "swa_head_dim",
    "v_head_dim",
)
_WIDTH_KEYS: Final = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# Told apart, so that one in the other's place is seen.
_RANK_LIMITS: Final = {"kv_lora_rank": 64, "q_lora_rank": 48}
_WINDOW_KEYS: Final = ("attention_chunk_size", "sliding_window")
_VOCAB_KEYS: Final = ("vocab_size", "vocab_size_per_layer_input")
_TOKEN_ID_SUFFIXES: Final = ("_token_id", "_token_ids", "_token_index")
# Towers for what is no text: left out.
_TOWER_KEYS: Final = ("audio_config", "vision_config")


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A small config and what was changed to get it.

    Attributes:
        config: a parsed config.json of the same shape as the one given.
        changes: by dotted key, (before, after).
    """

    config: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]


def shrink(config: Mapping[str, Any]) -> Shrunk:
    """Make the config of a small model of the same kind, at most 20 million parameters.

    Args:
        config: parsed config.json of a real checkpoint; one nested in ``text_config`` is found.
    """
    after = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        after["text_config"] = _shrink_text({**config["text_config"]})
        vocab = after["text_config"].get("vocab_size", VOCAB)
        after |= _token_ids(after, vocab)
        after |= {key: min(config[key], VOCAB) for key in _VOCAB_KEYS if _is_int(config.get(key))}
        after |= {key: None for key in _TOWER_KEYS if key in config}
    else:
        after = _shrink_text(after)
    return Shrunk(after, dict(_changes(config, after, "")))


def _shrink_text(config: dict[str, Any]) -> dict[str, Any]:
    """Apply every rule, each to the original values; the rules own disjoint keys."""
    changed: dict[str, Any] = {}
    for rule in _RULES:
        changed |= rule(config)
    kept = {key: value for key, value in changed.items() if key in config}
    return {**config, **kept}


def layer_count(config: Mapping[str, Any]) -> int:
    """Layers of the small model: those before the pattern sets in, then one period, at least four."""
    return len(_kept_layers(config))


def _kept_layers(config: Mapping[str, Any]) -> list[int]:
    """Which layers of the real model the small one has; of those at the end that share, the last period."""
    total = int(config["num_hidden_layers"])
    kinds = _layer_kinds(config, total)
    shared = _shared_layers(config)
    prefix, period = _pattern(kinds[: total - shared])
    count = prefix + period
    while count < MIN_LAYERS:
        count += period
    kept = list(range(min(count, total - shared)))
    return kept + list(range(total - sum(_pattern(kinds[total - shared :])), total)) if shared else kept


def _shared_layers(config: Mapping[str, Any]) -> int:
    """Layers at the end that keep no keys and values of their own."""
    shared = config.get("num_kv_shared_layers")
    return shared if _is_int(shared) and 0 < shared < int(config["num_hidden_layers"]) else 0


def _layer_kinds(config: Mapping[str, Any], total: int) -> list[tuple[Any, ...]]:
    """What tells the layers of a model apart, one tuple each."""
    columns: list[list[Any]] = [
        value for value in config.values() if isinstance(value, list) and len(value) == total
    ]
    for key in _INTERVAL_KEYS:
        step = config.get(key)
        if _is_int(step) and step > 1:
            columns.append([index % step for index in range(total)])
    dense = config.get("first_k_dense_replace")
    if _is_int(dense):
        columns.append([index < dense for index in range(total)])
    return [tuple(map(str, kinds)) for kinds in zip(*columns, strict=True)] if columns else [()] * total


def _pattern(kinds: list[tuple[Any, ...]]) -> tuple[int, int]:
    """(layers before, period): the shortest start after which the kinds repeat to the end."""
    total = len(kinds)
    found = [
        (prefix, period)
        for prefix in range(total)
        for period in range(1, (total - prefix) // _MIN_PERIODIC + 1)
        if all(kinds[i] == kinds[i + period] for i in range(prefix, total - period))
    ]
    return min(found, key=lambda pair: (sum(pair), pair[0]), default=(0, total))


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    total, kept = int(config["num_hidden_layers"]), _kept_layers(config)
    count = len(kept)
    changed: dict[str, Any] = {
        key: [value[index] for index in kept]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == total
    }
    for key in _LAYER_INDEX_KEYS:
        if isinstance(config.get(key), list):
            changed[key] = [new for new, index in enumerate(kept) if index in config[key]]
    own = total - _shared_layers(config)
    changed["num_kv_shared_layers"] = sum(index >= own for index in kept)
    if isinstance(config.get("per_layer_config"), Mapping):
        given = {int(index): values for index, values in config["per_layer_config"].items()}
        changed["per_layer_config"] = {
            str(new): _layer_overrides(config, given[index])
            for new, index in enumerate(kept)
            if index in given
        }
    if _is_int(config.get("max_window_layers")):
        changed["max_window_layers"] = count // 2 if config.get("use_sliding_window") else count
    return {**changed, "num_hidden_layers": count}


def _layer_overrides(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What one layer has otherwise than the rest, made small in the same way."""
    changed = {key: _dim(int(values[key])) for key in _HEAD_DIM_KEYS if _is_int(values.get(key))}
    if _is_int(values.get("num_key_value_heads")):
        changed["num_key_value_heads"] = _few_of(values["num_key_value_heads"], config)
    return {**values, **changed}


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if _is_int(config.get("num_attention_heads")):
        heads, kv_heads = _head_pair(
            config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
        )
        changed |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if _is_int(config.get("num_global_key_value_heads")):
        own = _few_of(config["num_global_key_value_heads"], config)
        changed["num_global_key_value_heads"] = own
    if _is_int(config.get("linear_num_value_heads")) and _is_int(config.get("linear_num_key_heads")):
        heads, kv_heads = _head_pair(config["linear_num_value_heads"], config["linear_num_key_heads"])
        changed |= {"linear_num_value_heads": heads, "linear_num_key_heads": kv_heads}
    if _is_int(config.get("index_n_heads")):
        changed["index_n_heads"] = min(config["index_n_heads"], INDEX_HEADS)
    return changed


def _head_pair(heads: int, kv_heads: int) -> tuple[int, int]:
    """(query heads, key/value heads) of the same ratio; an even number of key/value heads stays even."""
    if heads == kv_heads:
        return (4, 4) if heads % 4 == 0 else (_few(heads), _few(heads))
    ratio = heads // kv_heads
    if ratio > _HEAD_RATIO:
        ratio = max(n for n in range(1, _HEAD_RATIO + 1) if ratio % n == 0)
    return _few(kv_heads) * ratio, _few(kv_heads)


def _few_of(kv_heads: int, config: Mapping[str, Any]) -> int:
    """Key/value heads of layers that have other ones than most: they still divide the query heads."""
    heads = config["num_attention_heads"]
    small, _ = _head_pair(heads, config.get("num_key_value_heads") or heads)
    return math.gcd(_few(kv_heads), small)


def _few(count: int) -> int:
    """The smallest prime factor, so that what divides stays divisible; 1 stays 1."""
    return next((n for n in range(2, count + 1) if count % n == 0), 1)


def _dim(size: int) -> int:
    """An eighth of a head's width, even because rotation pairs elements."""
    return min(size, max(_MIN_DIM, 2 * round(size / _DIM_DIVISOR / 2)))


def _dims(config: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {
        key: _dim(int(config[key]))
        for key in _HEAD_DIM_KEYS
        if _is_int(config.get(key)) or isinstance(config.get(key), float)
    }
    changed |= {
        key: min(_dim(config[key]), limit) for key, limit in _RANK_LIMITS.items() if _is_int(config.get(key))
    }
    if _is_int(config.get("index_head_dim")):
        # Holds a rotated part of qk_rope_head_dim beside the plain one.
        rotated = changed.get("qk_rope_head_dim", 0)
        changed["index_head_dim"] = max(_dim(config["index_head_dim"]), 2 * rotated)
    if _is_int(config.get("hidden_size")):
        changed["hidden_size"] = _hidden(config)
        changed |= _widths(config, changed["hidden_size"])
    return changed


def _hidden(config: Mapping[str, Any]) -> int:
    """As wide, against heads x width of a head, as in the real model."""
    hidden, heads = int(config["hidden_size"]), config.get("num_attention_heads")
    if "kv_lora_rank" in config or not _is_int(heads):
        return min(hidden, _MLA_HIDDEN)
    small_heads = _heads(config)["num_attention_heads"]
    if not _is_int(config.get("head_dim")):
        # The width of a head is hidden_size / heads here: it must come out whole.
        return int(small_heads * _dim(hidden // heads))
    wide: float = hidden / (heads * config["head_dim"]) * small_heads * _dim(config["head_dim"])
    return min(hidden, max(_MIN_HIDDEN, _STEP * round(wide / _STEP)))


def _widths(config: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    ratio = hidden / int(config["hidden_size"])

    def scaled(value: int) -> int:
        return min(value, max(2 * _STEP, _STEP * round(value * ratio / _STEP)))

    changed: dict[str, Any] = {}
    for key in _WIDTH_KEYS:
        value = config.get(key)
        if _is_int(value) and value:
            changed[key] = scaled(value)
        elif isinstance(value, list):
            changed[key] = [scaled(value[index]) for index in _kept_layers(config) if index < len(value)]
    return changed


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    count = next((config[key] for key in _EXPERT_KEYS if _is_int(config.get(key)) and config[key]), None)
    if count is None:
        return {}
    experts = min(int(count), _EXPERTS)
    groups = math.gcd(int(config.get("n_group") or 1), experts // 2 or 1)
    chosen = max(1, round((config.get("topk_group") or 1) * groups / (config.get("n_group") or 1)))
    reachable = experts // groups * chosen
    changed: dict[str, Any] = {key: experts for key in _EXPERT_KEYS if config.get(key)}
    if _is_int(config.get("n_group")):
        changed |= {"n_group": groups, "topk_group": chosen}
    for key in _TOPK_KEYS:
        if _is_int(config.get(key)):
            changed[key] = min(config[key], max(1, min(2, reachable)))
    return changed


def _lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: min(config[key], WINDOW_TOKENS) for key in _WINDOW_KEYS if _is_int(config.get(key))}
    if _is_int(config.get("index_topk")):
        changed["index_topk"] = min(config["index_topk"], INDEX_TOPK)
    if _is_int(config.get("max_position_embeddings")) and not _stretched(config):
        changed["max_position_embeddings"] = min(config["max_position_embeddings"], MAX_POSITIONS)
    return changed


def _stretched(config: Mapping[str, Any]) -> bool:
    """Whether rotation depends on the context length: then the length stays what it is."""
    return any(
        isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default"
        for rope in (config.get("rope_scaling"), config.get("rope_parameters"))
    )


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a multi-axis rotation add up to half of what is rotated."""
    changed: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
        if not isinstance(rope, Mapping) or not sections:
            continue
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        pairs = int(_dim(config["head_dim"]) * part) // 2
        small = [pairs * section // sum(sections) for section in sections]
        changed[key] = {**rope, "mrope_section": [small[0] + pairs - sum(small), *small[1:]]}
    return changed


def _vocabulary(config: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {
        key: min(config[key], VOCAB) for key in _VOCAB_KEYS if _is_int(config.get(key))
    }
    return changed | _token_ids(config, changed.get("vocab_size", VOCAB))


def _token_ids(config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Bring special ids inside the vocabulary: equal ones stay equal, others apart."""
    keys = [key for key in config if key.endswith(_TOKEN_ID_SUFFIXES)]
    listed = {key: config[key] if isinstance(config[key], list) else [config[key]] for key in keys}
    used = {item for items in listed.values() for item in items if _is_int(item)}
    free = iter(sorted(set(range(vocab)) - used, reverse=True))
    inside = {item: item if item < vocab else next(free) for item in sorted(used)}
    return {
        key: [inside.get(item, item) for item in items]
        if isinstance(config[key], list)
        else inside.get(items[0], items[0])
        for key, items in listed.items()
    }


_RULES: Final[tuple[Callable[[Mapping[str, Any]], dict[str, Any]], ...]] = (
    _layers,
    _heads,
    _dims,
    _experts,
    _lengths,
    _rotation,
    _vocabulary,
)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str
) -> list[tuple[str, tuple[Any, Any]]]:
    found: list[tuple[str, tuple[Any, Any]]] = []
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            found += _changes(old, value, f"{prefix}{key}.")
        elif value != old:
            found.append((f"{prefix}{key}", (old, value)))
    return found
