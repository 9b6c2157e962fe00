"""Wrong on purpose: numbers its arenas by pairs of layers, so that two have one name."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-06"
SAYS = r"arenas\[1\]\.name = 'layers\.0': two arenas share it"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with half as many names as arenas."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = tuple(
        arena.model_copy(update={"name": f"layers.{layer // 2}"}) for layer, arena in enumerate(model.arenas)
    )
    return model.model_copy(update={"name": "twin_arenas", "arenas": arenas})
