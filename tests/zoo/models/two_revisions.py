"""Wrong on purpose: states one revision of the contract and declares by another."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 1
TRIPS = "KVC-DECL-03"
SAYS = r"contract = 2: this host serves contract 1"
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration, a revision further."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "two_revisions", "contract": KVC_CONTRACT + 1})
