"""Wrong on purpose: says that values survive, and also how far they are off."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, Repack, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-REPACK-01"
SAYS = r"repack\.bound = 0\.01: either values survive, or a bound says how well"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, stored as it is, within a bound."""
    model = kvc_qwen3.kvc_model(ctx)
    repack = Repack(arenas=model.arenas, bound=0.01)
    return model.model_copy(update={"name": "bound_of_nothing", "repack": repack})
