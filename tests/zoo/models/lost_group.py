"""Wrong on purpose: the last layer's arena belongs to a group that was renamed."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-06"
SAYS = r"arenas\[27\]\.group = 'full': there is no such group; allowed: kv"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a group's former name left in it."""
    model = kvc_qwen3.kvc_model(ctx)
    *arenas, last = model.arenas
    lost = last.model_copy(update={"group": "full"})
    return model.model_copy(update={"name": "lost_group", "arenas": (*arenas, lost)})
