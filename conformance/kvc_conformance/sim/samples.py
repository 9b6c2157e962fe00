"""Declarations that are simulated when no model is named: the shapes that differ for a store."""

from __future__ import annotations

from typing import Final

from kvcontract.contract.model import Arena, Field, Group, KvModel, WeightIdentity

_NAMED: Final = WeightIdentity(kind="digest", value="0" * 32)


def _sharded() -> KvModel:
    """Keys and values of two heads, cut along them."""
    planes = [
        Field(name=name, dtype="float16", axes={"head": 2, "dim": 3}, shard_axis="head")
        for name in ("k", "v")
    ]
    return KvModel(
        contract=1,
        name="sample-sharded",
        weights=_NAMED,
        numerics="float16",
        page_tokens=2,
        groups=(Group(name="kv"),),
        arenas=tuple(
            Arena.planes(name=f"layer.{layer}", group="kv", layer=layer, fields=tuple(planes))
            for layer in range(2)
        ),
    )


def _replicated() -> KvModel:
    """Interleaved rows that every worker holds, in blocks further apart than their content."""
    row = (
        Field(name="latent", dtype="uint8", axes={"dim": 6}),
        Field(name="rope", dtype="bfloat16", axes={"dim": 2}),
    )
    return KvModel(
        contract=1,
        name="sample-replicated",
        weights=_NAMED,
        numerics="bfloat16",
        page_tokens=2,
        groups=(Group(name="mla"),),
        arenas=(Arena.rows(name="layer.0", group="mla", layer=0, fields=row, stride_multiple_bytes=12),),
    )


def _mixed() -> KvModel:
    """Two groups that move as one, of which one is cut over workers and the other held by all."""
    return KvModel(
        contract=1,
        name="sample-mixed",
        weights=_NAMED,
        numerics="uint8",
        page_tokens=2,
        groups=(Group(name="kv"), Group(name="index")),
        arenas=(
            Arena.planes(
                name="kv.0",
                group="kv",
                layer=0,
                fields=(Field(name="kv", dtype="uint8", axes={"head": 4, "dim": 3}, shard_axis="head"),),
            ),
            Arena.planes(
                name="index.0",
                group="index",
                layer=0,
                fields=(Field(name="key", dtype="uint8", axes={"dim": 5}),),
            ),
        ),
    )


def _wide() -> KvModel:
    """Records of two pages, with tokens inside the heads: a page is in pieces on the wire."""
    axes = {"head": 2, "token": 1, "dim": 3}
    return KvModel(
        contract=1,
        name="sample-wide",
        weights=_NAMED,
        numerics="float16",
        page_tokens=2,
        key_tokens=4,
        groups=(Group(name="kv"),),
        arenas=(
            Arena.planes(
                name="layer.0",
                group="kv",
                layer=0,
                fields=tuple(
                    Field(name=name, dtype="float16", axes=axes, shard_axis="head") for name in ("k", "v")
                ),
            ),
        ),
    )


def samples() -> tuple[KvModel, ...]:
    """All of them."""
    return (_sharded(), _replicated(), _mixed(), _wide())
