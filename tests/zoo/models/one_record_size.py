"""Wrong on purpose: stores records of one size, whatever is asked for."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-10"
SAYS = r"asked for key_tokens 32: the declaration came out with None"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, a page a record."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "one_record_size", "key_tokens": None})
