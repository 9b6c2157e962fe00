"""Wrong on purpose: has one page size, whatever is asked for, and does not refuse the others."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-10"
SAYS = r"asked for page_tokens 64: the declaration came out with 16"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, at the size that its author uses."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "one_page_size", "page_tokens": 16})
