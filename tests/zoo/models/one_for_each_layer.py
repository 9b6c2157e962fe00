"""Wrong on purpose: hands back a declaration for each layer, in a list."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-04"
SAYS = r"kvc_model = 'list': kvc_model returns one KvModel"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> list[KvModel]:
    """The real declaration, cut up."""
    model = kvc_qwen3.kvc_model(ctx)
    return [
        model.model_copy(update={"name": "one_for_each_layer", "arenas": (arena,)}) for arena in model.arenas
    ]
