"""Wrong on purpose: packs elements of four bits into rows of an odd length."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl
from kvcontract.contract.model import Axes

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-01"
SAYS = r"dim of 4-bit elements does not fill whole bytes; allowed: a last axis that is a multiple of 2"
LEVEL = "L0"
ODD = Axes([("head", 8), ("dim", 127)])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, packed."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        fields = tuple(
            field.model_copy(update={"dtype": ctx.options.kv_dtype or "int4", "axes": ODD})
            for field in arena.fields
        )
        arenas.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "half_a_byte", "arenas": tuple(arenas)})
