"""Wrong on purpose: is cut along an axis that no field has."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-02"
SAYS = r"fields\[0\]\.shard_axis = 'heads': the field has no such axis; allowed: head, dim"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, cut along something else."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"shard_axis": "heads"}) for field in arena.fields)
        arenas.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "lost_axis", "arenas": tuple(arenas)})
