"""Wrong on purpose: looks at the element type that is asked for, and keeps the config's."""

from __future__ import annotations

from dataclasses import replace

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-10"
SAYS = r"asked for kv_dtype float16: no field came out with it"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, of an element type that is checked and then forgotten."""
    asked = kvc_qwen3.kvc_model(ctx)
    kept = kvc_qwen3.kvc_model(replace(ctx, options=ctx.options.model_copy(update={"kv_dtype": None})))
    return kept.model_copy(update={"name": "one_dtype", "numerics": asked.numerics})
