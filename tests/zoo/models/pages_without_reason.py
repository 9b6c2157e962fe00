"""Wrong on purpose: allows two page sizes and does not say why no others."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-07"
SAYS = r"page_tokens_reason = '': an allowed list states its reason"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, without a reason."""
    return kvc_qwen3.kvc_model(ctx).model_copy(
        update={"name": "pages_without_reason", "page_tokens_reason": ""}
    )
