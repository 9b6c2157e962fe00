"""Wrong on purpose: says that keys are scaled by a field that no arena has."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-06"
SAYS = r"fields\[0\]\.scale = 'k_scale': no such field; allowed: v"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a reference into nothing."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        keys, values = arena.fields
        scaled = keys.model_copy(update={"scale": "k_scale"})
        arenas.append(arena.model_copy(update={"fields": (scaled, values)}))
    return model.model_copy(update={"name": "lost_scale", "arenas": tuple(arenas)})
