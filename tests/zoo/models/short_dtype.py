"""Wrong on purpose: abbreviates an element type."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-01"
SAYS = r"fields\[0\]\.dtype = 'fp8': unknown dtype; allowed: .*float8_e4m3fn"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, as kernels call its types."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        fields = tuple(
            field.model_copy(update={"dtype": ctx.options.kv_dtype or "fp8"}) for field in arena.fields
        )
        arenas.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "short_dtype", "arenas": tuple(arenas)})
