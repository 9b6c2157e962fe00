"""Wrong on purpose: puts a byte for each token before its keys, which then lie at odd addresses."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Arena, Context, Field, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-03"
SAYS = r"fields\[1\] = 'k': in a page-first block it lies at multiples of 1 B only; allowed: multiples of 2 B"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, as rows that begin with an exponent."""
    model = kvc_qwen3.kvc_model(ctx)
    exponent = Field(name="exponent", dtype="uint8", axes={"one": 1})
    arenas = tuple(
        Arena.rows(name=arena.name, group="kv", layer=arena.layer, fields=(exponent, *arena.fields))
        for arena in model.arenas
    )
    return model.model_copy(update={"name": "byte_before_keys", "arenas": arenas})
