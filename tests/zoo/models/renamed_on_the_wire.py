"""Wrong on purpose: stores its fields under other names, and leaves it to the runtime which is which."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, Repack, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-01"
SAYS = r"stands on one side only"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a repack."""
    model = kvc_qwen3.kvc_model(ctx)
    stored = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"name": f"stored_{field.name}"}) for field in arena.fields)
        stored.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "renamed_on_the_wire", "repack": Repack(arenas=tuple(stored))})
