"""Wrong on purpose: is written for a revision of the contract that is not there yet."""

from __future__ import annotations

import kvc_qwen3
from kvcontract import Context, KvModel, hookimpl

KVC_CONTRACT = 2
TRIPS = "KVC-DECL-03"
SAYS = r"written for contract 2; this host serves contract 1"
EXIT = 4
LEVEL = "L0"


@hookimpl
def kvc_model(ctx: Context) -> KvModel:
    """The real declaration."""
    return kvc_qwen3.kvc_model(ctx).model_copy(update={"name": "later_revision"})
