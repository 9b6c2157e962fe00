"""Wrong on purpose: stores half of the heads, the other half being alike on its author's machine."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, Repack, hookimpl
from kvcontract.contract.model import Axes

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-01"
SAYS = r"'head': 4.*numbers would change"
LEVEL = "L0"
HALF = Axes([("head", 4), ("dim", 128)])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, half of it stored."""
    model = kvc_qwen3.kvc_model(ctx)
    stored = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"axes": HALF}) for field in arena.fields)
        stored.append(arena.model_copy(update={"fields": fields}))
    return model.model_copy(update={"name": "fewer_heads_stored", "repack": Repack(arenas=tuple(stored))})
