"""Wrong on purpose: gives an arena to a layer that keeps nothing."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-09"
SAYS = r"arenas\[27\]\.fields = .*: the arena has no bytes; allowed: at least one field"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, the last layer of which shares another's keys and values."""
    model = kvc_qwen3.kvc_model(ctx)
    *arenas, last = model.arenas
    bare = last.model_copy(update={"fields": ()})
    return model.model_copy(update={"name": "bare_arena", "arenas": (*arenas, bare)})
