"""Declarations that are simulated when no model is named: the shapes that differ for a store."""

from __future__ import annotations

from typing import Final

from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import Arena, Chunk, Field, Group, KvModel, WeightIdentity, Window

_BEFORE: Final = "sample-"
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


def _plane(name: str, group: str, dtype: str = "uint8", *, head: int = 2, cut: bool = True) -> Arena:
    field = Field(name="x", dtype=dtype, axes={"head": head, "dim": 3}, shard_axis="head" if cut else None)
    return Arena.planes(name=name, group=group, layer=0, fields=(field,))


def _windowed() -> KvModel:
    """Full pages, and of others only the latest, and the first: records of two pages."""
    return KvModel(
        contract=1,
        name="sample-windowed",
        weights=_NAMED,
        numerics="uint8",
        page_tokens=2,
        key_tokens=4,
        groups=(Group(name="kv"), Group(name="near", reach=Window(tokens=4, sink_tokens=1))),
        arenas=(_plane("full.0", "kv", head=4), _plane("near.0", "near", "float16", cut=False)),
    )


def _hybrid() -> KvModel:
    """Full pages, pages of the current chunk, and a state that every token rewrites."""
    return KvModel(
        contract=1,
        name="sample-hybrid",
        weights=_NAMED,
        numerics="uint8",
        page_tokens=2,
        groups=(
            Group(name="kv"),
            Group(name="chunk", reach=Chunk(tokens=6)),
            Group(name="state", kind="bounded", boundary_tokens=2),
        ),
        arenas=(
            _plane("full.0", "kv", cut=False),
            _plane("chunk.0", "chunk"),
            _plane("state.0", "state", "float32"),
        ),
    )


def samples() -> tuple[KvModel, ...]:
    """All of them."""
    return (_sharded(), _replicated(), _mixed(), _wide(), _windowed(), _hybrid())


def mix() -> tuple[KvModel, ...]:
    """Those that seeds go to in turn: of five, one has something beside full pages, which takes longer."""
    *paged, windowed, hybrid = samples()
    return (*paged, windowed, *paged, hybrid)


def sample(name: str) -> KvModel:
    """The one of that name, without ``sample-`` before it.

    Raises:
        UsageFault: there is none.
    """
    known = {model.name.removeprefix(_BEFORE): model for model in samples()}
    if name not in known:
        raise UsageFault(f"--model {name}: expected one of {', '.join(known)}")
    return known[name]
