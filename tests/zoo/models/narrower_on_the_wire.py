"""Wrong on purpose: stores fields in fewer bits and asks the runtime to derive how."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, Repack, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-01"
SAYS = r"float8_e4m3fn .*: numbers would change; allowed: bfloat16 or wider"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, stored in half the bytes."""
    model = kvc_qwen3.kvc_model(ctx)
    stored = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"dtype": "float8_e4m3fn"}) for field in arena.fields)
        stored.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "narrower_on_the_wire", "repack": Repack(arenas=tuple(stored))})
