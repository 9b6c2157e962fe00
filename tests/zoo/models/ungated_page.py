"""Wrong on purpose: takes by itself a page size that it says is not allowed."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-07"
SAYS = r"page_tokens = 32: .*allowed: 16 or 64"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a default of its own."""
    tokens = ctx.options.page_tokens or 32
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "ungated_page", "page_tokens": tokens})
