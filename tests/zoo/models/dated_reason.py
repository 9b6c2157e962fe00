"""Wrong on purpose: says in its declaration when it was made."""

from __future__ import annotations

import time

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-05"
SAYS = r"a second call with the same context gave another declaration"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, with a moment in it."""
    reason = f"accuracy gates hold; declared {time.time_ns()} ns after the epoch"
    model = kvc_qwen3.kvc_model(ctx)
    return model.model_copy(update={"name": "dated_reason", "page_tokens_reason": reason})
