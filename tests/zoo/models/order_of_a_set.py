"""Wrong on purpose: takes its layers in the order of a set of their names.

That order is another in every process, and the same as long as one lasts.
"""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"another process declares something else: arenas\[\d+\]"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, without repeated arenas."""
    model = kvc_qwen3.kvc_model(ctx)
    arenas = {arena.name: arena for arena in model.arenas}
    unique = tuple(arenas[name] for name in set(arenas))
    return model.model_copy(update={"name": "order_of_a_set", "arenas": unique})
