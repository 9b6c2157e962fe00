"""Wrong on purpose: uses up its layers at the first call and has none left for the second."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"a second call with the same context gave another declaration"
LEVEL = "L0"
LAYERS = iter(range(28))


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with arenas for the layers that are left."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = tuple(arena for arena, _ in zip(model.arenas, LAYERS, strict=False))
    return model.model_copy(update={"name": "spent_iterator", "arenas": arenas})
