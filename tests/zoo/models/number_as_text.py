"""Wrong on purpose: puts the size of a page into its declaration as text, past all validation."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-04"
SAYS = r"page_tokens = '16': Input should be a valid integer; allowed: an integer"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a page size from a table of texts."""
    model = kvc_qwen3.kvc_model(ctx)
    return model.model_copy(update={"name": "number_as_text", "page_tokens": str(model.page_tokens)})
