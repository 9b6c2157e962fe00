"""Small declarations that the contract's tests are made of."""

from __future__ import annotations

from typing import Any

from kvcontract import Arena, Field, Group, KvModel, WeightIdentity


def plane(name: str, *, head: int = 4, dim: int = 8, dtype: str = "bfloat16", **more: Any) -> Field:
    """A field [head, dim] cut along head."""
    return Field(name=name, dtype=dtype, axes={"head": head, "dim": dim}, shard_axis="head", **more)


def arena(layer: int = 0, **more: Any) -> Arena:
    """K and V planes of one layer."""
    given = {"name": f"layers.{layer}.kv", "group": "kv", "layer": layer, "fields": (plane("k"), plane("v"))}
    return Arena(**{"arrangement": "planes", **given, **more})


def model(**more: Any) -> KvModel:
    """Two layers of grouped-query attention."""
    given: dict[str, Any] = {
        "contract": 1,
        "name": "tiny",
        "weights": WeightIdentity(kind="unresolved"),
        "numerics": "bfloat16",
        "page_tokens": 16,
        "groups": (Group(name="kv"),),
        "arenas": (arena(0), arena(1)),
    }
    return KvModel(**{**given, **more})
