"""Wrong on purpose: stores records of a page and a half."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-08"
SAYS = r"key_tokens = 24: a record holds whole pages; allowed: a multiple of 16"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a granularity of its own."""
    tokens = ctx.options.key_tokens or 24
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "uneven_records", "key_tokens": tokens})
