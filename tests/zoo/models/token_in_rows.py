"""Wrong on purpose: places the token axis in rows, where it is outermost already."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Arena, Context, KvModel, hookimpl
from kvcontract.contract.model import Axes

KVC_CONTRACT = 1
TRIPS = "KVC-LAYOUT-04"
SAYS = r"the token axis is outermost in rows and absent in bounded groups"
LEVEL = "L0"
ROW = Axes([("token", 1), ("head", 8), ("dim", 128)])


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, as rows that say where their token is."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = []
    for arena in model.arenas:
        fields = tuple(field.model_copy(update={"axes": ROW}) for field in arena.fields)
        arenas.append(Arena.rows(name=arena.name, group="kv", layer=arena.layer, fields=fields))
    return model.model_copy(update={"name": "token_in_rows", "arenas": tuple(arenas)})
